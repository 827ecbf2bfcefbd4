"""The names that serve a Trainer of one of Lightning's packages, gathered for the classes that serve both packages.

Among them are the parts of a `Recorder` that depend on the package: a logger, and the events of a fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ThroughputMonitor, Timer
from lightning.pytorch.loggers import Logger
from torch import nn

from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.metrics import metrics_state
from lightning_faulttolerant.state.tensors import flags_state
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.compat import logger_connector_state
from lightning_faulttolerant.trainer.adapters.state import callbacks_state
from lightning_faulttolerant.trainer.evaluation.session import EvaluationSession
from lightning_faulttolerant.trainer.files.compat import HAS_WEIGHTS_ONLY, weights_only_argument
from lightning_faulttolerant.trainer.ranks.strategies import can_be_evaluated, check_strategy
from lightning_faulttolerant.trainer.recorder import Recorder
from lightning_faulttolerant.trainer.resume.schedulers import Schedulers
from lightning_faulttolerant.trainer.save.run_state import named_callbacks
from lightning_faulttolerant.trainer.session import Session
from lightning_faulttolerant.trainer.steps.digests import (
    digest,
    exact,
    exact_metrics,
    learning_rates,
    loss_of,
    optimizers_digest,
    weights_digest,
)
from lightning_faulttolerant.trainer.steps.open_ledger import OpenLedger, begins_while_off

__all__ = [
    "HAS_WEIGHTS_ONLY",
    "EvaluationSession",
    "OpenLedger",
    "Session",
    "TorchCheckpointIO",
    "batch_event",
    "begins_while_off",
    "can_be_evaluated",
    "check_strategy",
    "compat",
    "digest",
    "end_event",
    "listen",
    "shown_metrics",
    "step_event",
    "weights_only_argument",
]


def batch_event(trainer: Trainer, batch: object, batch_idx: int) -> dict[str, object]:
    """Return the contents of a batch, and the metrics that the trainer shows before it."""
    fetches = compat.step_fetches(trainer)  # then Lightning passes the batch of the previous step
    place = compat.num_completed(trainer) if fetches else batch_idx
    content = None if fetches else digest(batch)
    # Not `trainer.callback_metrics`: it computes, and so changes, the metrics that it shows.
    shown = digest(logger_connector_state(trainer)["metrics"])
    return {"epoch": trainer.current_epoch, "batch": place, "content": content, "shown": shown}


def step_event(trainer: Trainer, outputs: object, batch: object, batch_idx: int) -> dict[str, object]:
    """Return the loss of a step, and the learning rates after it."""
    rates = learning_rates(trainer)
    fetched = {"content": digest(batch)} if compat.step_fetches(trainer) else {}
    place = {"epoch": trainer.current_epoch, "batch": batch_idx}
    return {**place, "loss": exact(loss_of(outputs)), "learning_rates": rates, **fetched}


def shown_metrics(trainer: Trainer) -> dict[str, object]:
    """Return the metrics that callbacks see."""
    return exact_metrics(trainer.callback_metrics)


def listen(trainer: Trainer, recorder: Recorder) -> None:
    """Let `recorder` receive what loggers receive."""
    if not any(isinstance(logger, RecordingLogger) for logger in trainer.loggers):
        trainer.loggers = [*trainer.loggers, RecordingLogger(recorder)]


class RecordingLogger(Logger):
    """Records the values that loggers receive."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @property
    def name(self) -> str:
        """Return the logger's name."""
        return "recording"

    @property
    def version(self) -> int:
        """Return the logger's version."""
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record values with their step."""
        self._recorder.write("log", step=step, metrics=exact_metrics(metrics))

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Do nothing: hyperparameters are logged once per process."""


def end_event(trainer: Trainer) -> dict[str, object]:
    """Return the final state of a fit: weights, optimizers, metrics, callbacks."""
    module = trainer.lightning_module
    states = {
        "schedulers": Schedulers(trainer).plain([one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]),
        "held generators": HeldGenerators({"module": module, "loaders": compat.user_loaders(trainer)}).state_dict(),
        "metric states": metrics_state(module),
        "flags": flags_state(module),
        "shown": logger_connector_state(trainer)["metrics"],
        "trainer": [trainer.max_epochs, trainer.should_stop, trainer.accumulate_grad_batches, trainer.global_step],
    }
    return {
        "metrics": shown_metrics(trainer),
        "callbacks": _callbacks(trainer),
        "weights": weights_digest(trainer),
        "optimizers": optimizers_digest(trainer),
        **{name: digest(state) for name, state in states.items()},
    }


def _callbacks(trainer: Trainer) -> dict[str, str]:
    """Return a digest of each callback's state, of its other attributes that we keep, and of the modules it holds."""
    # Two of these measure time, and checkpoint callbacks name files: both differ from run to run.
    differing = (Timer, ThroughputMonitor, Checkpoint)
    compared = [c for c in compat.callbacks(trainer) if not isinstance(c, differing)]
    kept = callbacks_state(trainer, named_callbacks(compat.callbacks(trainer)))
    states, plain = {}, Schedulers(trainer).plain
    for name, callback in named_callbacks(compared).items():
        modules = {key: value.state_dict() for key, value in vars(callback).items() if isinstance(value, nn.Module)}
        state = [plain(callback.state_dict()), kept.get(name), modules]
        if any(state):
            states[name] = digest(state)
    return states

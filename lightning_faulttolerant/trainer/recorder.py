"""Writes down everything that a fit does, event by event, so that two fits can be compared bit by bit.

Each event goes to its file at once, so that what a killed process did is there.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ThroughputMonitor, Timer
from lightning.pytorch.loggers import Logger
from torch import nn

from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.metrics import metrics_state
from lightning_faulttolerant.state.tensors import flags_state
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import callbacks_state
from lightning_faulttolerant.trainer.callback import FaultTolerance
from lightning_faulttolerant.trainer.capture import named_callbacks
from lightning_faulttolerant.trainer.ledger.digests import (
    digest,
    exact,
    learning_rates,
    optimizers_digest,
    weights_digest,
)
from lightning_faulttolerant.trainer.logged.compat import logger_connector_state


class Recorder(Callback):
    """Records batches, losses, learning rates, logged values and validation results of a fit.

    Args:
        path: The file, one JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told_resume = False

    def write(self, event: str, **values: Any) -> None:
        """Add one event."""
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps({"event": event, **values}, sort_keys=True).encode() + b"\n")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to the loggers."""
        if stage == "fit" and not any(isinstance(logger, RecordingLogger) for logger in trainer.loggers):
            trainer.loggers = [*trainer.loggers, RecordingLogger(self)]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the contents of a batch, and the metrics that the trainer shows before it."""
        self._tell_resume(trainer)
        fetches = compat.step_fetches(trainer)  # then Lightning gives the batch of the step before
        place = compat.num_completed(trainer) if fetches else batch_idx
        content = None if fetches else digest(batch)
        # Not by `trainer.callback_metrics`, which computes and changes what it shows.
        shown = digest(logger_connector_state(trainer)["metrics"])
        self.write("batch", epoch=trainer.current_epoch, batch=place, content=content, shown=shown)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss and the learning rates."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        rates = learning_rates(trainer)
        fetched = {"content": digest(batch)} if compat.step_fetches(trainer) else {}
        self.write(
            "step", epoch=trainer.current_epoch, batch=batch_idx, loss=exact(loss), learning_rates=rates, **fetched
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that a validation run begins."""
        if not trainer.sanity_checking:
            self._tell_resume(trainer)
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self.write("validation", epoch=trainer.current_epoch, batch=batch)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the contents of a validation batch."""
        if not trainer.sanity_checking:
            self.write("validation batch", batch=batch_idx, loader=dataloader_idx, content=digest(batch))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the results of a validation run."""
        if not trainer.sanity_checking:
            metrics = {name: exact(value) for name, value in sorted(trainer.callback_metrics.items())}
            self.write("validated", epoch=trainer.current_epoch, metrics=metrics)

    def _tell_resume(self, trainer: Trainer) -> None:
        if self._told_resume:
            return
        self._told_resume = True
        for callback in compat.callbacks(trainer):
            report = callback.resume_report if isinstance(callback, FaultTolerance) else None
            if report is not None:
                place = {"epoch": report.epoch, "batch": report.batch, "text": report.position}
                self.write("resumed", exact=report.is_exact, **place)


class RecordingLogger(Logger):
    """Records what loggers receive."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @property
    def name(self) -> str:
        """Give the logger's name."""
        return "recording"

    @property
    def version(self) -> int:
        """Give the logger's version."""
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record values with their step."""
        self._recorder.write("log", step=step, metrics={name: exact(value) for name, value in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Take no notice: hyperparameters are logged once per process."""


class KillAt(Callback):
    """Sends a signal to this process when it trains its `batch`-th batch (counted in this process, from 0).

    Args:
        batch: When.
        signum: Which signal.
        to_group: Whether the whole process group gets it, as with Ctrl-C in a terminal.
        hook: Where in the batch: ``start``, ``end`` or ``validation`` (the first validation batch behind it).
        rank: On which rank; on all by default.
    """

    def __init__(
        self,
        batch: int,
        *,
        signum: int = signal.SIGKILL,
        to_group: bool = False,
        hook: str = "start",
        rank: int | None = None,
    ) -> None:
        self._batch = batch
        self._signum = signum
        self._to_group = to_group
        self._hook = hook
        self._rank = rank
        self._seen = -1

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Count, and strike if it is time."""
        self._seen += 1
        self._strike("start", trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Strike if it is time."""
        self._strike("end", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Strike if it is time."""
        if not trainer.sanity_checking:
            self._strike("validation", trainer)

    def _strike(self, hook: str, trainer: Trainer) -> None:
        is_here = self._rank is None or self._rank == trainer.global_rank
        if is_here and self._seen == self._batch and self._hook == hook:
            self._batch = -2
            if self._to_group:
                os.killpg(os.getpgid(0), self._signum)
            else:
                os.kill(os.getpid(), self._signum)


def record_end(recorder: Recorder, trainer: Trainer, draws: Mapping[str, Any]) -> None:
    """Record what a fit leaves behind: weights, optimizers, metrics, callbacks, and the generators' next draws."""
    module = trainer.lightning_module
    metrics = {name: exact(value) for name, value in sorted(trainer.callback_metrics.items())}
    states = {
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "held generators": HeldGenerators({"module": module, "loaders": compat.user_loaders(trainer)}).state_dict(),
        "metric states": metrics_state(module),
        "flags": flags_state(module),
        "shown": logger_connector_state(trainer)["metrics"],
        "trainer": [trainer.max_epochs, trainer.should_stop, trainer.accumulate_grad_batches, trainer.global_step],
    }
    recorder.write(
        "end",
        metrics=metrics,
        draws=dict(draws),
        callbacks=_callbacks(trainer),
        weights=weights_digest(trainer),
        optimizers=optimizers_digest(trainer),
        **{name: digest(state) for name, state in states.items()},
    )


def _callbacks(trainer: Trainer) -> dict[str, str]:
    """Return a digest of each callback's state, of what it keeps besides, and of the modules that it holds."""
    # Two tell the time, and checkpoint callbacks name files: both are other ones in every run.
    differing = (Timer, ThroughputMonitor, Checkpoint)
    compared = [c for c in compat.callbacks(trainer) if not isinstance(c, differing)]
    kept = callbacks_state(trainer, named_callbacks(compat.callbacks(trainer)))
    states = {}
    for name, callback in named_callbacks(compared).items():
        modules = {key: value.state_dict() for key, value in vars(callback).items() if isinstance(value, nn.Module)}
        state = [callback.state_dict(), kept.get(name), modules]
        if any(state):
            states[name] = digest(state)
    return states

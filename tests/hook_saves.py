"""Runs that resume from a checkpoint that other code saves inside a hook."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_faulttolerant.testing.exactness import RunOutcome, Runs, compare
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.recorder import Recorder
from tests.runs import Net, fit_net

NAME = "theirs.ckpt"
_FROM = "from"
# Where a run that resumes from this hook's checkpoint continues: at the batch or the validation run of the save.
_BEGINS_AT = {
    "on_train_batch_start": "batch",
    "training_step": "batch",
    "on_before_optimizer_step": "batch",
    "on_validation_start": "validation",
    "on_validation_batch_end": "validation batch",  # with several ranks, the whole run is repeated
}


def save(trainer: Trainer) -> None:
    """Save a checkpoint now, and record the save in the trace."""
    for callback in compat.callbacks(trainer):
        if isinstance(callback, Recorder):
            callback.write("saved")
    trainer.save_checkpoint(Path(trainer.default_root_dir) / NAME)


class Countdown:
    """Saves when a hook is called for the `at`-th time outside the sanity check, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, trainer: Trainer) -> None:
        if not trainer.sanity_checking:
            if self.left == 0:
                save(trainer)
            self.left -= 1


def saver(hook: str, at: int, *, kind: type[Callback] = Callback) -> Callback:
    """Return a callback that saves in the `at`-th call of its `hook`."""
    countdown = Countdown(at)

    def call(self: Callback, trainer: Trainer, *_: Any, **__: Any) -> None:
        trainer_save_checkpoint(countdown, trainer)

    return type("Saves", (kind,), {hook: call})()


def trainer_save_checkpoint(countdown: Countdown, trainer: Trainer) -> None:
    """Save indirectly: the hook's code does not show the save."""
    countdown(trainer)


def saving_module(hook: str, at: int, base: type[LightningModule] = Net) -> LightningModule:
    """Return a module that saves in the `at`-th call of its `hook`."""
    countdown = Countdown(at)

    def call(self: LightningModule, *arguments: Any, **keywords: Any) -> Any:
        result = getattr(base, hook)(self, *arguments, **keywords)
        countdown(self.trainer)
        return result

    return type("SavingNet", (base,), {hook: call})()  # type: ignore[no-any-return]


def assert_continues_from(
    hook: str,
    *,
    users: Callable[[], list[Callback]] = list,
    module: Callable[[], LightningModule] = Net,
    train: Callable[[], Any] | None = None,
    validation: Callable[[], Any] | None = None,
    num_ranks: int = 1,
    **arguments: Any,
) -> None:
    """Check that a fit obeys the law when it resumes from the checkpoint that one of its parts saves in `hook`."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        origin = directory / _FROM
        return fit_net(
            [*callbacks, *users()],
            directory,
            train=train and train(),
            validation=validation and validation(),
            module=None if module is Net else module(),
            ckpt_path=origin.read_text() if origin.exists() else None,
            **arguments,
        )

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        # The budget allows every capture. A first save by an unforeseen way would have none otherwise.
        runs = Runs(fit, root, {"every_n_train_steps": 1000, "overhead_budget": 1.0}, 60.0, num_ranks=num_ranks)
        reference = runs.start("uninterrupted", [], seed=1, with_callback=False)
        assert reference.exit_code == 0, reference.output
        saved = runs.start("saved", [], seed=1, with_callback=True)
        assert saved.exit_code == 0, saved.output
        compare(_events(reference), _events(saved), "the run with the callback")
        assert (root / "saved" / NAME).exists(), saved.output
        (root / "resumed").mkdir()
        (root / "resumed" / _FROM).write_text(str(root / "saved" / NAME))
        resumed = runs.start("resumed", [], seed=99, with_callback=True)
        assert resumed.exit_code == 0, resumed.output
        begins_at = _BEGINS_AT.get(hook, "")
        begins_at = "validation" if num_ranks > 1 and begins_at == "validation batch" else begins_at
        expected = [_after(events, begins_at) for events in _events(reference)]
        compare(expected, [_unmarked(events) for events in _events(resumed)], f"the run that continues from {hook}")


def _events(outcome: RunOutcome) -> list[list[dict[str, Any]]]:
    return [trace.events for trace in outcome.traces]


def _after(events: list[dict[str, Any]], begins_at: str) -> list[dict[str, Any]]:
    names = [event["event"] for event in events]
    cut = names.index("saved")
    if begins_at:
        cut = max(i for i, name in enumerate(names[:cut]) if name == begins_at)
    return _unmarked(events[cut:])


def _unmarked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] != "saved"]

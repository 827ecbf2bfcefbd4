"""Runs of W&B and MLflow: a fit that resumes continues in its earlier run.

Only the id of the run is changed on a user's logger for good. A run that the user has named stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer.experiments import compat
from lightning_faulttolerant.trainer.experiments.mlflow_points import MLflowPoints
from lightning_faulttolerant.trainer.experiments.wandb_rows import WandbRows
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.process import has_told

_RUNNING, _KILLED = "RUNNING", "KILLED"
_BEGUN = "Its run has begun before the fit: give WandbLogger, or wandb.init, an id."
_UNKNOWN = "Its documentation says how to name the run in which it is to continue."
_ADVICE = {
    "CometLogger": "Give it an experiment_key.",
    "NeptuneLogger": "Give it run=neptune.init_run(with_id=...).",
    "LitLogger": "Give it a name.",
}


class _ServiceFollower(Protocol):
    """Knows how much a logger has logged so far, without asking its service."""

    def state_dict(self) -> dict[str, Any]:
        """Return how much was logged."""

    def resume(self, state: Mapping[str, Any]) -> list[str]:
        """Skip what the run already had when it was continued; return what a user should know."""


class Experiments:
    """The runs of a trainer's WandbLogger and MLFlowLogger.

    Args:
        trainer: The trainer of the loggers.
        patches: Removes our counting from their runs later.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._followers: dict[int, _ServiceFollower] = {}
        self._resumed: list[tuple[str, _ServiceFollower, Mapping[str, Any]]] = []
        self.notes: list[str] = []
        """What a user should know about loggers that could not continue, and about missing or duplicate rows."""

    def tell_unknown(self) -> None:
        """Name the loggers that will not continue in their run, once. Call it before they begin."""
        if not self._trainer.is_global_zero:
            return
        for logger in self._trainer.loggers:
            advice = _advice(logger)
            name = type(logger).__qualname__
            if advice is not None and name not in has_told:
                has_told.add(name)
                tell(f"{name} does not continue in its run after a restart. {advice}")

    def resume(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Let each logger continue in its run. Call it before the loggers begin theirs.

        Args:
            states: The result of `state_dict`.
        """
        loggers = dict(self._keyed())
        for state in states:
            logger = loggers.get(state["key"])
            if logger is None:
                self.notes.append(f"there is no {state['key']} any more, which logged to the run {state['id']}")
            elif self._continues(state["key"], logger, state["id"]):
                self._begin(state["key"], logger, state)

    def settle(self) -> None:
        """Skip what is logged again from now on: the fit has resumed."""
        for key, follower, state in self._resumed:
            self.notes += [f"{key}: {note}" for note in follower.resume(state)]
        self._resumed.clear()

    def end(self, exception: BaseException | None) -> None:
        """Make MLflow mark a run as killed if it was told to stop: Lightning would mark it as failed."""
        if not isinstance(exception, TrainingStopped):
            return
        for _, logger in self._keyed():
            if isinstance(logger, MLFlowLogger):
                _finalize_once_as(logger, _KILLED)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the run of each logger that has begun one, and how much was logged to it so far."""
        loggers = [(key, logger) for key, logger in self._keyed() if compat.has_begun(logger)]
        return [
            {"key": key, "id": str(compat.run_id(logger)), **self._follower(logger).state_dict()}
            for key, logger in loggers
        ]

    def _follower(self, logger: compat.TrackingLogger, *, is_resumed: bool = False) -> _ServiceFollower:
        if id(logger) not in self._followers:
            self._followers[id(logger)] = (
                WandbRows(logger, self._patches)
                if isinstance(logger, WandbLogger)
                else MLflowPoints(logger, self._patches, is_resumed=is_resumed)
            )
        return self._followers[id(logger)]

    def _continues(self, key: str, logger: compat.TrackingLogger, run_id: str) -> bool:
        """Return whether a logger continues in its saved run; if so, give it that run."""
        own = compat.run_id(logger)
        if own == run_id:
            return True
        if compat.starts_over(logger):
            self.notes.append(f"{key} is to begin a run at each start; what was logged so far is in the run {run_id}")
            return False
        if not compat.has_begun(logger):
            if own is not None:
                self.notes.append(f"{key} was given the run {own}; what was logged so far is in the run {run_id}")
                return False
        elif isinstance(logger, WandbLogger):
            self.notes.append(
                f"{key} had begun the run {own} before the fit; what was logged so far is in the run {run_id}. Give it"
                f" id={run_id!r}"
            )
            return False
        else:
            logger.experiment.set_terminated(own, _KILLED)
            self.notes.append(f"{key} had begun the run {own} before the fit; it continues in the run {run_id}")
        compat.set_run_id(logger, run_id)
        return True

    def _begin(self, key: str, logger: compat.TrackingLogger, state: Mapping[str, Any]) -> None:
        """Begin the run of a logger, and find out what it already has."""
        try:
            found = logger.experiment.id if isinstance(logger, WandbLogger) else _set_running(logger)
            if found == state["id"]:
                self._resumed.append((key, self._follower(logger, is_resumed=True), state))
                return
            self.notes.append(
                f"{key} logs to the run {found}, which the script has begun; what was logged so far is in the run"
                f" {state['id']}. Call wandb.init(id={state['id']!r}, resume='allow')"
            )
        except Exception as error:
            if isinstance(logger, WandbLogger):  # nothing can be logged: Lightning would get the same error
                raise
            self.notes.append(f"{key} begins a new run: the run {state['id']} can't be continued: {error}")
            compat.set_run_id(logger, None)

    def _keyed(self) -> Iterator[tuple[str, compat.TrackingLogger]]:
        """Yield the loggers by class name and number within the class."""
        if not self._trainer.is_global_zero:
            return
        numbers: dict[str, int] = {}
        for logger in self._trainer.loggers:
            if isinstance(logger, (WandbLogger, MLFlowLogger)) and compat.is_tracking(logger):
                name = type(logger).__qualname__
                yield f"{name}#{numbers.setdefault(name, 0)}", logger
                numbers[name] += 1


def _set_running(logger: MLFlowLogger) -> str:
    run_id = str(logger.run_id)
    logger.experiment.update_run(run_id, _RUNNING)
    return run_id


def _finalize_once_as(logger: Logger, status: str) -> None:
    """Give the next end of a logger another status."""
    patches = Patches()

    def finalize_as(finalize: Method, _: str) -> None:
        patches.undo()
        finalize(status)

    patches.around(logger, "finalize", finalize_as)


def _advice(logger: Logger) -> str | None:
    """Return what to do so that a logger continues its run after a restart; ``None`` if it does so by itself."""
    if isinstance(logger, WandbLogger) and compat.is_tracking(logger):
        is_own = compat.given_id(logger) is not None or compat.starts_over(logger)
        return None if is_own or not compat.has_begun_before(logger) else _BEGUN
    return _ADVICE.get(type(logger).__qualname__, _UNKNOWN) if compat.is_unknown(logger) else None

"""The end of a fit by an exception: save what can still be saved, and never hide the exception."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import BOUNDARY, TrainerPosition, position_of
from lightning_faulttolerant.trainer.save.autosave import Autosaver
from lightning_faulttolerant.trainer.stop.signals import say_unsaved


def end_interrupted(
    trainer: Trainer,
    boundary: Boundary | None,
    autosaver: Autosaver,
    exception: BaseException,
    resumed_from: str | None,
) -> None:
    """Save what can be saved of a fit that an exception ended, and report it.

    Args:
        trainer: The trainer that runs the fit.
        boundary: The object that saves the fit, or ``None`` if nothing is to be saved.
        autosaver: The fit's autosaver. It may still be writing in the background.
        exception: The exception that ended the fit.
        resumed_from: The checkpoint that the fit started from, if any.
    """
    autosaver.settle()
    is_stop = isinstance(exception, TrainingStopped)
    if boundary is not None and not (is_stop and boundary.is_settled(position_of(trainer, BOUNDARY))):
        _save(boundary, autosaver, exception)
    if isinstance(exception, TrainingStopped):
        tell_stopped(exception, autosaver.pace.saved, resumed_from)


def tell_stopped(exception: TrainingStopped, saved: TrainerPosition | None, resumed_from: str | None) -> None:
    """Print where a stopped run will continue: at its last save, or else where this start began."""
    start = "from the beginning" if resumed_from is None else f"from {resumed_from}"
    place = start if saved is None else str(saved)
    tell(f"\n{exception.reason}. Run the same command again to continue {place}.")


def _save(boundary: Boundary, autosaver: Autosaver, exception: BaseException) -> None:
    name, pace = type(exception).__name__, autosaver.pace
    try:
        is_tried = boundary.save_interrupted()
    except Exception as error:  # noqa: BLE001 - the user must see the original exception, and the last autosave exists
        rank_zero_warn(f"{name}: the state could not be saved, the last autosave stays: {error!r}")
        return
    if isinstance(exception, TrainingStopped):
        say_unsaved(exception, pace.unsaved if is_tried else "")
    elif is_tried and pace.unsaved:
        tell(f"\n{name}: {pace.unsaved}.")
    else:
        tell(f"\n{name}: {_what_there_is(pace.saved, is_new=is_tried)}.")


def _what_there_is(position: TrainerPosition | None, *, is_new: bool) -> str:
    if position is None:
        return "this start has saved nothing yet"
    return f"{'saved' if is_new else 'the last autosave stays'}, {position}"

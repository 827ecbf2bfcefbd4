"""The end of a fit by an exception: what can still be saved is saved, and the exception is never hidden."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer.autosave import Autosaver
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.position import BOUNDARY, Position, position_of
from lightning_faulttolerant.trainer.telling import tell


def end_interrupted(
    trainer: Trainer, boundary: Boundary | None, autosaver: Autosaver, exception: BaseException
) -> None:
    """Save what can be saved of a fit that an exception ended, and say so.

    Args:
        trainer: Whose fit it is.
        boundary: Saves it; ``None`` if nothing is to be saved.
        autosaver: May be writing behind training still.
        exception: What ended the fit.
    """
    autosaver.settle()
    is_stop = isinstance(exception, TrainingStopped)
    if boundary is not None and not (is_stop and boundary.is_settled(position_of(trainer, BOUNDARY))):
        _save(boundary, autosaver, exception)
    if isinstance(exception, TrainingStopped):
        tell_stopped(exception, autosaver.saved)


def tell_stopped(exception: TrainingStopped, saved: Position | None) -> None:
    """Say where a run that was stopped will go on."""
    place = "from the beginning" if saved is None else str(saved)
    tell(f"\n{exception.reason}. Run the same command again to go on {place}.")


def _save(boundary: Boundary, autosaver: Autosaver, exception: BaseException) -> None:
    name = type(exception).__name__
    try:
        saved = boundary.save_interrupted()
    except Exception as error:  # noqa: BLE001 - the user must see his own exception; the last autosave is there
        rank_zero_warn(f"{name}: the state could not be saved, the last autosave stays: {error!r}")
        return
    if not isinstance(exception, TrainingStopped):
        tell(f"\n{name}: {'saved' if saved else 'the last autosave stays'}, {autosaver.saved}.")

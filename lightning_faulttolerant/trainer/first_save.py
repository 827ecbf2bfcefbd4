"""Whether the first boundary of a resumed fit needs an autosave: the one that was read may be that very state."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.choice import Choice
from lightning_faulttolerant.trainer.position import Position
from lightning_faulttolerant.trainer.resume import Resume


def is_saved(trainer: Trainer, choice: Choice | None, resume: Resume | None, position: Position) -> bool:
    """Return whether an autosave of this run holds the state of `position`, and a later start would take it.

    That it loads was seen when it was read, and that the directory can be written when the lock was taken.

    Args:
        trainer: Whose fit it is.
        choice: What the fit continues from.
        resume: The resume from it, if there is one.
        position: Of the first boundary.
    """
    if choice is None or not choice.is_autosave or resume is None or resume.report is None:
        return False
    is_of_this_start = (resume.owed("origin"), resume.owed("world_size")) == (choice.origin, trainer.world_size)
    return is_of_this_start and resume.position == position and resume.report.is_exact

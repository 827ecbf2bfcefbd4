"""Whether the first boundary of a resumed fit needs an autosave. The one that was read may hold the same state."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.resume.choice import Choice
from lightning_faulttolerant.trainer.resume.resume import Resume


def is_saved(trainer: Trainer, choice: Choice | None, resume: Resume | None, position: TrainerPosition) -> bool:
    """Return whether an autosave of this run holds the state of `position`, and a later start would take it.

    The autosave loads: it was just read. The directory can be written: the lock was taken in it.

    Args:
        trainer: The trainer that runs the fit.
        choice: The checkpoint that the fit continues from.
        resume: The resume from that checkpoint, if there is one.
        position: The position of the first boundary.
    """
    if choice is None or not choice.is_autosave or resume is None or resume.report is None:
        return False
    is_of_this_start = (resume.owed("origin"), resume.owed("world_size")) == (choice.origin, trainer.world_size)
    return is_of_this_start and resume.position == position and resume.report.is_exact

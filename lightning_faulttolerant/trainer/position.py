"""Where in a run a state was taken, and which of two states is further on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch import Trainer

BOUNDARY = "boundary"
VALIDATION = "validation"
FINISHED = "finished"
_EXACT = (BOUNDARY, VALIDATION, FINISHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in a run.

    Args:
        where: ``boundary``: before batch `batch` of the epoch is fetched; ``validation``: at the start of a validation
            run, batch `batch` - 1 being the last that was trained; ``finished``: behind the last batch of all; else the
            name of the hook in which somebody else saved.
        epoch: Counted from 0.
        batch: How many batches of the epoch are consumed.
        global_step: Optimizer steps so far.
    """

    where: str
    epoch: int
    batch: int
    global_step: int

    @property
    def can_be_exact(self) -> bool:
        """Return whether a run that resumes here can be exact."""
        return self.where in _EXACT

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        places = {
            BOUNDARY: f"before batch {self.batch} of epoch {self.epoch}",
            VALIDATION: f"at the validation run behind batch {self.batch} of epoch {self.epoch}",
            FINISHED: "behind the end of the fit",
        }
        return places.get(self.where, f"in {self.where}, batch {self.batch} of epoch {self.epoch}")


def position_of(trainer: Trainer, where: str) -> Position:
    """Return where `trainer` is now."""
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return Position(where=where, epoch=trainer.current_epoch, batch=batch, global_step=trainer.global_step)


def progress_of(checkpoint: Mapping[str, Any], part: Mapping[str, Any] | None) -> float:
    """Return how far a checkpoint is on: training batches begun, or infinity behind the end of the fit."""
    if part is not None and part["position"]["where"] == FINISHED:
        return float("inf")
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loops.get("epoch_loop.batch_progress", {})
    begun: float = progress.get("total", {}).get("ready", 0)
    return begun

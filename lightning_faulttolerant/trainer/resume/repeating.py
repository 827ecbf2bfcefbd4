"""What follows from the repetition of a fit: a line if it was identical, a stop or a warning if it was not."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import final

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import NotRepeatedError
from lightning_faulttolerant.records.batches import BatchRecord
from lightning_faulttolerant.state.reachable import is_users_module
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.run.beginning import Beginning
from lightning_faulttolerant.trainer.run.fingerprint import accepting, names_in
from lightning_faulttolerant.trainer.steps.repetition import OUTPUT, OtherBatch, Repetition

_log = logging.getLogger(__name__)
_MAX_FILES = 5
_EXIT_CODE = 77


@final
class Repeating:
    """The record of a fit, and what follows from the comparison with it.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The fit's loaders.
        beginning: Knows the directory and the number of the fit.
        resume: The resume, if the fit continues from a checkpoint.
        is_on: Says whether the fit trains, and not a finder in the middle of it.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        beginning: Beginning,
        resume: Resume | None,
        *,
        is_on: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._resume = resume
        self.repetition: Repetition | None = None
        place, is_own = beginning.place, resume is not None and resume.is_of_run
        name = f"{place.directory} fit {place.number} rank {trainer.global_rank} of {trainer.world_size}"
        try:
            record = BatchRecord(name, is_new=not is_own, sources=_sources())
        except OSError as error:
            _log.warning("Batches are not noted, so a later start can't compare those that it repeats: %s", error)
            return
        self.repetition = Repetition(trainer, loaders, record, is_on=is_on, compares=is_own, on_end=self._end)
        if resume is not None:
            resume.proving.repeat(self.repetition)

    def take_seams(self, patches: Patches) -> None:
        """Begin to note batches."""
        if self.repetition is not None:
            self.repetition.take_seams(patches)

    def close(self, *, is_finished: bool) -> None:
        """Close the record; remove it if the fit is finished."""
        if self.repetition is not None:
            self.repetition.close(is_finished=is_finished)

    def _end(self, repetition: Repetition, other: OtherBatch | None) -> None:
        assert self._resume is not None
        proof = self._resume.proving.proof
        if proof.num_repeated and other is None:
            batches = (
                "1 repeated batch was" if proof.num_repeated == 1 else f"{proof.num_repeated} repeated batches were"
            )
            tell(f"{batches} identical to those of process {proof.repeats_process}")
        if other is None:
            return
        settings = [*self._resume.changed_arithmetic, *nondeterministic(self._trainer)]
        if other.kind == OUTPUT and settings:
            _log.warning("%s. The arithmetic of this run may differ: %s.", other, "; ".join(settings))
            return
        changed = repetition.changed_sources
        more = f" and {len(changed) - _MAX_FILES} more" if len(changed) > _MAX_FILES else ""
        edit = f" These files have changed since: {', '.join(changed[:_MAX_FILES])}{more}." if changed else ""
        self._resume.take_late(str(other), lambda lines: _stop(lines, edit))


def _stop(lines: list[str], edit: str) -> NotRepeatedError:
    reason = (
        f"This run does not repeat exactly what it has trained before. {lines[0]}.{edit} Its last autosave stays. "
        f"To continue all the same, type:\n{accepting(names_in(lines))}"
    )
    _log.error("%s", reason)
    return NotRepeatedError(_EXIT_CODE, reason)


def nondeterministic(trainer: Trainer) -> list[str]:
    """Return the settings that make the arithmetic of a run nondeterministic; on the CPU there are none."""
    if trainer.strategy.root_device.type == "cpu":
        return []
    found = [] if torch.are_deterministic_algorithms_enabled() else ["use_deterministic_algorithms is off"]
    if torch.backends.cudnn.benchmark:
        found.append("cudnn.benchmark is on")
    if not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        found.append("CUBLAS_WORKSPACE_CONFIG is not set")
    return found


def _sources() -> Mapping[str, int]:
    """Return a number for each source file of the user's that differs when the file is written again."""
    found = {}
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and is_users_module(module) and os.path.isfile(path):
            status = os.stat(path)
            found[path] = status.st_mtime_ns ^ status.st_size
    return found

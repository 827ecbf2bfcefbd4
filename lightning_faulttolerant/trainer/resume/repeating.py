"""What follows from the repetition of a run: a line if it was identical, a stop or a warning if it was not."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.records.batches import BatchRecord
from lightning_faulttolerant.state.reachable import is_users_module
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import function_of
from lightning_faulttolerant.trainer.resume.proof import Proving
from lightning_faulttolerant.trainer.run.beginning import PlaceOfFit
from lightning_faulttolerant.trainer.run.changes import NamedDifference
from lightning_faulttolerant.trainer.run.fingerprint import accepting, warn_late
from lightning_faulttolerant.trainer.steps.repetition import OTHER_RESULT, Repetition
from lightning_faulttolerant.trainer.stopping import Stopping

_log = logging.getLogger(__name__)
_MAX_FILES = 5


def repetition_of(
    trainer: Trainer,
    loaders: Loaders,
    place: PlaceOfFit,
    proving: Proving | None,
    stopping: Stopping,
    patches: Patches,
    *,
    life: str,
    is_on: Callable[[], bool],
) -> Repetition | None:
    """Return what notes the batches of a fit or an evaluation; ``None`` if they can't be noted.

    Args:
        trainer: The trainer that runs it.
        loaders: Its loaders.
        place: Its directory and its number.
        proving: Takes what is repeated, if an earlier process of the run is continued.
        stopping: Stops the run if a batch differs.
        patches: Undoes what it replaces.
        life: An identifier that is new each time the run starts from the beginning.
        is_on: Says whether the run itself is in progress, and not a finder in the middle of it.
    """
    function, rank = function_of(trainer), trainer.global_rank
    name = f"{place.directory} {function} {place.number} rank {rank} of {trainer.world_size}"
    try:
        record = BatchRecord(name, is_new=proving is None, life=life, sources=_sources())
    except OSError as error:
        _log.warning("Batches are not noted, so a later start can't compare those that it repeats: %s", error)
        return None
    found = Repetition(trainer, loaders, record, is_on=is_on, on_end=partial(_end, trainer, proving, stopping))
    found.take_seams(patches)
    settings = nondeterministic(trainer)
    if proving is not None:
        proving.repeat(found)
    elif settings:
        tell(f"The kernels of this run may be nondeterministic: {'; '.join(settings)}. Its state resumes exactly.")
    return found


def _end(
    trainer: Trainer, proving: Proving | None, stopping: Stopping, repetition: Repetition, other: NamedDifference | None
) -> bool:
    """Say that all batches were identical, or stop the run because of one that was not. Return whether it continues."""
    num, process = repetition.num_repeated, f"process {repetition.repeats_process}"
    if other is None:
        if num:
            others = repetition.num_logged_otherwise
            times = f"{others} time{'s' * (others != 1)}"
            logged = f". Logged values differ {times}, as those of a clock do" if others else ""
            tell(
                f"{num} repeated {'batch was' if num == 1 else 'batches were'} identical to those of {process}{logged}"
            )
        if left := len(repetition.known):
            _log.warning("This is another run: batches that %s has run, and this process has not: %d.", process, left)
        return True
    assert proving is not None  # or there would be no batch to compare with
    settings = [*proving.changed_arithmetic, *nondeterministic(trainer)]
    if other.name == OTHER_RESULT and settings:
        _log.warning("%s. The arithmetic of this run may differ: %s.", other, "; ".join(settings))
        return True
    if not proving.comparison.take_read_back([other]):
        warn_late([str(other)])
        return True
    edits = "".join(f" Note that {line}." for line in edited(repetition))
    reason = (
        f"This run does not repeat exactly what it did before. {other}.{edits} Its last autosave stays. To continue "
        f"all the same, type:\n{accepting([other.name])}"
    )
    _log.error("%s", reason)
    stopping.refuse(reason)
    return False


def edited(repetition: Repetition) -> list[str]:
    """Return a line that names the source files of the user's that have changed since the last process, if any."""
    changed = repetition.changed_sources
    more = f" and {len(changed) - _MAX_FILES} more" if len(changed) > _MAX_FILES else ""
    return [f"these files have changed since: {', '.join(changed[:_MAX_FILES])}{more}"] if changed else []


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

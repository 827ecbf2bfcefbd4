"""``prune``: delete old autosaves, but never the newest one that verifies."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field

from lightning_faulttolerant.checkpoint import autosave_files
from lightning_faulttolerant.checkpoint.autosave_files import is_kept, remove_unused, unused_bases
from lightning_faulttolerant.cli import found, verification
from lightning_faulttolerant.cli.found import real, run_directory
from lightning_faulttolerant.cli.text import at_least_1, plural, reason_of, safe, size_text
from lightning_faulttolerant.errors import FaultToleranceError, RunInUseError
from lightning_faulttolerant.storage.lock import open_lock
from lightning_faulttolerant.storage.store import open_store

DESCRIPTION = """\
Keep the newest N verified autosaves of each fit below DIR, and delete the older ones. If DIR is a checkpoint,
its fit is pruned. Only files with the names of autosaves are deleted: no file of ModelCheckpoint, no file of yours,
no link.

The files with the tensors that autosaves of FaultTolerance(incremental=True) share are deleted as soon as no
autosave refers to them.

Those that "list" shows as "kept" or "incident" are never deleted. If no autosave of a fit verifies, none is deleted.
Damaged ones that are newer than the oldest of the N, and those that were set aside, stay unless you pass --damaged.
Those of superseded runs stay unless you pass --superseded. A run in training is left alone.
"""
EPILOG = """\
Exit status: 0 done, 1 a run is in use and was left alone, 2 something could not be read or deleted.
"""


@dataclass(kw_only=True, slots=True)
class _Plan:
    """The plan for one series of autosaves."""

    kept: list[found.FoundFile] = field(default_factory=list)
    deleted: list[found.FoundFile] = field(default_factory=list)
    damaged: list[found.FoundFile] = field(default_factory=list)
    unreadable: list[found.FoundFile] = field(default_factory=list)
    bases: dict[str, int] = field(default_factory=dict)
    """The sizes of the bases that are not used any more, by their names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``prune``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="run, directory, checkpoint, or URL; by default the runs of this directory",
    )
    parser.add_argument("--keep-last", metavar="N", type=at_least_1, required=True, help="how many to keep, at least 1")
    parser.add_argument("--damaged", action="store_true", help="also delete autosaves that don't verify")
    parser.add_argument("--superseded", action="store_true", help="also delete autosaves of superseded runs")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be deleted")


def run(arguments: argparse.Namespace) -> int:
    """Delete old autosaves, and print which ones were deleted.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    what = found.find_meant(arguments.directory)  # an empty variable does not mean the current directory
    status, freed, number = 2 if what.problems else 0, 0, 0
    what.print_problems()
    asked_for = real(what.files[0].folder if what.is_one else what.path)  # a checkpoint stands for its folder
    runs = dict.fromkeys(map(run_directory, _series(what)))
    for run in runs:
        place = asked_for if asked_for.startswith(f"{run}/") else run
        try:
            plans = _plans(place, run, arguments) if arguments.dry_run else _prune(place, run, arguments)
        except RunInUseError as error:
            print(safe(reason_of(error)), file=sys.stderr)
            status = max(status, 1)
            continue
        except (OSError, FaultToleranceError) as error:  # the other runs are still pruned
            print(safe(f"{run}: pruning ended early: {reason_of(error)}"), file=sys.stderr)
            status = 2
            continue
        for folder, plan in plans.items():
            _print_plan(folder, plan, arguments)
            status = 2 if plan.unreadable else status
            number += len(plan.deleted)
            freed += sum(file.num_bytes for file in plan.deleted) + sum(plan.bases.values())
    if not runs:
        print(safe(f"No autosaves were found below {what.path}{what.why_nothing}."), file=sys.stderr)
    would = "would be deleted" if arguments.dry_run else "deleted"
    print(f"{plural(number, 'autosave')} {would}, {size_text(freed)}")
    return status


def _prune(place: str, run: str, arguments: argparse.Namespace) -> dict[str, _Plan]:
    with open_lock(run) as lock:
        plans = _plans(place, run, arguments)  # searched only now: a run may have continued before it was locked
        for folder, plan in plans.items():
            for file in plan.deleted:
                lock.check()
                store = open_store(file.folder)
                with contextlib.suppress(FileNotFoundError):  # deleted by another process
                    autosave_files.delete(store, file.name)
                if found.is_superseded(file.folder):
                    store.remove_if_empty()
            lock.check()
            remove_unused(open_store(folder))
    return plans


def _plans(place: str, run: str, arguments: argparse.Namespace) -> dict[str, _Plan]:
    series = _series(found.find_checkpoints(place))
    plans = {folder: _plan(files, arguments) for folder, files in series.items() if run_directory(folder) == run}
    for folder, plan in plans.items():
        plan.bases = _bases(folder, plan.deleted)
    return plans


def _bases(folder: str, deleted: list[found.FoundFile]) -> dict[str, int]:
    store = open_store(folder)
    begin = f"{folder.rstrip('/')}/"
    unused = unused_bases(store, without=[file.path.removeprefix(begin) for file in deleted])
    return {name: store.size(name) for name in unused}


def _plan(files: list[found.FoundFile], arguments: argparse.Namespace) -> _Plan:
    """Decide which autosaves of one series to delete. `files` are in the order of saving."""
    plan = _Plan()
    for file in reversed([file for file in files if file.kind == found.AUTOSAVE]):
        if len(plan.kept) == arguments.keep_last:
            plan.deleted += [] if is_kept(file.name) else [file]
            continue
        word = verification.verdict_of(file.path).word
        if word == verification.NOT_COMMITTED:  # the next save of the run removes it
            continue
        place = {verification.VERIFIED: plan.kept, verification.DAMAGED: plan.damaged}.get(word, plan.unreadable)
        place.append(file)
    plan.damaged += [file for file in files if file.kind == found.SET_ASIDE and not found.is_superseded(file.folder)]
    if arguments.damaged and plan.kept:
        plan.deleted += plan.damaged
        plan.damaged = []
    if arguments.superseded:
        plan.deleted += [file for file in files if found.is_superseded(file.folder)]
    return plan


def _series(what: found.Found) -> dict[str, list[found.FoundFile]]:
    """Return the autosaves of each series, including its superseded ones."""
    series: dict[str, list[found.FoundFile]] = {}
    for file in what.files:
        is_candidate = file.is_autosave and file.kind != found.KEPT
        if is_candidate and not file.is_link:
            folder = real(file.folder)
            folder = folder.rpartition("/")[0] if found.is_superseded(folder) else folder
            series.setdefault(folder, []).append(file)
    return series


def _print_plan(folder: str, plan: _Plan, arguments: argparse.Namespace) -> None:
    verb = "would delete" if arguments.dry_run else "deleted"
    shown = folder.removeprefix(f"{os.getcwd()}/")
    print(f"{safe(shown)}: {len(plan.kept)} kept, {len(plan.deleted)} {verb}")
    for file in plan.deleted:
        print(f"  {verb} {safe(os.path.relpath(file.path, folder))}, {size_text(file.num_bytes)}")
    for name, num_bytes in plan.bases.items():
        print(f"  {verb} {safe(name)}, {size_text(num_bytes)}")
    if not plan.kept and (plan.damaged or plan.unreadable):
        print("  no autosave here verifies: nothing of this fit was deleted")
    elif plan.damaged:
        print(f"  {len(plan.damaged)} damaged autosaves are left; --damaged deletes them")
    for file in plan.unreadable:
        print(f"  left, because it can't be verified: {safe(file.name)}")

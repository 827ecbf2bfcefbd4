"""``prune``: delete old autosaves, but never the newest one that verifies."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field

from lightning_faulttolerant.checkpoint import autosave_files
from lightning_faulttolerant.checkpoint.autosave_files import fit_number, is_kept, remove_unused, unused_bases
from lightning_faulttolerant.cli import found, verification
from lightning_faulttolerant.cli.text import at_least_1, reason_of, safe, size_text
from lightning_faulttolerant.errors import FaultToleranceError, RunInUseError
from lightning_faulttolerant.storage.lock import open_lock
from lightning_faulttolerant.storage.store import is_url, local_path, open_store

DESCRIPTION = """\
Keep the newest N verified autosaves of each fit below DIR, and delete the older ones. Only files with the names of
autosaves are deleted: no file of ModelCheckpoint, no file that you have put there, no link.

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
    parser.add_argument("directory", metavar="DIR", nargs="?", help="run, directory, or URL; by default this directory")
    parser.add_argument("--keep-last", metavar="N", type=at_least_1, required=True, help="how many to keep, at least 1")
    parser.add_argument("--damaged", action="store_true", help="delete autosaves that don't verify too")
    parser.add_argument("--superseded", action="store_true", help="delete autosaves of superseded runs too")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be deleted")


def run(arguments: argparse.Namespace) -> int:
    """Delete old autosaves, and print which ones were deleted.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    directory = found.meant(arguments.directory)  # an empty variable does not mean the current directory
    if not is_url(directory):
        path = os.path.abspath(local_path(directory))
        directory = os.path.dirname(path) if os.path.isfile(path) else path
    status, freed, number = 0, 0, 0
    what = found.find_checkpoints(directory)
    for problem in what.problems:
        print(safe(problem), file=sys.stderr)
        status = 2
    for run_directory in dict.fromkeys(_run_directory(folder) for folder in _series(what)):
        try:
            if arguments.dry_run:
                plans = _plans(what, run_directory, arguments)
            else:
                plans = _prune(directory, run_directory, arguments)
        except RunInUseError as error:
            print(safe(reason_of(error)), file=sys.stderr)
            status = max(status, 1)
            continue
        except (OSError, FaultToleranceError) as error:  # the other runs are still pruned
            print(safe(f"{run_directory}: not pruned to the end: {reason_of(error)}"), file=sys.stderr)
            status = 2
            continue
        for folder, plan in plans.items():
            _print_plan(folder, plan, arguments)
            status = 2 if plan.unreadable else status
            number += len(plan.deleted)
            freed += sum(file.num_bytes for file in plan.deleted) + sum(plan.bases.values())
    would = "would be deleted" if arguments.dry_run else "deleted"
    print(f"{number} autosave{'' if number == 1 else 's'} {would}, {size_text(freed)}")
    return status


def _prune(directory: str, run_directory: str, arguments: argparse.Namespace) -> dict[str, _Plan]:
    lock = open_lock(run_directory)
    lock.acquire()
    try:
        # Search again: a run may have continued here before the lock was acquired.
        plans = _plans(found.find_checkpoints(directory), run_directory, arguments)
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
    finally:
        lock.release()
    return plans


def _plans(what: found.Found, run_directory: str, arguments: argparse.Namespace) -> dict[str, _Plan]:
    plans = {
        folder: _plan(files, arguments)
        for folder, files in _series(what).items()
        if _run_directory(folder) == run_directory
    }
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
            folder = _parent(file.folder) if found.is_superseded(file.folder) else file.folder
            series.setdefault(folder, []).append(file)
    return series


def _run_directory(folder: str) -> str:
    """Return the directory that a run locks while it writes into `folder`."""
    name = folder.rstrip("/").rpartition("/")[2]
    return _parent(folder) if fit_number(name) else folder


def _parent(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[0]


def _print_plan(folder: str, plan: _Plan, arguments: argparse.Namespace) -> None:
    verb = "would delete" if arguments.dry_run else "deleted"
    is_relative = not is_url(folder) and not os.path.isabs(local_path(arguments.directory or ""))
    shown = os.path.relpath(folder) if is_relative else folder
    print(f"{safe(shown)}: {len(plan.kept)} kept, {len(plan.deleted)} {verb}")
    for file in plan.deleted:
        print(f"  {verb} {safe(os.path.relpath(file.path, folder))}, {size_text(file.num_bytes)}")
    for name, num_bytes in plan.bases.items():
        print(f"  {verb} {safe(name)}, {size_text(num_bytes)}")
    if not plan.kept and (plan.damaged or plan.unreadable):
        print("  no autosave here verifies: nothing of this fit was deleted")
    elif plan.damaged:
        print(f"  {len(plan.damaged)} damaged left; --damaged deletes them")
    for file in plan.unreadable:
        print(f"  can't be verified, left: {safe(file.name)}")

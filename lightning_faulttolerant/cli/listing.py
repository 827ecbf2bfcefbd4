"""``list``: print a table of unfinished runs, or of the checkpoints below a directory and whether each verifies."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from lightning_faulttolerant.checkpoint.autosave_files import is_kept
from lightning_faulttolerant.checkpoint.schema import read_summary
from lightning_faulttolerant.cli import found, verification
from lightning_faulttolerant.cli.found import Found, FoundFile, mapping, part_of, real, registry_here, whole_number
from lightning_faulttolerant.cli.histories import FoundRun, runs_of
from lightning_faulttolerant.cli.text import moment_json, moment_text, reason_of, remote_errors, safe, size_text, table
from lightning_faulttolerant.cli.verification import CheckpointVerdict
from lightning_faulttolerant.errors import DamagedCheckpointError, FaultToleranceError
from lightning_faulttolerant.records.ledger import ENDS
from lightning_faulttolerant.records.runs import RegisteredRun

DESCRIPTION = """\
Without DIR, list the runs that were started in this directory (or those of the registry that
PL_FAULT_TOLERANT_REGISTRY names): where each unfinished one keeps its autosaves, how far it is, and the command that
continues it; and those below this directory that have finished.

With DIR, list the checkpoints below a directory: autosaves (<dirpath>/<run_id>/fit-<n>/autosave-*.ckpt) and all other
.ckpt files, such as those of ModelCheckpoint. DIR may be the name of a run, the dirpath of FaultTolerance, the
directory of a run or a fit, any other directory, a checkpoint, or a URL (s3://bucket/run). Then come the runs there
that have finished.

Each file is read completely and verified by its checksums. --no-verify reads only what the table shows.
"""
EPILOG = """\
STATE: "verified"; "damaged", with the reason below the table; "no checksums": the file has none, so nothing was
compared; "damaged, set aside": a resume found it damaged; "unreadable": it exists, but can't be read; "not verified":
with --no-verify; "not committed": a directory that its writer has not completed; "superseded": an autosave of a run
that was started again from another checkpoint; "kept": kept for good, and never pruned; "incident": the
state before a step that went wrong, which is never pruned either; "finished": its fit or evaluation
is over. EPOCH counts from 0, BATCH counts the consumed batches of that epoch, STEP counts optimizer steps, and RANKS is
the number of processes of the run ("-": the file does not say).

Exit status: 0 runs or checkpoints were found (even damaged ones), 1 none were found, 2 something could not be read.
"""

_HEADER = ("FILE", "STEP", "EPOCH", "BATCH", "SAVED", "SIZE", "RANKS", "STATE")
_WITH_VERDICT = (found.SUPERSEDED, found.KEPT, found.INCIDENT)
_RIGHT = ("STEP", "EPOCH", "BATCH", "SIZE", "RANKS")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    file: FoundFile
    step: int | None
    epoch: int | None
    batch: int | None
    world_size: int | None
    is_finished: bool
    verdict: CheckpointVerdict

    @property
    def state(self) -> str:
        if self.file.kind == found.SET_ASIDE:
            return "damaged, set aside"
        is_kept_here = self.file.kind == found.AUTOSAVE and is_kept(self.file.name)
        kind = found.KEPT if is_kept_here else self.file.kind
        words = [kind] if kind in _WITH_VERDICT else ["finished"] if self.is_finished else []
        return ", ".join([*words, self.verdict.word])

    def cells(self) -> list[str]:
        numbers = [_cell(number) for number in (self.step, self.epoch, self.batch)]
        size = size_text(self.file.num_bytes)
        return [
            self.file.name,
            *numbers,
            moment_text(self.file.saved_at),
            size,
            _cell(self.world_size),
            self.state,
        ]

    def as_json(self) -> dict[str, object]:
        return {
            "path": self.file.path,
            "kind": self.file.kind,
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "saved_at": moment_json(self.file.saved_at),
            "num_bytes": self.file.num_bytes,
            "world_size": self.world_size,
            "is_finished": self.is_finished,
            "state": self.verdict.word,
            "reason": self.verdict.reason,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``list``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument("directory", metavar="DIR", nargs="?", help="run, directory, checkpoint, or URL")
    parser.add_argument("--no-verify", action="store_true", help="don't read the files whole")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the table.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    if arguments.directory is None:
        return _list_runs(as_json=arguments.json)
    what = found.find_meant(arguments.directory)
    folders = {}
    for folder, files in what.by_folder().items():
        of_folder = [_row(file, verify=not arguments.no_verify) for file in files]
        # A run that continues in the meantime deletes its old autosaves.
        folders[folder] = [row for row in of_folder if row.verdict.word != verification.MISSING]
    rows = [row for of_folder in folders.values() for row in of_folder]
    finished = _finished(what)
    if arguments.json:
        lists = {"checkpoints": [row.as_json() for row in rows], "runs": [*map(_finished_as_json, finished)]}
        print(json.dumps({**lists, "problems": what.problems}, indent=2))
    else:
        _print_tables(folders)
        for done in finished:
            _print_finished(done, typed=done.path)
    what.print_problems()
    if what.problems or any(row.verdict.word == verification.UNREADABLE for row in rows):
        return 2
    if not rows and not finished:
        print(safe(f"No checkpoints were found below {what.path}{what.why_nothing}."), file=sys.stderr)
    return 0 if rows or finished else 1


def _finished(what: Found) -> list[FoundRun]:
    return [one for one in runs_of(what) if one.history.chapters[-1].done is not None]


def _list_runs(*, as_json: bool) -> int:
    registry = registry_here()
    what = found.find_meant(None)
    newest_of = what.newest_of_runs()
    places = ((real(entry.directory), entry) for entry in registry.entries())
    runs = {place: (entry, newest_of[place]) for place, entry in places if place in newest_of}
    finished = [one for one in _finished(what) if real(one.path) not in runs]
    if as_json:
        lists = [*starmap(_run_as_json, runs.values()), *map(_finished_as_json, finished)]
        print(json.dumps({"runs": lists}, indent=2))
    for entry, newest in () if as_json else runs.values():
        print(safe(entry.run_id))
        print(f"  saved       {moment_text(newest.saved_at)}, {_place(newest)}")
        print(f"  autosaves   {safe(entry.directory)}")
        print(f"  continue    {safe(entry.command.line(here=os.getcwd()))}")
        print(f"  start over  lightning-faulttolerant discard {safe(entry.run_id)}")
    for done in () if as_json else finished:
        _print_finished(done, typed=done.run_id)
    if not runs and not finished:
        print(f"No runs were found, neither in {safe(registry.directory)} nor below this directory.", file=sys.stderr)
    what.print_problems()
    return 2 if what.problems else 0 if runs or finished else 1


def _print_finished(one: FoundRun, *, typed: str) -> None:
    print(safe(one.run_id))
    print(f"  finished    {moment_text(one.last_seen)}")
    print(f"  report      lightning-faulttolerant report {safe(shlex.quote(typed))}")


def _finished_as_json(one: FoundRun) -> dict[str, object]:
    directory, saved_at = real(one.path), moment_json(one.last_seen)
    return {"run_id": one.run_id, "directory": directory, "saved_at": saved_at, "is_finished": True}


def _place(newest: FoundFile) -> str:
    if _is_finished(_content(newest)[0]):
        return f"{newest.folder.rpartition('/')[2]} is finished"
    epoch, batch = newest.place or ("-", "-")
    return f"epoch {epoch}, batch {batch}"


def _run_as_json(entry: RegisteredRun, newest: FoundFile) -> dict[str, object]:
    place = newest.place or (None, None)
    return {
        "run_id": entry.run_id,
        "directory": entry.directory,
        "command": list(entry.command.words),
        "started_in": entry.command.directory,
        "saved_at": moment_json(newest.saved_at),
        "epoch": place[0],
        "batch": place[1],
        "is_finished": _is_finished(_content(newest)[0]),
    }


def _print_tables(folders: dict[str, list[_Row]]) -> None:
    for number, (folder, rows) in enumerate(folders.items()):
        if number:
            print()
        print(safe(folder))
        for line in table(_HEADER, [row.cells() for row in rows], right=_RIGHT, indent=2):
            print(line)
        for row in rows:
            if row.verdict.reason and row.file.kind != found.SET_ASIDE:
                print(f"  {safe(row.file.name)}: {safe(row.verdict)}")


def _row(file: FoundFile, *, verify: bool) -> _Row:
    content, problem = (None, None) if file.kind == found.DIRECTORY else _content(file)
    if file.kind == found.SET_ASIDE:
        checked = CheckpointVerdict(word=verification.DAMAGED, reason="it was set aside when a run was resumed")
    elif verify:
        checked = verification.verdict_of(file.path)
    else:
        checked = problem or CheckpointVerdict(word=verification.NOT_VERIFIED)
    batches = mapping(content, "loops", "fit_loop", "epoch_loop.batch_progress", "current")
    epoch, batch = _number(content, "epoch", mapping(content)), _number(content, "batch", batches, "completed")
    if file.place is not None and epoch is None:
        epoch, batch = file.place
    return _Row(
        file=file,
        step=_number(content, "global_step", mapping(content)),
        epoch=epoch,
        batch=batch,
        world_size=whole_number(mapping(part_of(content)).get("world_size")),
        is_finished=_is_finished(content),
        verdict=checked,
    )


def _number(content: object, name: str, lightning: Mapping[Any, Any], lightning_name: str = "") -> int | None:
    """Return a number of our part; without our part, Lightning's number."""
    number = whole_number(mapping(part_of(content), "position").get(name))
    return whole_number(lightning.get(lightning_name or name)) if number is None else number


def _is_finished(content: object) -> bool:
    return mapping(part_of(content), "position").get("where") in ENDS


def _content(file: FoundFile) -> tuple[object, CheckpointVerdict | None]:
    """Return the contents of a checkpoint, or the reason why they are unknown."""
    try:
        with remote_errors(file.path), found.open_checkpoint(file.content_path) as opened:
            return read_summary(opened, name=file.name).content, None
    except (OSError, DamagedCheckpointError) as error:
        return None, verification.verdict_of_error(error)
    except FaultToleranceError as error:
        return None, CheckpointVerdict(word=verification.NOT_VERIFIED, reason=reason_of(error))


def _cell(number: int | None) -> str:
    return "-" if number is None else str(number)

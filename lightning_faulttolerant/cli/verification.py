"""``verify``: check whether checkpoints are as they were written, with an exit status for scripts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from lightning_faulttolerant.cli import found, verdict
from lightning_faulttolerant.cli.errors import reason_of
from lightning_faulttolerant.cli.found import FoundFile
from lightning_faulttolerant.cli.text import safe
from lightning_faulttolerant.cli.verdict import CheckpointVerdict, verdict_of
from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.storage.store import is_url, local_path

DESCRIPTION = """\
Verify checkpoints by their checksums. PATH is a file, a directory with a manifest, any other directory, or the URL of
one of these. In any other directory, all checkpoints below it are verified, except those that were set aside as damaged
or never committed. Each checkpoint is one line.

Each byte is read; nothing is loaded.
"""
EPILOG = """\
Exit status: 0 all are verified, 1 any is damaged, missing, or not committed, 2 wrong usage, or any can't be read
(permission, credentials, network) and none is known to be damaged. A file without checksums can't be verified: it gives
0, or 1 with --strict.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verify``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument("paths", metavar="PATH", nargs="+", help="file, directory or URL")
    parser.add_argument("--quiet", action="store_true", help="print only what is not verified")
    parser.add_argument("--strict", action="store_true", help="count files without checksums as damaged")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    is_bad = is_unreadable = False
    for path, checked in _verdicts(arguments.paths):
        is_bad |= checked.is_bad or (arguments.strict and checked.word == verdict.NO_CHECKSUMS)
        is_unreadable |= checked.word == verdict.UNREADABLE
        if not (arguments.quiet and checked.is_good):
            print(f"{safe(path)}: {safe(checked)}", flush=True)
    if is_bad:
        return 1
    return 2 if is_unreadable else 0


def _verdicts(paths: list[str]) -> Iterator[tuple[str, CheckpointVerdict]]:
    for path in paths:
        try:
            what = found.find_checkpoints(path)
        except (FileNotFoundError, NotADirectoryError):
            yield path, verdict_of(path)
            continue
        except (OSError, FaultToleranceError) as error:
            yield path, CheckpointVerdict(word=verdict.UNREADABLE, reason=reason_of(error))
            continue
        for problem in what.problems:
            yield path, CheckpointVerdict(word=verdict.UNREADABLE, reason=problem)
        if len(what.files) == 1 and _is_at(what.files[0], path):
            yield path, verdict_of(path)
            continue
        files = [file for file in what.files if file.kind != found.SET_ASIDE]
        if not files and not what.problems:
            yield path, CheckpointVerdict(word=verdict.MISSING, reason="it contains no checkpoints")
        for file in files:
            checked = verdict_of(file.path)
            # A run that continues in the meantime deletes its old autosaves and begins new directories.
            if checked.word not in (verdict.MISSING, verdict.NOT_COMMITTED):
                yield file.path, checked


def _is_at(file: FoundFile, path: str) -> bool:
    """Return whether a file found below a path is the path itself: a directory with a manifest."""
    if is_url(path):
        return file.is_directory and file.path == path.rstrip("/")
    return file.is_directory and os.path.abspath(file.path) == os.path.abspath(local_path(path))

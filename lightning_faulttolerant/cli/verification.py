"""``verify``: check whether checkpoints are as they were written, with an exit status for scripts.

A checkpoint is verified by its bytes, with the progress on a terminal. Nothing is unpickled.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, cast

from lightning_faulttolerant.checkpoint.archive import has_checksums, is_legacy
from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME
from lightning_faulttolerant.checkpoint.checked_file import CountedFile
from lightning_faulttolerant.checkpoint.contents import describe_owner, verify_directory
from lightning_faulttolerant.checkpoint.joined_file import find_whole_damage, opened_whole
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, read_manifest
from lightning_faulttolerant.cli import found
from lightning_faulttolerant.cli.found import open_checkpoint
from lightning_faulttolerant.cli.text import reason_of, remote_errors, safe, size_text
from lightning_faulttolerant.errors import DamagedCheckpointError, FaultToleranceError
from lightning_faulttolerant.storage.store import is_url, local_path

VERIFIED = "verified"
DAMAGED = "damaged"
MISSING = "missing"
NOT_COMMITTED = "not committed"
NO_CHECKSUMS = "no checksums"
UNREADABLE = "unreadable"
NOT_VERIFIED = "not verified"

_SHOWN_FROM_BYTES = 64 * 1024 * 1024
_SHOWN_EVERY_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointVerdict:
    """The result of verifying a checkpoint.

    Args:
        word: One of this module's words.
        reason: Why it is not verified.
    """

    word: str
    reason: str = ""

    @property
    def is_good(self) -> bool:
        """Whether every byte was compared with a checksum."""
        return self.word == VERIFIED

    @property
    def is_bad(self) -> bool:
        """Whether the checkpoint is known to be bad."""
        return self.word in (DAMAGED, MISSING, NOT_COMMITTED)

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


def verdict_of(path: str) -> CheckpointVerdict:
    """Read a whole checkpoint once, and return whether it is as it was written.

    Args:
        path: Path or URL of a file, or of a directory with a manifest.
    """
    try:
        with remote_errors(path):
            return _verdict_of_path(path)
    except (OSError, FaultToleranceError) as error:
        return verdict_of_error(error)


def verdict_of_error(error: OSError | FaultToleranceError) -> CheckpointVerdict:
    """Return the verdict on a checkpoint that can't be read.

    Args:
        error: The error that reading it raised.
    """
    if isinstance(error, FileNotFoundError):
        return CheckpointVerdict(word=MISSING, reason=error.strerror or reason_of(error))
    is_damage = isinstance(error, DamagedCheckpointError) or getattr(error, "errno", None) == errno.EIO
    return CheckpointVerdict(word=DAMAGED if is_damage else UNREADABLE, reason=reason_of(error))


def _verdict_of_path(path: str) -> CheckpointVerdict:
    try:
        with opened_whole(path, _opened) as file:
            return _verdict_of_file(file)
    except (FileNotFoundError, IsADirectoryError):
        return _verdict_of_directory(path)


def _opened(path: str) -> IO[bytes]:
    return cast("IO[bytes]", _ProgressFile(open_checkpoint(path, whole=True), path))


def _verdict_of_directory(path: str) -> CheckpointVerdict:
    try:
        manifest = read_manifest(path)
    except (FileNotFoundError, NotADirectoryError):
        if not is_url(path) and os.path.isdir(local_path(path)):
            word = DAMAGED if AUTOSAVE_NAME.fullmatch(os.path.basename(path)) else NO_CHECKSUMS
            return CheckpointVerdict(word=word, reason=f"it has no {MANIFEST_NAME}")
        return CheckpointVerdict(word=MISSING, reason="the file does not exist")
    if not manifest.is_committed:
        return CheckpointVerdict(
            word=NOT_COMMITTED, reason=f"{describe_owner(manifest)} began it, and died or is still writing"
        )
    verification = verify_directory(path)
    extra = len(verification.extra_files)
    reason = f"{extra} file{'s' if extra > 1 else ''} in its directory not in its manifest" if extra else ""
    return CheckpointVerdict(word=VERIFIED, reason=reason)


def _verdict_of_file(file: IO[bytes]) -> CheckpointVerdict:
    if is_legacy(file):
        return CheckpointVerdict(word=NO_CHECKSUMS, reason="torch's format from before 1.6")
    damage = find_whole_damage(file)
    if damage is not None:
        return CheckpointVerdict(word=DAMAGED, reason=damage)
    if not has_checksums(file):
        return CheckpointVerdict(word=NO_CHECKSUMS, reason="written after torch.serialization.set_crc32_options(False)")
    return CheckpointVerdict(word=VERIFIED)


class _ProgressFile(CountedFile):
    """A file that passes reads on and, if it is large, shows the progress on a line of the terminal."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file)
        self._label = safe(path.rstrip("/").rpartition("/")[2])
        self._size = file.seek(0, os.SEEK_END)
        self._is_shown = self._size >= _SHOWN_FROM_BYTES and sys.stderr.isatty()
        self._next_at = time.monotonic() + _SHOWN_EVERY_SECONDS

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        if self._is_shown and (time.monotonic() >= self._next_at or self.num_bytes >= self._size):
            self._next_at = time.monotonic() + _SHOWN_EVERY_SECONDS
            self._show()
        return data

    def _show(self) -> None:
        is_done = self.num_bytes >= self._size
        part = min(100, 100 * self.num_bytes // self._size)
        line = "" if is_done else f"{part:3d}% of {size_text(self._size)} read: {self._label}"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def __enter__(self) -> _ProgressFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


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
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", help="file, directory, run, or URL; by default the runs of this directory"
    )
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
    for path, checked in _verdicts(arguments.paths or [None]):
        is_bad |= checked.is_bad or (arguments.strict and checked.word == NO_CHECKSUMS)
        is_unreadable |= checked.word == UNREADABLE
        if not (arguments.quiet and checked.is_good):
            print(f"{safe(path)}: {safe(checked)}", flush=True)
    if is_bad:
        return 1
    return 2 if is_unreadable else 0


def _verdicts(names: list[str | None]) -> Iterator[tuple[str, CheckpointVerdict]]:
    for name in names:
        path = "." if name is None else name
        try:
            what = found.find_meant(name)
        except (OSError, FaultToleranceError) as error:
            yield path, verdict_of_error(error)
            continue
        for problem in what.problems:
            yield path, CheckpointVerdict(word=UNREADABLE, reason=problem)
        files = [file for file in what.files if what.is_one or file.kind != found.SET_ASIDE]
        if not files and not what.problems:
            yield path, CheckpointVerdict(word=MISSING, reason=f"it contains no checkpoints{what.why_nothing}")
        for file in files:
            checked = verdict_of(file.path)
            # A run that continues in the meantime deletes its old autosaves and begins new directories.
            if what.is_one or checked.word not in (MISSING, NOT_COMMITTED):
                yield path if what.is_one else file.path, checked

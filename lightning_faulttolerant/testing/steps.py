"""What a program does with its files, as a row of numbered steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

# "open": for writing. "write" and "truncate": of content. "close": of a file that was open for writing, which on some
# file systems is where an error comes out. "rename": also over an existing file. "link": a hard or a symbolic one.
KINDS = (
    "open",
    "write",
    "truncate",
    "close",
    "fsync",
    "fsync_directory",
    "rename",
    "unlink",
    "link",
    "mkdir",
    "rmdir",
    "list",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step.

    Args:
        number: Counts the steps of a block, from 1.
        kind: One of `KINDS`.
        path: What it is about; of a rename and a link, the new name.
        num_bytes: How many bytes a write was given.
    """

    number: int
    kind: str
    path: Path
    num_bytes: int = 0

"""The steps of a program with its files, as a numbered sequence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

# "open": for writing. "write" and "truncate": of content. "close": of a file that was open for writing; some file
# systems report errors only there. "rename": also over an existing file. "link": a hard or a symbolic one.
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
        number: The step's number in its block, from 1.
        kind: One of `KINDS`.
        path: The path of the step; for a rename or a link, the new name.
        num_bytes: The number of bytes in a write.
    """

    number: int
    kind: str
    path: Path
    num_bytes: int = 0

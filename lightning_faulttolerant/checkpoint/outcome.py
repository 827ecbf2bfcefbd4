"""The result of verifying a checkpoint without finding damage."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """A checkpoint in which no damage was found; damage is raised as ``DamagedCheckpointError`` instead.

    Args:
        path: The path, as it was given.
        has_checksums: Whether each byte was compared with a checksum. Otherwise only sizes and layout were checked, as
            far as the format has them.
        reason: Why there are no checksums; empty if there are.
        num_files: 1, or the number of files in the manifest of a directory.
        num_bytes: The size of these files.
        extra_files: Files in a directory that its manifest does not name. They were put there later, and nothing is
            known about them. A ``README`` is not damage.

    Example:
        >>> print(Verification(path="a.ckpt", has_checksums=True, num_bytes=1024))
        a.ckpt: verified by checksums
    """

    path: str
    has_checksums: bool
    reason: str = ""
    num_files: int = 1
    num_bytes: int
    extra_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.has_checksums == bool(self.reason):
            raise ValueError(f"has_checksums={self.has_checksums} and reason={self.reason!r} contradict each other.")

    def __str__(self) -> str:
        if self.has_checksums:
            return f"{self.path}: verified by checksums"
        return f"{self.path}: was written without checksums ({self.reason})"


def describe_damage(path: str | os.PathLike[str], reason: str) -> str:
    """Return a message that a checkpoint is damaged, why that matters and what to do.

    Args:
        path: A file or directory.
        reason: The damage, worded to follow a colon.
    """
    return (
        f"Checkpoint {os.fspath(path)} is damaged: {reason}. "
        "Training on from it could go wrong without a sign. Take another checkpoint."
    )

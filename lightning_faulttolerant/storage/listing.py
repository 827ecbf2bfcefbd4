"""The content of a directory, one level deep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The names of the files and of the folders, sorted. Links to folders and special files are neither."""

    files: list[str]
    folders: list[str]

"""What the files of a series of autosaves are called; the names sort in the order of saving."""

from __future__ import annotations

import re
from collections.abc import Iterable

AUTOSAVE_NAME = re.compile(
    r"autosave-(?P<sequence>\d{8,})-epoch=(?P<epoch>\d+)-batch=(?P<batch>\d+)\.ckpt(?P<damaged>\.damaged)?"
)
"""An autosave, also one that was set aside because it is damaged."""

SUPERSEDED_NAME = re.compile(r"superseded-(?P<number>\d{4,})-.+")
"""A directory of autosaves that a run has left for another checkpoint."""

_FIT_NAME = re.compile(r"fit-(\d+)")

METADATA_NAME = "meta.pt"
"""In an autosave that is a directory of shards, the file with all that is in none. The name is Lightning's."""


def fit_number(name: str) -> int:
    """Return the number of a fit whose directory has this name; 0 of any other name."""
    match = _FIT_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def fit_folders(names: Iterable[str]) -> list[str]:
    """Return those of the directories of a run that hold the autosaves of its fits, in the order of the fits."""
    return sorted(filter(fit_number, names), key=fit_number)

"""The names of the files in a series of autosaves; they sort in the order of saving."""

from __future__ import annotations

import re
from collections.abc import Iterable

AUTOSAVE_NAME = re.compile(
    r"autosave-(?P<sequence>\d{8,})-epoch=(?P<epoch>\d+)-batch=(?P<batch>\d+)\.ckpt(?P<damaged>\.damaged)?"
)
"""The name of an autosave, also of one that was set aside because it is damaged."""

SUPERSEDED_NAME = re.compile(r"superseded-(?P<number>\d{4,})-.+")
"""The name of a directory with the autosaves that a run left for another checkpoint."""

_FIT_NAME = re.compile(r"(?:fit|validate|test|predict)-(\d+)")

PREDICTIONS_NAME = re.compile(r"predictions-rank=(?P<rank>\d+)-(?P<number>\d{8,})\.pt")
"""The name of a file with predictions, next to the autosaves of a ``predict``."""

METADATA_NAME = "meta.pt"
"""In an autosave that is a directory of shards, the file with everything outside the shards. Lightning's name."""


def fit_number(name: str) -> int:
    """Return the number of the fit, or evaluation, whose directory has this name, or 0 for any other name."""
    match = _FIT_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def fit_folders(names: Iterable[str]) -> list[str]:
    """Return the directories of a run that hold the autosaves of its fits and evaluations, in their order."""
    return sorted(filter(fit_number, names), key=fit_number)

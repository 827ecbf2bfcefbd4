"""What the files of a series of autosaves are called; the names sort in the order of saving."""

from __future__ import annotations

import re

AUTOSAVE_NAME = re.compile(
    r"autosave-(?P<sequence>\d{8,})-epoch=(?P<epoch>\d+)-batch=(?P<batch>\d+)\.ckpt(?P<damaged>\.damaged)?"
)
"""An autosave, also one that was set aside because it is damaged."""

SUPERSEDED_NAME = re.compile(r"superseded-(?P<number>\d{4,})-.+")
"""A directory of autosaves that a run has left for another checkpoint."""

METADATA_NAME = "meta.pt"
"""In an autosave that is a directory of shards, the file with all that is in none. The name is Lightning's."""

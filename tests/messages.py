"""What a user reads, as the same text in each run: paths, times, and numbers of processes have names.

A test compares it with its snapshot: ``assert plain(text, DIR=tmp_path) == snapshot``. The snapshots of a file of tests
lie in one file beside it, in ``__snapshots__``. ``make snapshots`` writes them again; their diff is reviewed as text.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_NAMES = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d| UTC)?", "TIME"),
    (r"\b\d+(\.\d+)? (s|ms|min|h|days?|seconds?|minutes?|hours?)( \d+ (s|min|h))?\b(?= (old|ago|of training))", "AGE"),
    (r"\b(process|pid) \d+", r"\1 PID"),
    (
        r"\b\d+ parts read back(; workers confirm[a-z ]+)?; (no batch to compare|proving on \d+ batch(es)?)",
        "N parts read back",
    ),
    (r"(?<=\.ckpt) \(AGE old\)", ""),
    (r"\b([\w.]+)-[0-9a-f]{12}\b", r"\1-KEY"),  # the name of a run
    (r"\x1b\[[0-9;]*[A-Za-z]", ""),
    (r"pandas\.core\.frame\.", "pandas."),  # before pandas 3, which needs Python 3.11
)


def error_of(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object]) -> str:
    """Return the text of the error of this kind that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def plain(text: str, **paths: Path | str) -> str:
    """Return `text` with a name for each of these paths, and for what differs from run to run."""
    named = {str(path): name for name, path in paths.items()}
    named |= {os.path.realpath(path): name for path, name in named.items()}
    named[sys.executable] = "python"
    for path in sorted(named, key=len, reverse=True):
        text = text.replace(path, named[path])
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return "\n".join(line.rstrip() for line in text.splitlines())

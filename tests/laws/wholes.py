"""Uninterrupted runs, each of which many tests of a file compare with."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.laws.events import Event
from tests.laws.rows import Group
from tests.laws.runs import whole_run

_known: dict[str, list[list[Event]]] = {}


def whole_of(group: Group, **values: Any) -> list[list[Event]]:
    """Return the events of a group without the callback; rows of the same names train once in a process."""
    key = f"{group} {values}"
    if key not in _known:
        with tempfile.TemporaryDirectory() as directory:
            _known[key] = whole_run(group, Path(directory), **values)
    return _known[key]

"""Uninterrupted runs, each of which many tests of a file compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.laws.events import Event
from tests.laws.rows import Group
from tests.laws.runs import Training

Whole = Callable[..., list[list[Event]]]


@pytest.fixture(scope="session")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return the events of a group without the callback; rows of the same names train once."""
    known: dict[str, list[list[Event]]] = {}

    def whole(group: Group, **values: Any) -> list[list[Event]]:
        key = f"{group} {values}"
        if key not in known:
            root = tmp_path_factory.mktemp("whole")
            known[key] = Training(group=group, root=root, with_callback=False, **values).finished().events
        return known[key]

    return whole

"""The laws themselves: groups, their halving, and the comparison can fail, and say where."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.laws.events import Broken, slice_of
from tests.laws.groups import LARGEST, check, groups_of
from tests.laws.rows import Group, Row, all_rows, fits


def test_each_row_is_in_one_group() -> None:
    """Groups have all rows, each once, of at most nine, and all that meet are compatible."""
    groups = groups_of()
    assert sorted(row.name for group in groups for row in group.rows) == sorted(all_rows())
    assert all(len(group.rows) <= LARGEST for group in groups)
    for group in groups:
        assert all(fits(row, [other for other in group.rows if other is not row]) for row in group.rows), group


def rows(*names: str) -> Group:
    """Return a group of rows without features."""
    return Group(rows=tuple(Row(name=name) for name in names))


@pytest.mark.parametrize("bad", [{"c"}, {"a", "h"}])
def test_guilty_rows_are_named(bad: set[str]) -> None:
    """A group that breaks a law is halved to the row, or to the smallest part of the group that still breaks it."""

    def law(group: Group) -> None:
        if bad <= {row.name for row in group.rows}:
            raise Broken("batch 3")

    with pytest.raises(AssertionError, match="batch 3") as raised:
        check(rows(*"abcdefgh"), law)
    named = str(raised.value).partition(" break")[0].removeprefix("The rows ").split("+")
    assert bad <= set(named)
    assert len(named) == (1 if len(bad) == 1 else 8)


EVENTS: list[dict[str, Any]] = [{"kind": "batch", "batch": i, "content": f"{i}"} for i in range(5)]


def test_slices() -> None:
    """A start is a slice of the whole run, anywhere in it."""
    for part, expected in ((EVENTS[1:3], (1, 3)), ([], (0, 0)), (EVENTS, (0, 5))):
        assert slice_of(EVENTS, part, whole_name="whole", part_name="part") == expected


@pytest.mark.parametrize(
    "part",
    [
        [EVENTS[1], {"kind": "batch", "batch": 2, "content": "other"}],
        [EVENTS[1], EVENTS[3]],
        [{"kind": "epoch"}],
        [*EVENTS, {"kind": "end"}],
    ],
    ids=["other content", "left out", "unknown", "too many"],
)
def test_other_events_are_no_slice(part: list[Any], snapshot: SnapshotAssertion) -> None:
    """The first difference is told, with both events."""
    with pytest.raises(Broken) as raised:
        slice_of(EVENTS, part, whole_name="the whole run", part_name="start 1")
    assert str(raised.value) == snapshot

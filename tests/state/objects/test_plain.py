"""Plain data stands for itself in a state, and shared parts are shared again."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state.objects.leaves import plain_of
from lightning_faulttolerant.state.objects.object_state import NODES, TABLE, ObjectState
from tests.state.objects.round_trips import carried

LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
KEYS = LEAVES | st.tuples(LEAVES, LEAVES)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner) | st.tuples(LEAVES)
    ),
    max_leaves=20,
)


@given(cache=st.dictionaries(KEYS, TREES, min_size=1), history=st.lists(TREES, min_size=1))
def test_all_kinds(cache: dict[Any, Any], history: list[Any]) -> None:
    """Values come back with the same types and in the same order."""

    def fill(holder: Any) -> None:
        holder.cache.update(cache)
        holder.history = history

    _, here = carried(lambda: SimpleNamespace(cache={}, history=[]), fill)
    assert repr((here.cache, here.history)) == repr((cache, history))


def test_stands_for_itself() -> None:
    """A cache of small lists has no row in the table."""

    def fill(holder: Any) -> None:
        holder.cache.update({1: [1.0, math.inf], "2": [{"a": None}], (3, "b"): (True, [])})

    holder = SimpleNamespace(cache={})
    state = ObjectState({"it": holder})
    fill(holder)
    saved = state.state_dict()
    assert (len(saved[TABLE]), saved[NODES]["it.cache"]["<content>"][0]) == (0, "plain")
    _, here = carried(lambda: SimpleNamespace(cache={}), fill)
    assert here.cache == {1: [1.0, math.inf], "2": [{"a": None}], (3, "b"): (True, [])}
    assert type(here.cache[3, "b"][0]) is bool


def test_is_a_copy() -> None:
    """A state that is written later is unchanged, and a loaded state shares nothing with the objects."""
    holder = SimpleNamespace(cache={}, history=[])
    state = ObjectState({"it": holder})
    holder.cache[1], holder.flat = [1], {1: 2}
    saved = state.state_dict()
    holder.cache[1].append(2)
    holder.flat[3] = 4
    here = SimpleNamespace(cache={}, history=[])
    assert ObjectState({"it": here}).load_state_dict(saved) == []
    here.cache[1].append(5)
    here.flat[5] = 6
    other = SimpleNamespace(cache={}, history=[])
    assert ObjectState({"it": other}).load_state_dict(saved) == []
    assert (other.cache, other.flat) == ({1: [1]}, {1: 2})


def share_with_new(holder: Any) -> None:
    """Let a new object hold a list that a cache holds."""
    holder.cache[0] = [1]
    holder.newest = SimpleNamespace(row=holder.cache[0])


def share_with_later(holder: Any) -> None:
    """Let a second container, read later, hold the same list."""
    holder.cache[0] = [1]
    holder.other[0] = holder.cache[0]


def share_with_later_attribute(holder: Any) -> None:
    """Let an object that is read later hold the same list."""
    holder.cache[0] = [1]
    holder.zone.row = holder.cache[0]


def share_with_earlier(holder: Any) -> None:
    """Let an object that is read first hold the same list."""
    holder.cache[0] = [1]
    holder.a_row = holder.cache[0]


def share_inside(holder: Any) -> None:
    """Let one container hold a list twice."""
    holder.cache[0] = holder.cache[1] = [1]


def share_deep_inside(holder: Any) -> None:
    """Let one container hold a list at two depths."""
    holder.cache[0] = [1]
    holder.cache[1] = ([holder.cache[0]],)


def share_with_known(holder: Any) -> None:
    """Let a container hold a list that existed when the fit began."""
    holder.cache[0] = holder.known


class Annotation:
    """The data of one sample."""

    def __init__(self, number: int) -> None:
        self.boxes = [number]


def share_with_record(holder: Any) -> None:
    """Let a container hold a part of an item of a large list; the part existed when the fit began."""
    holder.cache[0] = holder.records[7].boxes


def hold_itself(holder: Any) -> None:
    """Let a container hold itself, inside another one."""
    holder.cache[0] = [holder.cache]


def refer_in_a_circle(holder: Any) -> None:
    """Let new containers refer to each other."""
    holder.cache[0] = one = [1]
    one.append({"two": one})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "both"),
    [
        (share_with_new, lambda holder: (holder.cache[0], holder.newest.row)),
        (share_with_later, lambda holder: (holder.cache[0], holder.other[0])),
        (share_with_later_attribute, lambda holder: (holder.cache[0], holder.zone.row)),
        (share_with_earlier, lambda holder: (holder.cache[0], holder.a_row)),
        (share_inside, lambda holder: (holder.cache[0], holder.cache[1])),
        (share_deep_inside, lambda holder: (holder.cache[0], holder.cache[1][0][0])),
        (share_with_known, lambda holder: (holder.cache[0], holder.known)),
        (share_with_record, lambda holder: (holder.cache[0], holder.records[7].boxes)),
        (hold_itself, lambda holder: (holder.cache[0][0], holder.cache)),
        (refer_in_a_circle, lambda holder: (holder.cache[0], holder.cache[0][1]["two"])),
    ],
)
def test_is_shared_again(share: Any, both: Any) -> None:
    """Two holders of one list hold one list again."""

    def before() -> Any:
        records = [*map(Annotation, range(3_000))]
        return SimpleNamespace(cache={}, other={}, known=[0], zone=SimpleNamespace(row=None), records=records)

    there = before()
    share(there)
    assert both(there)[0] is both(there)[1]
    _, here = carried(before, share)
    one, other = both(here)
    assert one is other


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(1)],
        {"a": {1, 2}},
        [[1], [b"bytes"]],
        {frozenset(): 1},
        [SimpleNamespace()],
        (1, 2),
        {1: [2, 1j]},
        [[[[[[[[[[1]]]]]]]]]],  # too deep for a check at the speed of C
    ],
    ids=repr,
)
def test_is_something_else(value: Any) -> None:
    """Anything else is not plain data."""
    assert plain_of(value) is None


def test_says_how_much_it_is() -> None:
    """Texts count with their length."""
    few, many = plain_of({"a": ["b"]}), plain_of({"a": ["b" * 10_000]})
    assert few is not None
    assert many is not None
    assert many.num_bytes - few.num_bytes == 9_999

"""Plain data stands for itself in a state, and shared parts are shared again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from lightning_faulttolerant.state.objects.leaves import plain_of
from lightning_faulttolerant.state.objects.object_state import ObjectState
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


def test_is_a_copy() -> None:
    """A state that is written later is unchanged, and a loaded state shares nothing with the objects."""
    holder = SimpleNamespace(cache={}, array=np.zeros(1), tensor=torch.zeros(1))
    state = ObjectState({"it": holder})
    holder.cache[1], holder.flat = [1], {1: 2}
    holder.array += 1
    holder.tensor += 1
    saved = state.state_dict()
    there = holder
    for _ in range(2):
        there.cache[1].append(2)
        there.flat[3] = 4
        there.array += 1
        there.tensor += 1
        there = SimpleNamespace(cache={}, array=np.zeros(1), tensor=torch.zeros(1))
        assert ObjectState({"it": there}).load_state_dict(saved) == []
        assert (there.cache, there.flat, there.array[0], there.tensor[0]) == ({1: [1]}, {1: 2}, 1, 1)


class Annotation:
    def __init__(self, number: int) -> None:
        self.boxes = [number]


SHARED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "by a new object": (
        lambda h: setattr(h, "newest", SimpleNamespace(row=h.cache[0])),
        lambda h: (h.cache[0], h.newest.row),
    ),
    "by a container that is read later": (
        lambda h: h.other.update(a=h.cache[0]),
        lambda h: (h.cache[0], h.other["a"]),
    ),
    "by an object that is read later": (
        lambda h: setattr(h.zone, "row", h.cache[0]),
        lambda h: (h.cache[0], h.zone.row),
    ),
    "by an object that is read first": (lambda h: setattr(h, "a_row", h.cache[0]), lambda h: (h.cache[0], h.a_row)),
    "inside": (lambda h: h.cache.update(a=h.cache[0]), lambda h: (h.cache[0], h.cache["a"])),
    "at two depths": (lambda h: h.cache.update(a=([h.cache[0]],)), lambda h: (h.cache[0], h.cache["a"][0][0])),
    "with one that was known": (lambda h: h.cache.update(a=h.known), lambda h: (h.cache["a"], h.known)),
    "with a part of a record": (
        lambda h: h.cache.update(a=h.records[7].boxes),
        lambda h: (h.cache["a"], h.records[7].boxes),
    ),
    "one that replaced another": (
        lambda h: (setattr(h, "other", h.cache), setattr(h, "cache", {0: h.cache})),
        lambda h: (h.cache[0], h.other),
    ),
    "an object in a circle": (
        lambda h: setattr(h.zone, "row", SimpleNamespace(back=h.zone, cache=h.cache)),
        lambda h: (h.zone.row.back, h.zone),
    ),
    "a layer": (lambda h: setattr(h, "other", h.module[1]), lambda h: (h.other, h.module[1])),
    "a weight as a key": (
        lambda h: h.other.update({h.module[0].weight: 3}),
        lambda h: (next(iter(h.other)), h.module[0].weight),
    ),
    "a method": (lambda h: setattr(h, "other", h.module[1].forward), lambda h: (h.other.__self__, h.module[1])),
    "itself": (lambda h: h.cache.update(a=[h.cache]), lambda h: (h.cache["a"][0], h.cache)),
    "in a circle": (lambda h: h.cache[0].append({"b": h.cache[0]}), lambda h: (h.cache[0], h.cache[0][1]["b"])),
}


@pytest.mark.parametrize("name", SHARED)
def test_is_shared_again(name: str) -> None:
    """Two holders of one object hold one object again; existing layers, weights, and methods are not made anew."""

    def before() -> Any:
        records = [*map(Annotation, range(3_000))]
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        zone = SimpleNamespace(row=None)
        return SimpleNamespace(cache={}, other={}, known=[0], zone=zone, records=records, module=module)

    def train(holder: Any) -> None:
        holder.cache[0] = [1]
        share(holder)

    share, both = SHARED[name]
    there, here = carried(before, train)
    assert both(there)[0] is both(there)[1]
    one, other = both(here)
    assert one is other


def test_says_how_much_it_is() -> None:
    """Texts count with their length."""
    few, many = plain_of({"a": ["b"]}), plain_of({"a": ["b" * 10_000]})
    assert few is not None
    assert many is not None
    assert many.num_bytes - few.num_bytes == 9_999

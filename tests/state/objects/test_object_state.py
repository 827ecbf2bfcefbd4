"""Object state: changes on objects are found, carried through a file, and restored in place, with what they share."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import nn

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.leaves import plain_of
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES, TABLE, contents_of
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.state.reachable import global_path
from tests.state.objects.round_trips import carried


@dataclass
class Record:
    number: int = 0


def test_handles_are_no_state() -> None:
    """A file that replaces None is not a change."""
    owner = SimpleNamespace(file=None)
    state = ObjectState({"root": owner})
    with open(__file__) as owner.file:
        assert state.state_dict() == {NODES: {}, TABLE: [], LOST: {}}


def test_what_is_not_there_any_more_is_named() -> None:
    """An object, a class, or a reference that the new process lacks is named, and the rest is restored."""
    owner = SimpleNamespace(part=Record(), number=0, made=None)
    state = ObjectState({"root": owner})
    owner.part.number, owner.number, owner.made = 1, 2, Record()
    saved = state.state_dict()
    saved[TABLE] = [["object", "no.such.module:Gone", []]]
    fresh = SimpleNamespace(number=0)
    missing = ObjectState({"root": fresh}).load_state_dict(saved)
    assert sorted(missing) == [
        "root.made: the class no.such.module:Gone no longer exists",
        "root.part: it no longer exists",
    ]
    assert fresh.number == 2


HARMFUL = {
    "of Python": ["part", "os:system"],
    "by way of a library": ["part", "torch:os.system"],
    "eval": ["part", "torch:builtins.eval"],
    "builtin": ["part", "builtins:eval"],
    "load": ["part", "torch:load"],
    "file": ["part", "torch:from_file"],
    "partial": ["new", 0],
    "attribute of a module": ["method", ["dtype", "os"], "system"],
    "attribute of a class": ["method", ["dtype", "float32"], "__class__"],
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_checkpoint_cannot_name_what_runs(kind: str) -> None:
    """Names in a file are looked up among imported modules, and never yield code that reads files or runs programs."""
    owner = SimpleNamespace(hook=None)
    table = [["partial", ["part", "torch:load"], ["tuple", []], ["new", 1]], ["dict", [], None]]
    saved = {NODES: {"root": {"attributes": [["hook", HARMFUL[kind]]]}}, TABLE: table, LOST: {}}
    assert len(ObjectState({"root": owner}).load_state_dict(saved)) == 1
    assert owner.hook is None


class Shown:
    def show(self) -> None: ...


def test_checkpoint_cannot_replace_methods() -> None:
    """A class attribute can be restored to a value, never to a function."""
    state = ObjectState({"class": Namespace(owner=Shown), "root": Shown()}, Rules(left_out=lambda value: ()))
    attributes = [["show", ["part", f"{__name__}:through_a_file"]]]
    saved = {NODES: {"class": {"attributes": attributes}}, TABLE: [], LOST: {}}
    before = Shown.show
    assert len(state.load_state_dict(saved)) == 1
    assert Shown.show is before


def test_roots_keep_apart_from_modules_of_the_same_name() -> None:
    """A user's module named `module` has its own path."""
    here = types.ModuleType("module")
    here.STEPS = 0  # type: ignore[attr-defined]  # mypy: a module has no attributes
    root = Record()
    state = ObjectState({"module": root, global_path("module"): Namespace(owner=here)})
    root.number, here.STEPS = 1, 2  # type: ignore[attr-defined]
    assert state.state_dict()[NODES].keys() == {"module", "globals/module"}


def test_what_is_left_out() -> None:
    """Names that are left out are not read; live objects are known, but not read inside."""
    live = Record()
    owner = SimpleNamespace(own=0, other=0, live=live, again=None)
    rules = Rules(left_out=lambda value: {"other"}, is_live=lambda value: value is live)
    state = ObjectState({"root": owner}, rules)
    owner.own, owner.other, live.number, owner.again = 1, 1, 1, live
    assert state.state_dict()[NODES] == {"root": {"attributes": [["again", ["known", "root.live"]], ["own", 1]]}}


def test_contents_by_path() -> None:
    """Two states are compared by path; a new object counts by its content, not by its number."""

    def contents(*values: Any) -> dict[str, Any]:
        owner = SimpleNamespace(items=[], count=0, first=None)
        state = ObjectState({"root": owner})
        owner.items.append(values[0])
        for name, value in zip(("count", "first"), values[1:], strict=False):
            setattr(owner, name, value)
        return contents_of(state.state_dict())

    first = contents({1}, 1, [2])
    assert first.keys() == {"root.items", "root.count", "root.first"}
    assert first == contents({1}, 1, [2])
    other = contents({1}, 1, [3])
    assert {path for path in first if first[path] != other[path]} == {"root.first"}
    other = contents(1, 1, [2])  # the list has another number now
    assert {path for path in first if first[path] != other[path]} == {"root.items"}
    assert contents(["new", 0]) == contents(["new", 0])  # a list of the user's


class Doubling(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value


def test_methods_that_wrappers_leave_are_no_changes() -> None:
    """DDP puts back the class's own method, and Lightning's function during a call; another object's is a change."""
    module = Doubling()
    state = ObjectState({"module": module, "other": (other := Doubling())})
    for function in (module.forward, prepare_for_backward):
        module.forward = function  # type: ignore[method-assign, assignment]
        assert state.state_dict()[NODES] == {}
        assert ObjectState({"module": module}).state_dict()[NODES] == {}
    module.forward = other.forward  # type: ignore[method-assign]
    assert "module" in state.state_dict()[NODES]


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

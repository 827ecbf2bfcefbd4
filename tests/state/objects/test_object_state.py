"""Object state: changes on objects are found, carried through a checkpoint file, and restored in place."""

from __future__ import annotations

import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import nn

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES, TABLE, contents_of
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.state.reachable import global_path


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

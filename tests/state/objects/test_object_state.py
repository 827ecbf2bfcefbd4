"""Object state: changes on objects are found, carried through a checkpoint file, and restored in place."""

from __future__ import annotations

import copy
import datetime
import enum
import functools
import logging
import pathlib
import random
import threading
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nested import nested_tensor

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, TABLE, ObjectState, contents_of
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.state.reachable import global_path
from tests.state.objects.round_trips import carried

Pair = namedtuple("Pair", "first second")


class Phase(enum.Enum):
    """The phase of a training."""

    WARM_UP = 1
    DECAY = 2


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("__hidden", "items", "late")

    def __init__(self) -> None:
        self.__hidden, self.items = 1, [1]

    def change(self) -> int:
        self.__hidden += 1
        return self.__hidden


@dataclass
class Record:
    """Has its own list."""

    number: int = 0
    items: list[Any] = field(default_factory=list)


class Texts(dict[str, Any]):
    """A dict with attributes."""


class Average:
    """Has a state with more than its attributes show."""

    def __init__(self) -> None:
        self.value, self.num_loaded = torch.zeros(2), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value.copy_(state_dict["value"])
        self.num_loaded += 1


VALUES = [
    None, True, -3, 1 << 80, 0.1, float("inf"), 1 + 2j, "text", b"bytes", (1, (2, "three")), frozenset({1, 2}),
    [1, [2.5, {"k": (None,)}]], {"a": 1, (1, "b"): [2], Phase.DECAY: 3}, {1, "two"}, Counter("aab"),
    OrderedDict(b=1, a=2), deque([1, 2], maxlen=2), defaultdict(list, a=[1]), Pair(1, [2]), Phase.WARM_UP,
    datetime.date(2026, 2, 3), datetime.datetime(2026, 2, 3, tzinfo=datetime.timezone.utc), datetime.time(1, 2),
    datetime.timedelta(days=1, microseconds=3), pathlib.PurePosixPath("a/b"), range(1, 9, 2), slice(1, None, 2),
    Decimal("1.50"), Fraction(1, 3), uuid.UUID(int=7), torch.float16, torch.device("cpu"), torch.Size([1, 2]), ...,
    np.float32(0.1), np.int64(3), np.datetime64("2026-02-03"), Record(3, [1, Record()]), Texts(a=1),
    [float(i) for i in range(200)], list(range(200)), [*range(200), "and a text"], [True] * 200,
    SimpleNamespace(a=1), type(None), int, Phase, Record,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]}")
def test_each_value_is_carried(value: Any) -> None:
    """A value in an attribute, and one deep in a list, come back with their types."""

    def change(owner: Any) -> None:
        owner.value = copy.deepcopy(value)
        owner.items.append({"deep": copy.deepcopy(value)})

    _, fresh = carried(lambda: SimpleNamespace(value="before", items=[]), change)
    for found in (fresh.value, fresh.items[0]["deep"]):
        assert type(found) is type(value)
        assert found == value
        assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
        assert getattr(found, "default_factory", None) == getattr(value, "default_factory", None)


TENSORS = [torch.ones(3), torch.zeros(0, 2), torch.arange(4).short(), torch.tensor(2.5, dtype=torch.bfloat16),
           torch.tensor([True]), torch.tensor([1j]), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True),
           np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.zeros((0, 2)), np.array([1, None], dtype=object),
           np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), np.arange(6)[::2]]  # fmt: skip


@pytest.mark.parametrize(
    "value", TENSORS, ids=lambda value: f"{type(value).__name__}-{value.dtype}-{tuple(value.shape)}"
)
def test_each_tensor_and_array_is_carried(value: Any) -> None:
    """A new tensor or array comes back with its type, its flags, and its bits, and shares no memory."""
    changed, fresh = carried(lambda: SimpleNamespace(value=None), lambda owner: setattr(owner, "value", value))
    assert type(fresh.value) is type(value)
    assert (fresh.value.dtype, fresh.value.shape) == (value.dtype, value.shape)
    assert fresh.value is not changed.value
    assert getattr(fresh.value, "requires_grad", False) == getattr(value, "requires_grad", False)
    assert fresh.value.tolist() == value.tolist()


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "list": (lambda: [1, 2], lambda value: value.append(3)),
    "list that is sorted": (lambda: [2, 1], lambda value: value.sort()),
    "dict": (lambda: {"a": 1}, lambda value: value.update(b=2)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "deque": (lambda: deque([1], maxlen=2), lambda value: value.extend([2, 3])),
    "defaultdict": (lambda: defaultdict(lambda: 7), lambda value: value["a"]),
    "dict of the user's": (lambda: Texts(a=1), lambda value: value.update(b=2)),
    "tensor": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "data of a tensor": (lambda: torch.zeros(3), lambda value: value.data.add_(1)),
    "shape of a tensor": (lambda: torch.zeros(3), lambda value: setattr(value, "data", torch.ones(2))),
    "array": (lambda: np.zeros(3), lambda value: value.__iadd__(1)),
    "array that is shuffled": (lambda: np.arange(9), np.random.RandomState(0).shuffle),
    "large array": (lambda: np.arange(30_000), np.random.RandomState(0).shuffle),
    "array of objects": (lambda: np.array([1, None], dtype=object), lambda value: value.__setitem__(1, 3)),
    "attribute": (Record, lambda value: setattr(value, "number", 4)),
    "list of an object": (Record, lambda value: value.items.append(Record(1))),
    "slots": (Slots, lambda value: (value.change(), value.items.append(2), setattr(value, "late", 1))),
    "module": (lambda: nn.Dropout(0.1), lambda value: setattr(value, "p", 0.7)),
    "weights": (lambda: nn.Linear(2, 2, bias=False), lambda value: value.weight.data.fill_(0.5)),
    "own state": (Average, lambda value: value.value.add_(1)),
    "in a tuple": (lambda: ([1], 2), lambda value: value[0].append(3)),
    "in a partial": (lambda: functools.partial(print, [1]), lambda value: value.args[0].append(3)),
    "after a method": (lambda: Slots().change, lambda value: value()),
}


def seen(value: Any) -> Any:
    """Return a comparable form of an object."""
    if isinstance(value, Slots):
        return [getattr(value, name, None) for name in ("_Slots__hidden", "items", "late")]
    if isinstance(value, functools.partial):
        return value.args
    if callable(getattr(value, "__self__", None)) or hasattr(value, "__self__"):
        return seen(value.__self__)
    if isinstance(value, nn.Module):
        return [getattr(value, "p", None), [p.tolist() for p in value.parameters()]]
    if isinstance(value, Average):
        return value.value.tolist(), 0
    if isinstance(value, dict):
        return list(value.items())
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_made_in_place(name: str) -> None:
    """Every holder of the object sees the restored content."""
    make, change = CHANGES[name]
    torch.manual_seed(0)
    held = [make(), make()]
    holders = iter(held)
    changed, fresh = carried(lambda: SimpleNamespace(value=next(holders)), lambda owner: change(owner.value))
    assert fresh.value is held[1]
    assert seen(fresh.value) == seen(changed.value)


def test_shared_references_stay_shared() -> None:
    """Several references to one object are to one object again; an old list that was replaced is not touched."""

    def make() -> Any:
        shared = [1]
        return SimpleNamespace(one=shared, other=shared, third=shared, record=None, same=None)

    def change(owner: Any) -> None:
        owner.one.append(2)
        owner.other = [3]
        owner.record = Record(items=owner.other)
        owner.same = [owner.record, owner.one]
        owner.record.items.append(owner.same)  # and a cycle

    _, fresh = carried(make, change)
    assert fresh.one is fresh.third
    assert fresh.one == [1, 2]
    assert fresh.record.items is fresh.other
    assert fresh.same[0] is fresh.record
    assert fresh.same[1] is fresh.one
    assert fresh.other[1] is fresh.same


def test_references_to_live_objects_stay_references() -> None:
    """Existing parameters, layers, and methods are referred to, not recreated."""

    def make() -> Any:
        owner = SimpleNamespace(module=nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), by_weight={}, hook=None)
        owner.best = owner.module[0]
        return owner

    def change(owner: Any) -> None:
        owner.best = owner.module[1]
        owner.by_weight[owner.module[0].weight] = 3
        owner.hook = owner.module[1].forward

    _, fresh = carried(make, change)
    assert fresh.best is fresh.module[1]
    assert fresh.by_weight == {fresh.module[0].weight: 3}
    assert fresh.hook.__self__ is fresh.module[1]


def test_what_training_made_and_removed() -> None:
    """New attributes exist again, with generators, locks, and weak references; removed ones are gone."""

    def change(owner: Any) -> None:
        del owner.number
        owner.rng, owner.lock = random.Random(5), threading.Lock()
        owner.rng.random()
        owner.log, owner.parent = logging.getLogger("some"), weakref.ref(owner)

    changed, fresh = carried(Record, change)
    assert not hasattr(fresh, "number") or "number" not in vars(fresh)
    assert fresh.rng.random() == changed.rng.random()
    assert fresh.log is changed.log
    assert fresh.parent() is fresh
    assert not fresh.lock.locked()


def test_unchanged_values_are_left_alone() -> None:
    """A constant that the user edits between two starts keeps the edit; a value that training changed is restored."""
    before = SimpleNamespace(constant=1, count=0)
    state = ObjectState({"root": before})
    before.count = 5
    after = SimpleNamespace(constant=2, count=0)
    assert ObjectState({"root": after}).load_state_dict(state.state_dict()) == []
    assert (after.constant, after.count) == (2, 5)


def test_state_is_a_copy() -> None:
    """Later changes are not in a state that was taken before."""
    owner = SimpleNamespace(items=[torch.zeros(2)], array=np.zeros(2))
    state = ObjectState({"root": owner})
    owner.items.append([1])
    owner.array += 1
    owner.items[0].add_(1)
    taken = state.state_dict()
    expected = repr(taken)
    owner.items[1].append(2)
    owner.items[0].add_(1)
    owner.array += 1
    assert repr(taken) == expected


def numbers() -> Any:
    """Yield numbers."""
    yield from range(9)


class Wrapping(Tensor):
    """A tensor without its own memory, as in libraries that quantize weights."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function(*(value.inner if isinstance(value, cls) else value for value in args), **(kwargs or {}))
        return args[0]


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (numbers, next, "an iterator (generator)"),
        (lambda: iter([1, 2, 3]), next, "an iterator (list_iterator)"),
        (lambda: iter(torch.utils.data.DataLoader([1, 2, 3])), next, "an iterator"),
        (lambda: torch.eye(2).to_sparse(), lambda value: value.mul_(2), "not a plain tensor"),
        (lambda: nested_tensor([torch.ones(2), torch.ones(3)]), lambda value: value.mul_(2), "not a plain tensor"),
        (lambda: Wrapping(torch.ones(2)), lambda value: value.mul_(2), "not a plain tensor"),
    ],
    ids=["generator", "list iterator", "loader iterator", "sparse", "nested", "wrapping"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_change_that_cannot_be_carried_is_named(make: Any, change: Any, reason: str) -> None:
    """It is named by its path, but only once it has changed."""
    owner = SimpleNamespace(value=make(), count=0)
    state = ObjectState({"root": owner})
    assert state.state_dict()[LOST] == {}
    change(owner.value)
    owner.count = 1
    found = state.state_dict()
    assert list(found[LOST]) == ["root.value"]
    assert reason in found[LOST]["root.value"]
    assert found[NODES] == {"root": {"attributes": [["count", 1]]}}  # no part of it stays in the table


class Local:
    """Holds a resource of this machine."""

    def __init__(self) -> None:
        self.file = open(__file__)  # noqa: SIM115 - closed by the test


def test_handles_are_no_state() -> None:
    """A file or a lock that replaces None is not a change; in a user's object it is named."""
    owner = SimpleNamespace(file=None, own=None)
    state = ObjectState({"root": owner})
    owner.file = open(__file__)  # noqa: SIM115 - closed below
    assert state.state_dict() == {NODES: {}, TABLE: [], LOST: {}}
    owner.own = Local()
    assert "TextIOWrapper, in Local.file" in state.state_dict()[LOST]["root.own"]
    owner.file.close()
    owner.own.file.close()


def test_what_is_not_there_any_more_is_named() -> None:
    """An object, a class, or a reference that the new process lacks is named, and the rest is restored."""
    owner = SimpleNamespace(part=Record(), number=0, made=None)
    state = ObjectState({"root": owner})
    owner.part.number, owner.number, owner.made = 1, 2, Slots()
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


def test_checkpoint_cannot_replace_methods() -> None:
    """A class attribute can be restored to a value, never to a function."""
    state = ObjectState({"class": Namespace(owner=Average), "root": Average()}, Rules(left_out=lambda value: ()))
    attributes = [["load_state_dict", ["part", f"{__name__}:through_a_file"]]]
    saved = {NODES: {"class": {"attributes": attributes}}, TABLE: [], LOST: {}}
    before = Average.load_state_dict
    assert len(state.load_state_dict(saved)) == 1
    assert Average.load_state_dict is before


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


def test_no_code_of_the_objects_runs() -> None:
    """No property, no ``__getattr__``, and no ``__setattr__`` is called."""

    class Touchy:
        def __init__(self) -> None:
            vars(self)["value"] = 1

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError(name)

        @property
        def shown(self) -> Any:
            raise AssertionError("shown")

    _, fresh = carried(Touchy, lambda owner: vars(owner).update(value=2))
    assert vars(fresh) == {"value": 2}


def test_more_objects_later_keep_what_was_known() -> None:
    """Added objects are read from then on, and known ones since before."""
    known = Record()
    state = ObjectState({"root": SimpleNamespace(known=known)})
    known.number = 1
    added = SimpleNamespace(known=known, count=0)
    state.add({"added": added})
    assert list(state.state_dict()[NODES]) == ["root.known"]
    added.count = 1
    assert list(state.state_dict()[NODES]) == ["root.known", "added"]


def test_values_of_the_same_objects() -> None:
    """The current values of another state's objects can be read, changed or not, and put back."""
    owner = SimpleNamespace(items=[1], count=0)
    state = ObjectState({"root": owner})
    owner.items.append(2)
    owner.count = 1
    then = state.state_dict()
    owner.items.clear()
    owner.count = 0
    now = state.values_of(then)
    state.load_state_dict(then)
    assert (owner.items, owner.count) == ([1, 2], 1)
    state.load_state_dict(now)
    assert (owner.items, owner.count) == ([], 0)


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_tensor_without_one_shape_is_no_copy_of_a_weight() -> None:
    """A nested tensor beside copies of the weights is passed over."""
    weight = torch.nn.Parameter(torch.arange(3.0))
    owner = SimpleNamespace(ragged=nested_tensor([torch.ones(2), torch.ones(3)]), copied=weight.detach().clone())
    state = ObjectState({"root": owner})
    state.carry_copies([weight])
    assert list(state.state_dict()[NODES]) == ["root.copied"]

"""Values and changes of all kinds are found, carried through a checkpoint file, and restored in place."""

from __future__ import annotations

import array
import copy
import datetime
import enum
import functools
import hashlib
import io
import pathlib
import types
import uuid
import weakref
from collections import Counter, OrderedDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import spatial
from torch import Tensor, nn
from torch.nested import nested_tensor

from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES, TABLE
from tests.state.objects.round_trips import carried

Pair = namedtuple("Pair", "first second")


class Phase(enum.Enum):
    WARM_UP = 1
    DECAY = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Tag(str):
    weight = 0


class Count(int):
    __slots__ = ()


class Triple(tuple[int, ...]):
    """A tuple that is not a named tuple."""


class Texts(dict[str, Any]): ...


class Lists(list[Any]): ...


@dataclass
class Record:
    number: int = 0
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int


class Slots:
    __slots__ = ("__hidden", "items", "late")

    def __init__(self) -> None:
        self.__hidden, self.items = 1, [1]

    def change(self) -> None:
        self.__hidden += 1


class Modes:
    """Chooses one of its own methods."""

    def __one(self) -> int:
        return 1

    def __two(self) -> int:
        return 2

    def __init__(self) -> None:
        self.mode = self.__one

    def change(self) -> None:
        self.mode = self.__two


class Keyed:
    """Its hash depends on an attribute."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and other.number == self.number


def tagged() -> Tag:
    """Return a text with an attribute."""
    tag = Tag("abc")
    tag.weight = 3
    return tag


VALUES = [
    None, True, -3, 1 << 80, 0.1, float("inf"), 1 + 2j, "text", b"bytes", (1, (2, "three")), frozenset({1, 2}),
    [1, [2.5, {"k": (None,)}]], {"a": 1, (1, "b"): [2], Phase.DECAY: 3}, {1, "two"}, Counter("aab"),
    OrderedDict(b=1, a=2), deque([1, 2], maxlen=2), defaultdict(list, a=[1]), Pair(1, [2]), Phase.WARM_UP,
    datetime.date(2026, 2, 3), datetime.datetime(2026, 2, 3, tzinfo=datetime.timezone.utc), datetime.time(1, 2),
    datetime.timedelta(days=1, microseconds=3), pathlib.PurePosixPath("a/b"), range(1, 9, 2), slice(1, None, 2),
    Decimal("1.50"), Fraction(1, 3), uuid.UUID(int=7), torch.float16, torch.device("cpu"), torch.Size([1, 2]), ...,
    np.float32(0.1), np.int64(3), np.datetime64("2026-02-03"), Record(3, [1, Record()]), Texts(a=1),
    [float(i) for i in range(200)], list(range(200)), [*range(200), "and a text"], [True] * 200,
    SimpleNamespace(a=1), type(None), int, Phase, Record, tagged(), Count(7), Triple((1, [2])), Access(0),
    Access.READ | Access.WRITE, UserList([1, 2]), bytearray(b"ab"), array.array("i", [1]),
    {"set": {Keyed(1), Keyed(2)}, "dict": {Keyed(3): 4}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]}")
def test_each_value_is_carried(value: Any) -> None:
    """A value in an attribute, and one deep in a list, come back with their types and attributes."""

    def change(owner: Any) -> None:
        owner.value = copy.deepcopy(value)
        owner.items.append({"deep": copy.deepcopy(value)})

    _, fresh = carried(lambda: SimpleNamespace(value="before", items=[]), change)
    for found in (fresh.value, fresh.items[0]["deep"]):
        assert (type(found), found) == (type(value), value)
        for name in ("maxlen", "default_factory", "weight"):
            assert getattr(found, name, None) == getattr(value, name, None)


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


def counter() -> Callable[[], int]:
    """Return a function with its own variable."""
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def backward(value: list[Tensor]) -> None:
    """Give the first tensor a gradient, and take that of the second."""
    (value[0] * 2).sum().backward()
    value[1].grad = None


def two_tensors() -> list[Tensor]:
    """Return two tensors, the second with a gradient."""
    made = [torch.ones(2, requires_grad=True) for _ in range(2)]
    made[1].grad = torch.ones(2)
    return made


@torch.inference_mode()
def features() -> Tensor:
    """Return a tensor without a version."""
    return torch.zeros(2)


def objects() -> Any:
    """Return an array with lists."""
    rows = np.empty(2, dtype=object)
    rows[:] = [[1], [2]]
    return rows


def move(value: Any, source: int, target: int) -> None:
    """Move the only item of a list to the front of its neighbor."""
    value[target].insert(0, value[source].pop())


def each_item(items: Any) -> None:
    """Change each list in place."""
    for i, item in enumerate(items):
        item[0] = i


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda value: value.append(3)),
    "item": (lambda: [1, 2], lambda value: value.__setitem__(0, 3)),
    "list that is sorted": (lambda: [2, 1], lambda value: value.sort()),
    "long list": (lambda: [[0]] * 300, lambda value: value[7].append(1)),
    "list that grows long": (list, lambda value: value.extend(range(1_000))),
    "list of a class": (lambda: Lists([1]), lambda value: value.append(2)),
    "between neighbors": (lambda: [[1], [2]], lambda value: move(value, 0, 1)),
    "between neighbors, to the first": (lambda: [[1], [2]], lambda value: move(value, 1, 0)),
    "dict": (lambda: {"a": 1}, lambda value: value.update(b=2)),
    "value in a dict": (lambda: {1: 2}, lambda value: value.update({1: 3})),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "key of a dict": (lambda: {"a": 2}, lambda value: value.update(b=value.pop("a"))),
    "keys of one class": (lambda: {(i, 0): [0] for i in range(3)}, lambda value: each_item(value.values())),
    "keys that are objects": (lambda: {Keyed(i): [0] for i in range(3)}, lambda value: each_item(value.values())),
    "dict of a class": (lambda: Texts(a=1), lambda value: value.update(b=2)),
    "defaultdict": (lambda: defaultdict(lambda: 7), lambda value: value["a"]),
    "counter": (lambda: Counter("aab"), lambda value: value.update("a")),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "deque": (lambda: deque([1], maxlen=2), lambda value: value.extend([2, 3])),
    "bytearray": (lambda: bytearray(b"ab"), lambda value: value.extend(b"c")),
    "numbers": (lambda: array.array("i", [1]), lambda value: value.append(2)),
    "text in memory": (lambda: io.StringIO("a"), lambda value: value.write("xyz")),
    "bytes in memory": (lambda: io.BytesIO(b"a"), lambda value: value.write(b"xyz")),
    "tensor": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "data of a tensor": (lambda: torch.zeros(3), lambda value: value.data.add_(1)),
    "shape of a tensor": (lambda: torch.zeros(3), lambda value: setattr(value, "data", torch.ones(2))),
    "tensor of inference mode": (features, torch.inference_mode()(lambda value: value.add_(1))),
    "expanded tensor": (
        lambda: torch.ones(1).expand(3),
        lambda value: setattr(value, "data", torch.full((1,), 2.0).expand(3)),
    ),
    "gradients": (two_tensors, backward),
    "array": (lambda: np.zeros(3), lambda value: value.__iadd__(1)),
    "array that is shuffled": (lambda: np.arange(9), lambda value: np.random.RandomState(0).shuffle(value)),
    "large array": (lambda: np.arange(30_000), lambda value: np.random.RandomState(0).shuffle(value)),
    "array of objects": (lambda: np.array([1, None], dtype=object), lambda value: value.__setitem__(1, 3)),
    "list in an array": (objects, lambda value: value[1].append(3)),
    "array of records": (
        lambda: np.zeros(2, np.dtype([("state", "f4", (3,)), ("action", "i8")])),
        lambda value: value["state"].fill(2),
    ),
    "attribute": (Record, lambda value: setattr(value, "number", 4)),
    "new attribute": (Record, lambda value: setattr(value, "other", 4)),
    "attribute that is gone": (Record, lambda value: vars(value).pop("number")),
    "renamed attribute": (Record, lambda value: vars(value).update(other=vars(value).pop("number"))),
    "all attributes": (Record, lambda value: setattr(value, "__dict__", {**vars(value), "number": 2})),
    "list of an object": (Record, lambda value: value.items.append(Record(1))),
    "frozen": (lambda: Frozen(1), lambda value: object.__setattr__(value, "number", 2)),
    "hidden slot": (Slots, Slots.change),
    "empty slot": (Slots, lambda value: setattr(value, "late", 1)),
    "emptied slot": (Slots, lambda value: delattr(value, "items")),
    "own method": (Modes, Modes.change),
    "module": (lambda: nn.Dropout(0.1), lambda value: setattr(value, "p", 0.7)),
    "weights": (lambda: nn.Linear(2, 2, bias=False), lambda value: value.weight.data.fill_(0.5)),
    "scaler": (
        lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
        lambda value: value.load_state_dict({**value.state_dict(), "scale": 2.0}),
    ),
    "in a tuple": (lambda: ([1], 2), lambda value: value[0].append(3)),
    "in a partial": (lambda: functools.partial(print, [1]), lambda value: value.args[0].append(3)),
    "after a method": (lambda: Slots().change, lambda value: value()),
    "variable of a function": (counter, lambda value: value()),
}


def seen(value: Any) -> Any:
    """Return a comparable form of an object: what its parts are, of which types."""
    if isinstance(value, (Tensor, np.ndarray, array.array)):
        return type(value), repr(value.tolist()), seen(getattr(value, "grad", None))
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return value.getvalue(), value.tell()
    if isinstance(value, nn.Module):
        return getattr(value, "p", None), [seen(one) for one in value.parameters()]
    if isinstance(value, dict):
        return type(value), [(seen(key), seen(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [seen(one) for one in value]
    if isinstance(value, functools.partial):
        return seen(value.args)
    if isinstance(value, types.MethodType):
        return value.__name__, type(value.__self__) is Modes or seen(value.__self__)
    if isinstance(value, types.FunctionType):
        return [seen(cell.cell_contents) for cell in value.__closure__ or ()]
    if isinstance(value, (Slots, Frozen)):
        names = ("number", "_Slots__hidden", "items", "late")
        return [seen(getattr(value, name, "nothing")) for name in names]
    if isinstance(value, torch.amp.GradScaler):
        return value.state_dict()
    return type(value), seen(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else value


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_made_in_place(name: str) -> None:
    """The change is found, and every holder of the object sees the restored content."""
    make, change = CHANGES[name]
    held = [make(), make()]
    holders = iter(held)
    changed, fresh = carried(lambda: SimpleNamespace(value=next(holders)), lambda owner: change(owner.value))
    assert fresh.value is held[1]
    assert seen(fresh.value) == seen(changed.value) != seen(make())


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


class OwnPath(type(pathlib.Path())): ...  # type: ignore[misc]


class Refuses:
    """Raises when its state is read after the start."""

    is_started = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_started:
            raise RuntimeError("no state any more")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


LOCAL = enum.Enum("LOCAL", "A B")
LOCAL.__qualname__ = "function.<locals>.LOCAL"


def becomes(value: object) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what makes nothing, and what puts `value` in its place."""
    return lambda: None, lambda root: setattr(root, "value", value)


def in_place(make: Callable[[], Any], change: Callable[[Any], Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what makes a value, and what changes it in a root."""
    return make, lambda root: change(root.value)


LOST_CHANGES: dict[str, tuple[tuple[Callable[[], Any], Callable[[Any], Any]], str]] = {
    "generator": (in_place(numbers, next), "an iterator (generator)"),
    "list iterator": (in_place(lambda: iter([1, 2]), next), "an iterator (list_iterator)"),
    "loader iterator": (in_place(lambda: iter(torch.utils.data.DataLoader([1, 2])), next), "an iterator"),
    "sparse": (in_place(lambda: torch.eye(2).to_sparse(), lambda value: value.mul_(2)), "not a plain tensor"),
    "nested": (
        in_place(lambda: nested_tensor([torch.ones(2), torch.ones(3)]), lambda value: value.mul_(2)),
        "not a plain tensor",
    ),
    "wrapping": (in_place(lambda: Wrapping(torch.ones(2)), lambda value: value.mul_(2)), "not a plain tensor"),
    "table": (in_place(lambda: pd.DataFrame({"a": [0.0]}), lambda value: value.loc.__setitem__(1, [3.0])), "DataFrame"),
    "hash": (in_place(hashlib.sha256, lambda value: value.update(b"batch")), "HASH"),
    "own error": (in_place(Refuses, lambda value: setattr(value, "is_started", True)), "no state any more"),
    "enum of a function": (becomes(LOCAL.A), "whose class can't be found"),
    "path of a class": (becomes(OwnPath("a")), "OwnPath"),
    "records": (becomes(np.zeros(2, "i4").view(np.recarray)), "not a plain array"),
    "masked array": (becomes(np.ma.array([1, 2], mask=[0, 1])), "not a plain array"),
    "dtype with gaps": (becomes(np.zeros(1, np.dtype([("a", "i1"), ("b", "i4")], align=True))), "dtype"),
    "factory": (becomes(defaultdict(lambda: 0)), "can't be found by its name"),
    "factory of a factory": (
        becomes(defaultdict(functools.partial(defaultdict, lambda: 0))),
        "can't be found by its name",
    ),
    "slice of an object": (becomes(slice(np.int64(1), None)), "a slice"),
    "tree": (becomes(spatial.cKDTree(np.zeros((2, 2)))), "only its library can read"),
    "function of Python": (becomes(len), "can't be found by its name"),
    "file in a list": (becomes([1, io.FileIO(__file__)]), "FileIO"),
    "file in a dict": (becomes({"step": 1, "file": io.FileIO(__file__)}), "FileIO"),
    "file of an object": (becomes(Record(items=io.FileIO(__file__))), "FileIO, in Record.items"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOST_CHANGES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_change_that_cannot_be_carried_is_named(name: str) -> None:
    """It is named by its path, but only once it has changed, and no part of it stays in the state."""
    (make, change), reason = LOST_CHANGES[name]
    root = SimpleNamespace(value=make(), count=0)
    state = ObjectState({"root": root})
    assert state.state_dict()[LOST] == {}
    change(root)
    root.count = 1
    found = state.state_dict()
    assert list(found[LOST]) == ["root.value"]
    assert reason in found[LOST]["root.value"]
    assert found[NODES] == {"root": {"attributes": [["count", 1]]}}
    assert found[TABLE] == []


def test_weak_reference_to_nothing() -> None:
    """A dead weak reference is dead again."""
    _, fresh = carried(SimpleNamespace, lambda root: setattr(root, "value", weakref.ref(Keyed(1))))
    assert fresh.value() is None

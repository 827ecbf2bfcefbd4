"""Values in real scripts: of classes that derive from Python's own, buffers, views, deep and odd ones."""

from __future__ import annotations

import argparse
import array
import enum
import functools
import hashlib
import io
import pathlib
import sys
import types
import weakref
from collections import OrderedDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import spatial
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_faulttolerant.loader.resumable import ResumableDataLoader
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, TABLE, ObjectState, contents_of
from lightning_faulttolerant.state.objects.walk import Rules
from tests.state.objects.round_trips import carried, through_a_file


class Tag(str):
    """A text with an attribute."""


class Count(int):
    """A number of a custom class."""

    __slots__ = ()


class Triple(tuple[int, ...]):
    """A tuple that is not a named tuple."""


class Access(enum.Flag):
    """Can combine several flags."""

    READ = 1
    WRITE = 2


class Node:
    """A node of a linked list."""

    def __init__(self, number: int, following: Node | None) -> None:
        self.number, self.following = number, following


class Keyed:
    """Its hash depends on an attribute."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and other.number == self.number


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


def tagged() -> Tag:
    """Return a text with an attribute."""
    tag = Tag("abc")
    tag.weight = 3
    return tag


@pytest.mark.parametrize("value", [tagged(), Count(7), Triple((1, [2])), Access.READ | Access.WRITE, Access(0)])
def test_values_of_classes(value: Any) -> None:
    """A value of a class that derives from a text, a number, or a tuple keeps its class and attributes."""
    _, fresh = carried(lambda: SimpleNamespace(value=None), lambda root: vars(root).update(value=value))
    assert (fresh.value, type(fresh.value)) == (value, type(value))
    assert getattr(fresh.value, "__dict__", {}) == getattr(value, "__dict__", {})


def grown(value: Any) -> Callable[[Any], None]:
    """Return a function that puts `value` into a new attribute."""
    return lambda root: vars(root).update(value=value)


BUFFERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c"), bytes),
    "array": (lambda: array.array("i", [1]), lambda v: v.append(2), list),
    "text": (lambda: io.StringIO("a"), lambda v: v.write("xyz"), lambda v: (v.getvalue(), v.tell())),
    "bytes": (lambda: io.BytesIO(b"a"), lambda v: v.write(b"xyz"), lambda v: (v.getvalue(), v.tell())),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers(kind: str, is_new: bool) -> None:
    """An array of bytes or numbers, and an in-memory file, are carried, both changed in place and new."""
    make, change, content = BUFFERS[kind]

    def train(root: Any) -> None:
        if is_new:
            root.value = make()
        change(root.value)

    changed, fresh = carried(lambda: SimpleNamespace(value=None if is_new else make()), train)
    assert content(fresh.value) == content(changed.value)


def test_arguments_of_a_command_line() -> None:
    """The result of ``parse_args`` is an object like any other."""
    _, fresh = carried(
        lambda: SimpleNamespace(args=argparse.Namespace(lr=1.0)), lambda root: vars(root.args).update(lr=0.5)
    )
    assert fresh.args.lr == 0.5


def test_new_user_list() -> None:
    """A list class of Python's `collections` that training creates is found by its name."""
    _, fresh = carried(SimpleNamespace, grown(UserList([1, 2])))
    assert fresh.value == UserList([1, 2])


def test_scaler() -> None:
    """A gradient scaler that the user holds is carried by its state."""

    def make() -> Any:
        return SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

    _, fresh = carried(make, lambda root: root.scaler.load_state_dict({**root.scaler.state_dict(), "scale": 2.0}))
    assert fresh.scaler.state_dict()["scale"] == 2.0


def test_keys_that_are_no_texts() -> None:
    """Two keys of one class have different paths: each item that changes in place comes back."""

    def make() -> Any:
        root = SimpleNamespace(table={(i, 0): [0] for i in range(3)}, by_object={})
        root.by_object.update({Keyed(i): [0] for i in range(3)})
        return root

    def train(root: Any) -> None:
        for i, item in enumerate((*root.table.values(), *root.by_object.values())):
            item[0] = i

    changed, fresh = carried(make, train)
    assert list(fresh.table.values()) == list(changed.table.values()) == [[0], [1], [2]]
    assert list(fresh.by_object.values()) == [[3], [4], [5]]


def test_sets_of_new_objects() -> None:
    """An object in a new set, or a key of a new dict, has its attributes before it is hashed."""
    _, fresh = carried(SimpleNamespace, grown({"set": {Keyed(1), Keyed(2)}, "dict": {Keyed(3): 4}}))
    assert fresh.value == {"set": {Keyed(1), Keyed(2)}, "dict": {Keyed(3): 4}}


def test_deep_structure() -> None:
    """A linked list of 20,000 objects is carried."""

    def train(root: Any) -> None:
        root.head = None
        for number in range(20_000):
            root.head = Node(number, root.head)

    changed, fresh = carried(lambda: SimpleNamespace(head=None), train)
    found, one = [], fresh.head
    while one is not None:
        found.append(one.number)
        one = one.following
    assert found == list(range(20_000))[::-1]
    state = ObjectState({"root": SimpleNamespace(head=None)}).state_dict()
    assert contents_of(state) == {}
    contents = contents_of(saved_of(changed))
    assert len(str(contents["root.head"])) > 20_000
    while changed.head is not None:  # Python itself can't free it in one go
        changed.head = changed.head.following
    while fresh.head is not None:
        fresh.head = fresh.head.following


def saved_of(root: Any) -> dict[str, Any]:
    """Return the state of an object whose `head` did not exist at first."""
    head, root.head = root.head, None
    state = ObjectState({"root": root})
    root.head = head
    return state.state_dict()


def test_own_method() -> None:
    """A private method in an attribute is found by its name in its class."""
    _, fresh = carried(Modes, Modes.change)
    assert fresh.mode() == 2


def test_weak_reference_to_nothing() -> None:
    """A dead weak reference is dead again."""

    def train(root: Any) -> None:
        gone = Keyed(1)
        root.value = weakref.ref(gone)

    _, fresh = carried(SimpleNamespace, train)
    assert fresh.value() is None


def test_structured_array() -> None:
    """An array of records is carried, even if a field has a shape."""
    dtype = np.dtype([("state", "f4", (3,)), ("action", "i8")])
    _, fresh = carried(
        lambda: SimpleNamespace(rows=np.zeros(2, dtype)), lambda root: root.rows["state"].__setitem__(slice(None), 2)
    )
    assert fresh.rows["state"].tolist() == [[2.0] * 3] * 2


def test_items_of_an_object_array() -> None:
    """A list in an array of objects that changes in place comes back."""

    def make() -> Any:
        rows = np.empty(2, dtype=object)
        rows[:] = [[1], [2]]
        return SimpleNamespace(rows=rows)

    _, fresh = carried(make, lambda root: root.rows[1].append(3))
    assert fresh.rows.tolist() == [[1], [2, 3]]


def new_views(root: Any) -> None:
    """Keep views of a weight, of a new tensor, and of a tensor that is not held."""
    root.row = root.weight.detach()[1]
    root.whole = torch.zeros(4)
    root.half = root.whole[2:]
    root.alone = torch.arange(4.0)[1:]


def test_views() -> None:
    """Tensors that share memory share it again: a change of one is visible in the other."""
    changed, fresh = carried(lambda: SimpleNamespace(weight=nn.Parameter(torch.zeros(3, 2))), new_views)
    with torch.no_grad():
        fresh.weight.add_(1.0)
        fresh.whole.add_(2.0)
    assert fresh.row.tolist() == [1.0, 1.0]
    assert fresh.half.tolist() == [2.0, 2.0]
    assert fresh.alone.tolist() == changed.alone.tolist() == [1.0, 2.0, 3.0]


def test_view_of_what_is_too_large() -> None:
    """A few elements of a tensor that is too large are carried, as those of no other tensor."""
    root = SimpleNamespace()
    state = ObjectState({"root": root}, Rules())
    root.all = torch.arange(1000.0)
    root.few = root.all[:3]
    saved = state.state_dict(max_bytes=2_000)
    assert saved[LOST].keys() == {"root.all"}
    fresh = SimpleNamespace()
    assert ObjectState({"root": fresh}, Rules()).load_state_dict(through_a_file(saved)) == []
    assert fresh.few.tolist() == [0.0, 1.0, 2.0]


def test_gradient_of_a_tensor() -> None:
    """The gradient of a user's tensor is back; a removed one stays removed."""

    def make() -> Any:
        root = SimpleNamespace(one=torch.ones(2, requires_grad=True), other=torch.ones(2, requires_grad=True))
        root.other.grad = torch.ones(2)
        return root

    def train(root: Any) -> None:
        (root.one * 2).sum().backward()
        root.other.grad = None
        root.new = torch.ones(1, requires_grad=True)
        root.new.grad = torch.full((1,), 3.0)

    _, fresh = carried(make, train)
    assert fresh.one.grad.tolist() == [2.0, 2.0]
    assert fresh.other.grad is None
    assert fresh.new.grad.tolist() == [3.0]


def test_tensors_of_inference_mode() -> None:
    """Tensors created in inference mode have no version; changes of them are still carried."""

    def make() -> Any:
        with torch.inference_mode():
            return SimpleNamespace(features=torch.zeros(2))

    def train(root: Any) -> None:
        with torch.inference_mode():
            root.features.add_(1.0)

    _, fresh = carried(make, train)
    assert fresh.features.tolist() == [1.0, 1.0]


def test_expanded_tensor() -> None:
    """A tensor whose elements share memory is filled."""

    def train(root: Any) -> None:
        root.scale.data = torch.full((1,), 2.0).expand(3)

    _, fresh = carried(lambda: SimpleNamespace(scale=torch.ones(1).expand(3)), train)
    assert fresh.scale.tolist() == [2.0] * 3


def test_removed_global(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that training has removed, and that the next start does not have, is not an error."""
    root = SimpleNamespace(value=1)
    state = ObjectState({"root": root})
    del root.value
    saved = state.state_dict()
    assert ObjectState({"root": SimpleNamespace()}).load_state_dict(saved) == []


LOCAL = enum.Enum("LOCAL", "A B")
LOCAL.__qualname__ = "function.<locals>.LOCAL"


class OwnPath(type(pathlib.Path())):  # type: ignore[misc]
    """A path of a custom class."""


LOST_VALUES = {
    "enum of a function": (LOCAL.A, "whose class can't be found"),
    "path of a class": (OwnPath("a"), "OwnPath"),
    "records": (np.zeros(2, "i4").view(np.recarray), "not a plain array"),
    "masked array": (np.ma.array([1, 2], mask=[0, 1]), "not a plain array"),
    "dtype with gaps": (np.zeros(1, np.dtype([("a", "i1"), ("b", "i4")], align=True)), "dtype"),
    "factory": (defaultdict(lambda: 0), "can't be found by its name"),
    "factory of a factory": (defaultdict(functools.partial(defaultdict, lambda: 0)), "can't be found by its name"),
    "slice of an object": (slice(np.int64(1), None), "a slice"),
    "tree": (spatial.cKDTree(np.zeros((2, 2))), "only its library can read"),
    "function of Python": (len, "can't be found by its name"),
    "file in a list": ([1, sys.stdout], "TextIOWrapper"),
    "file in a dict": ({"step": 1, "file": sys.stdout}, "TextIOWrapper"),
}


@pytest.mark.parametrize("kind", LOST_VALUES)
def test_lost_values_are_named_when_they_are_saved(kind: str) -> None:
    """A value that a resume could not recreate is named at the save, and no part of it stays in the state."""
    value, reason = LOST_VALUES[kind]
    root = SimpleNamespace(value=None)
    state = ObjectState({"root": root})
    root.value = value
    if kind == "file in a list":
        root.value = [1, open(__file__)]  # noqa: SIM115 - closed below
    elif kind == "file in a dict":
        root.value = {"step": 1, "file": open(__file__)}  # noqa: SIM115 - closed below
    saved = state.state_dict()
    assert reason in saved[LOST]["root.value"]
    assert (saved[NODES], saved[TABLE]) == ({}, [])
    for file in (*(root.value if isinstance(root.value, list) else ()), *getattr(root.value, "values", tuple)()):
        if isinstance(file, io.TextIOWrapper):
            file.close()


def test_table_that_grows_in_place_is_named() -> None:
    """A pandas table that gets a row is named; an unchanged one is not."""
    root = SimpleNamespace(rows=pd.DataFrame({"a": [0.0]}), others=pd.DataFrame({"a": [0.0]}))
    state = ObjectState({"root": root})
    assert state.state_dict()[LOST] == {}
    root.rows.loc[1] = [3.0]
    assert list(state.state_dict()[LOST]) == ["root.rows"]


def test_hash_that_is_fed_is_named() -> None:
    """A hash of `hashlib` can't be copied: it is named when it is fed."""
    root = SimpleNamespace(seen=hashlib.sha256())
    state = ObjectState({"root": root})
    assert state.state_dict()[LOST] == {}
    root.seen.update(b"batch")
    assert list(state.state_dict()[LOST]) == ["root.seen"]


def test_what_a_data_set_opens_is_no_loss() -> None:
    """A library's object that a data set has opened is not lost, as it is opened again; in a module it is named."""

    class Reader(Dataset[Tensor]):
        tree: Any = None

    reader, module = Reader(), SimpleNamespace(tree=None)
    state = ObjectState({"dataset": reader, "module": module})
    reader.tree = module.tree = spatial.cKDTree(np.zeros((2, 2)))
    assert list(state.state_dict()[LOST]) == ["module.tree"]


class Meddling(list[Any]):
    """Counts how often its own code runs."""

    calls = 0

    def __iter__(self) -> Iterator[Any]:
        Meddling.calls += 1
        return super().__iter__()

    def __len__(self) -> int:
        Meddling.calls += 1
        return super().__len__()

    def __setitem__(self, *arguments: Any) -> None:
        Meddling.calls += 1
        super().__setitem__(*arguments)

    def __eq__(self, other: object) -> bool:
        Meddling.calls += 1
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


class MeddlingDict(OrderedDict[Any, Any]):
    """The same for a mapping."""

    def items(self) -> Any:
        Meddling.calls += 1
        return super().items()

    def __iter__(self) -> Iterator[Any]:
        Meddling.calls += 1
        return super().__iter__()

    def __setitem__(self, key: Any, value: Any) -> None:
        Meddling.calls += 1
        super().__setitem__(key, value)


class MeddlingSlots:
    """Has no ``__dict__``, and answers for every name."""

    __slots__ = ("number",)

    def __getattr__(self, name: str) -> Any:
        Meddling.calls += 1
        return lambda: None


def test_no_code_of_containers_runs() -> None:
    """The own code of a user's list, dict, or slotted class does not run when it is read."""

    def make() -> Any:
        root = SimpleNamespace(items=Meddling([1]), pairs=MeddlingDict(), slots=MeddlingSlots(), queue=deque([1]))
        root.slots.number = 1
        return root

    def train(root: Any) -> None:
        list.append(root.items, 2)
        OrderedDict.__setitem__(root.pairs, "b", 1)
        OrderedDict.__setitem__(root.pairs, "a", 2)
        root.slots.number = 2
        root.queue.append(2)

    root, fresh = make(), make()
    Meddling.calls = 0
    state = ObjectState({"root": root})
    train(root)
    ObjectState({"root": fresh}).load_state_dict(state.state_dict())
    assert Meddling.calls == 0
    assert (list(fresh.items), list(fresh.pairs), fresh.slots.number) == ([1, 2], ["b", "a"], 2)


class Refuses:
    """Raises when its state is read after the start."""

    def __init__(self) -> None:
        self.is_started = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_started:
            raise RuntimeError("no state any more")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_error_of_a_users_own_is_named() -> None:
    """A `state_dict` that raises at a save does not end the training: the object is named."""
    root = SimpleNamespace(part=Refuses(), number=0)
    state = ObjectState({"root": root})
    root.part.is_started, root.number = True, 1
    saved = state.state_dict()
    assert "no state any more" in saved[LOST]["root.part"]
    assert [name for name, _ in saved[NODES]["root"]["attributes"]] == ["number"]


class Shows:
    """Its state is the content of another object."""

    def __init__(self, history: list[int]) -> None:
        self._held = history
        self.loaded: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"history": self._held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = list(state_dict["history"])


def test_states_are_loaded_after_what_they_refer_to() -> None:
    """`load_state_dict` of an object finds the other objects already restored."""

    def make() -> Any:
        history: list[int] = []
        return SimpleNamespace(shows=Shows(history), history=history)

    _, fresh = carried(make, lambda root: root.history.extend((1, 2)))
    assert fresh.shows.loaded == fresh.history == [1, 2]


def test_order_of_numbers_in_a_set_is_kept_or_named() -> None:
    """A set of numbers that would come back in another order is named."""
    root = SimpleNamespace(numbers=set(range(1_000)))
    state = ObjectState({"root": root})
    for number in set(range(1_000)) - {5, 700, 900}:
        root.numbers.discard(number)
    saved = through_a_file(state.state_dict())
    fresh = SimpleNamespace(numbers=set(range(1_000)))
    missing = ObjectState({"root": fresh}).load_state_dict(saved)
    assert fresh.numbers == {5, 700, 900}
    assert (list(fresh.numbers) == list(root.numbers)) != bool(missing)


def test_module_of_the_same_name_as_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module with the name of an ignored package is still the user's."""
    module = types.ModuleType("datasets")
    module.__file__ = "/home/somebody/project/datasets.py"
    exec("class Own:\n    def __init__(self):\n        self.level = 0\n", vars(module))
    monkeypatch.setitem(sys.modules, "datasets", module)
    _, fresh = carried(lambda: SimpleNamespace(own=vars(module)["Own"]()), lambda root: vars(root.own).update(level=3))
    assert fresh.own.level == 3


def test_state_of_a_loader_is_named_or_dropped() -> None:
    """A value that holds a loader's state is lost: a fit names it, a loader whose next state would hold it drops it."""
    loader = ResumableDataLoader([1, 2])

    class Keeps:
        pass

    for rules, lost in ((Rules(), {"root.kept"}), (Rules(drops_saved=True), set())):
        keeps = Keeps()
        state = ObjectState({"root": keeps}, rules)
        keeps.kept = {"loader": loader.state_dict(), "best": 3}
        assert state.state_dict()[LOST].keys() == lost


class Meta(torch.Tensor):
    """A tensor with attributes, such as MONAI's ``MetaTensor``."""

    meta: dict[str, object]


def test_tensor_of_a_class() -> None:
    """Its class, its attributes, and the memory that it shares with another tensor are restored."""

    def fill(owner: Any) -> None:
        tensor = torch.arange(4.0).as_subclass(Meta)
        tensor.meta = {"affine": torch.eye(2), "applied": [owner.kept]}
        owner.cache[1] = tensor
        owner.rows = tensor.as_subclass(torch.Tensor)[1:]

    _, fresh = carried(lambda: SimpleNamespace(cache=[None, None], rows=None, kept=[3]), fill)
    tensor = fresh.cache[1]
    assert type(tensor) is Meta
    assert tensor.tolist() == [0, 1, 2, 3]
    assert torch.equal(tensor.meta["affine"], torch.eye(2))
    assert tensor.meta["applied"][0] is fresh.kept
    fresh.rows.fill_(7)
    assert tensor.tolist() == [0, 7, 7, 7]

"""Values in real scripts: views, large, deep and strange ones, and objects with code of their own. None stops a run."""

from __future__ import annotations

import ctypes
import random
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import spatial
from torch import Tensor, nn
from torch.nested import nested_tensor
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant.loader.resumable import ResumableDataLoader
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES, contents_of
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.trainer.run.fingerprint import loader_fingerprint
from tests.laws.data_sets import NoisyDataset
from tests.state.objects.round_trips import carried, through_a_file


def test_deep_structure() -> None:
    """A linked list of 20,000 objects is carried and compared."""

    def train(root: Any) -> None:
        for number in range(20_000):
            root.head = SimpleNamespace(number=number, following=root.head)

    changed, fresh = carried(lambda: SimpleNamespace(head=None), train)
    head, changed.head = changed.head, None
    state = ObjectState({"root": changed})
    changed.head = head
    assert len(str(contents_of(state.state_dict())["root.head"])) > 20_000
    found = []
    while fresh.head is not None:  # Python itself can't free it in one go
        found.append(fresh.head.number)
        fresh.head, head = fresh.head.following, head.following
        changed.head = head
    assert found == list(range(20_000))[::-1]


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


def test_what_a_data_set_opens_is_no_loss() -> None:
    """A library's object that a data set has opened is not lost, as it is opened again; in a module it is named."""

    class Reader(Dataset[Tensor]):
        tree: Any = None

    reader, module = Reader(), SimpleNamespace(tree=None)
    state = ObjectState({"dataset": reader, "module": module})
    reader.tree = module.tree = spatial.cKDTree(np.zeros((2, 2)))
    assert list(state.state_dict()[LOST]) == ["module.tree"]


def meddle(*arguments: Any) -> Any:
    """Fail: no code of a user's class may run."""
    raise AssertionError("code of a class ran")


class MeddlingList(list[Any]):
    __iter__ = __len__ = __setitem__ = __eq__ = meddle
    __hash__ = None  # type: ignore[assignment]


class MeddlingDict(OrderedDict[Any, Any]):
    items = __iter__ = __setitem__ = meddle


class MeddlingSlots:
    __slots__ = ("number",)
    __getattr__ = meddle


class Meddling:
    """Every property, method, and item access of it is an error."""

    __setattr__ = __len__ = __getitem__ = __iter__ = __bool__ = __eq__ = __hash__ = meddle  # type: ignore[assignment]
    parameters = property(meddle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy and pickle request
            raise AttributeError(name)
        meddle()


def test_no_code_of_the_objects_runs() -> None:
    """The own code of a user's list, dict, or other class does not run when it is read or restored."""

    def make() -> Any:
        root = SimpleNamespace(items=MeddlingList([1]), pairs=MeddlingDict(), slots=MeddlingSlots(), other=Meddling())
        root.slots.number = vars(root.other)["number"] = 1
        vars(root.other)["rng"] = random.Random(0)
        return root

    def train(root: Any) -> None:
        list.append(root.items, 2)
        OrderedDict.__setitem__(root.pairs, "b", 1)
        OrderedDict.__setitem__(root.pairs, "a", 2)
        root.slots.number = vars(root.other)["number"] = 2

    _, fresh = carried(make, train)
    assert [*list.__iter__(fresh.items)] == [1, 2]
    assert [*OrderedDict.__iter__(fresh.pairs)] == ["b", "a"]
    assert (fresh.slots.number, vars(fresh.other)["number"]) == (2, 2)
    held = HeldGenerators({"dataset": fresh.other, "more": [fresh.items, fresh.pairs]})
    assert list(state := held.state_dict()) == ["dataset.rng"]
    assert held.load_state_dict(state) == []


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


# Large arrays and tensors: which of them are carried, and how long they are held

_NUM = 500_000
IN_A_WORKER = Rules(max_items=1_000)


@pytest.mark.parametrize("mode", ["r+", "c"])
@pytest.mark.parametrize("wrap", [lambda a: a, np.asarray, lambda a: a[2:].reshape(-1, 2)], ids=["it", "base", "part"])
def test_mapped_file_is_no_state(tmp_path: Path, mode: Any, wrap: Any) -> None:
    """Data written into a mapped file is not state, nor is a mapped file that is opened later."""
    np.zeros(100, dtype=np.float32).tofile(tmp_path / "data")
    owner = SimpleNamespace(data=wrap(np.memmap(tmp_path / "data", dtype=np.float32, mode=mode)), late=None)
    state = ObjectState({"dataset": owner})
    owner.data[:] = 1
    owner.late = wrap(np.memmap(tmp_path / "data", dtype=np.float32, mode=mode))
    saved = state.state_dict()
    assert not saved[NODES]
    assert not saved[LOST]


@pytest.mark.parametrize("make", [lambda: np.zeros(_NUM), lambda: torch.zeros(_NUM)], ids=["array", "tensor"])
def test_large_data_in_a_worker(make: Any) -> None:
    """A few elements are read of an array that is too large to be carried, and all elements of a small one."""
    owner = SimpleNamespace(data=make(), counts=np.zeros(5_000))
    state = ObjectState({"dataset": owner}, IN_A_WORKER)
    assert not state.state_dict()[NODES]
    owner.data.fill(1) if isinstance(owner.data, np.ndarray) else owner.data.fill_(1)
    assert state.state_dict(max_bytes=65_536)[LOST].keys() == {"dataset.data"}
    owner.counts[4_321] += 1
    assert "dataset.counts" in state.state_dict(max_bytes=65_536)[NODES]


@pytest.mark.parametrize("make", [lambda: np.random.rand(_NUM), lambda: torch.rand(_NUM)], ids=["array", "tensor"])
def test_what_is_replaced_is_freed(make: Any) -> None:
    """A large array that training replaces is no longer held, and its replacement is carried."""
    owner, other = (SimpleNamespace(teacher=make(), features=[make()], known=None) for _ in range(2))
    state, restored = ObjectState({"module": owner}), ObjectState({"module": other})
    gone = [weakref.ref(owner.teacher), weakref.ref(owner.features[0])]
    owner.teacher = make()
    owner.features[0] = make()
    assert [ref() for ref in gone] == [None, None]
    assert restored.load_state_dict(state.state_dict()) == []
    assert bool((other.teacher == owner.teacher).all())
    assert bool((other.features[0] == owner.features[0]).all())


def test_another_tensor_in_the_same_place_is_seen() -> None:
    """A new tensor is a different one, even if it has the memory of the old one."""
    owner = SimpleNamespace(teacher=torch.zeros(_NUM))
    state = ObjectState({"module": owner})
    unchanged = state.unchanged(["module"])
    for _ in range(20):
        owner.teacher = None
        owner.teacher = torch.zeros(_NUM)
    assert unchanged.take_changed() == ["module"]
    assert list(state.state_dict()[NODES]) == ["module"]


def test_constant_is_no_copy_of_a_weight() -> None:
    """Ones that equal the weights of a norm are ignored, unless their holder also copies other weights."""
    weights = [torch.rand(4), torch.ones(64), torch.zeros(4)]
    owner = SimpleNamespace(ones=torch.ones(64), anchor=[weight.clone() for weight in weights], zeros=[torch.zeros(4)])
    state = ObjectState({"module": owner})
    state.carry_copies(weights)
    assert state.state_dict()[NODES].keys() == {f"module.anchor[{i}]" for i in range(3)}


# What can't be read is left alone, and what lies next to it is carried.


class HasNoClass:
    """Raises when anybody asks for its class, as a proxy does whose object can't be created."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError


class HasNoLength(list[object]):
    def __len__(self) -> int:
        raise RuntimeError

    def __iter__(self) -> Any:
        raise RuntimeError


class Forgets(nn.Module):
    """Does not call the constructor of its base."""

    def __init__(self) -> None:
        pass


class Missing:
    """Stands for a package that is not installed, as MONAI's ``optional_import`` returns it."""

    def __getattr__(self, name: str) -> None:
        raise ImportError(name)


def _deleted() -> object:
    return weakref.proxy(HasNoLength())


def _freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _nested() -> object:
    found: list[Any] = []
    for _ in range(30_000):
        found = [found]
    return found


STRANGE: dict[str, Callable[[], Any]] = {
    "one element with stride 0": lambda: torch.zeros(1).expand(3)[:1],
    "stride 0": lambda: torch.zeros(1).expand(100_000),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "freed": _freed,
    "lazy": lambda: nn.LazyBatchNorm1d(),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "large masked": lambda: np.ma.masked_array(np.zeros(30_000)),
    "deleted": _deleted,
    "no class": HasNoClass,
    "no length": HasNoLength,
    "not a module": Forgets,
    "mock": lambda: mock.MagicMock(spec=dict),
    "deep": _nested,
    "ragged": lambda: nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "missing": Missing,
    "library": lambda: ctypes.LibraryLoader(ctypes.CDLL),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("rules", [Rules(), Rules(max_items=1_000)], ids=["main", "worker"])
@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_strange_values_are_left_alone(make: Callable[[], Any], rules: Rules) -> None:
    """A strange value neither stops a state nor hides another attribute, and a fingerprint can be computed."""
    data = NoisyDataset(4)
    vars(data).update(value=make(), step=0, rng=np.random.default_rng(0))
    state, held = ObjectState({"data": data}, rules), HeldGenerators({"data": data})
    data.step = 1
    state.carry_copies([torch.zeros(3)])
    assert [*state.changed] == ["data"]
    assert ["step", 1] in state.state_dict()["nodes"]["data"]["attributes"]
    assert [*held.state_dict()] == ["data.rng"]
    assert loader_fingerprint(DataLoader(data)) is not None
    new = SimpleNamespace()
    state = ObjectState({"new": new}, rules)
    new.value = make()
    state.state_dict()

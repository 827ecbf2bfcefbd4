"""Generators that objects hold are found wherever they are, and continue exactly."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, Subset, TensorDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state.generators import HeldGenerators, make_generator, pack_generator
from lightning_faulttolerant.state.reachable import is_generator

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

KINDS: dict[str, Callable[[int], Any]] = {
    "random.Random": random.Random,
    "torch.Generator": lambda seed: torch.Generator().manual_seed(seed),
    **{f"Generator-{n}": lambda seed, n=n: np.random.Generator(getattr(np.random, n)(seed)) for n in BIT_GENERATORS},
    **{f"RandomState-{n}": lambda s, n=n: np.random.RandomState(getattr(np.random, n)(s)) for n in BIT_GENERATORS},
}


def draw(generator: Any) -> list[float]:
    """Draw three Gaussians: an odd number, so that one stays in the cache if there is a cache."""
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return generator.standard_normal(3).tolist()


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__weakref__", "_rng", "empty")

    def __init__(self, rng: Any) -> None:
        self._rng = rng


class SlottedChild(Slotted):
    __slots__ = ("more", "__own")  # noqa: RUF023 - the private one is the point

    def __init__(self, rng: Any) -> None:
        super().__init__(None)
        self.__own = rng


class SlottedByName:
    __slots__ = "rng"  # one name without a tuple is allowed

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class SlottedWithCode:
    """Computes each requested attribute and fails, as objects of SQLAlchemy's do."""

    __slots__ = ("empty", "rng")

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"{name} can't be made")


class Transform:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: Any) -> Any:
        return value

    def transform(self, value: Any) -> Any:
        return value


class Augment(nn.Module):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng


class Data(Dataset[int]):
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was read")


class LearningRate:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, epoch: int) -> float:
        return 1.0


class NoisyStep(torch.optim.SGD):
    def __init__(self, rng: Any) -> None:
        super().__init__([nn.Parameter(torch.zeros(2))])
        self.rng = rng


def scheduler_over(rng: Any) -> Any:
    """Return a torch scheduler with a function that draws from `rng`."""
    return torch.optim.lr_scheduler.LambdaLR(NoisyStep(None), LearningRate(rng))


def closure_over(rng: Any) -> Callable[[], Any]:
    """Return a function that draws from `rng`, with another cell that is still empty."""

    def call() -> Any:
        return rng, unbound

    if rng is None:
        unbound = 0
    return call


def with_default(rng: Any) -> Callable[[], Any]:
    """Return a function whose argument's default is `rng`."""
    return lambda x=rng: x


def with_keyword_default(rng: Any) -> Callable[[], Any]:
    """Return a function whose keyword-only argument's default is `rng`."""
    return lambda *, x=rng: x


def with_attribute(rng: Any) -> Callable[[], Any]:
    """Return a function that `rng` is an attribute of."""

    def call() -> None:
        return None

    call.rng = rng
    return call


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda g: g,
    "attribute": lambda g: Holder(rng=g),
    "private attribute": lambda g: Holder(_rng=g),
    "attribute of an attribute": lambda g: Holder(inner=Holder(rng=g)),
    "slot": Slotted,
    "private slot of a subclass": SlottedChild,
    "single slot": SlottedByName,
    "slots of a class that makes attributes": SlottedWithCode,
    "namespace": lambda g: SimpleNamespace(rng=g),
    "dict": lambda g: {"a": 1, "rng": g},
    "dict with a number as key": lambda g: {3: g},
    "view of a dict": lambda g: Holder(rngs=MappingProxyType({"a": g})),
    "list": lambda g: [1, "text", None, g],
    "tuple": lambda g: (1.5, (g,)),
    "list of callables": lambda g: Holder(transforms=[Transform(None), Transform(g)]),
    "argument of a partial": lambda g: functools.partial(max, g),
    "keyword of a partial": lambda g: functools.partial(max, key=g),
    "function of a partial": lambda g: functools.partial(Transform(g)),
    "closure": closure_over,
    "default of an argument": with_default,
    "default of a keyword argument": with_keyword_default,
    "attribute of a function": with_attribute,
    "bound method": lambda g: Transform(g).transform,
    "child of a module": lambda g: nn.Sequential(nn.Linear(1, 1), nn.Sequential(Augment(g))),
    "ModuleList": lambda g: nn.ModuleList([Augment(g)]),
    "ModuleDict": lambda g: nn.ModuleDict({"augment": Augment(g)}),
    "Subset": lambda g: Subset(Subset(Data(g), [0, 1]), [0]),
    "ConcatDataset": lambda g: ConcatDataset([TensorDataset(torch.zeros(2)), Data(g)]),
    "sampler": lambda g: Holder(sampler=RandomSampler(range(3), generator=g)),
    "optimizer": NoisyStep,
    "function of a scheduler": scheduler_over,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["random.Random", "torch.Generator", "Generator-PCG64"])
def test_generator_is_found_at_each_place(place: str, kind: str) -> None:
    """Wherever an object holds a generator, it is found once and restored exactly."""
    generator = KINDS[kind](1)
    held = HeldGenerators({"dataset": PLACES[place](generator)})
    assert len(held) == 1
    draw(generator)
    state = held.state_dict()
    expected = draw(generator)
    assert held.load_state_dict(state) == []
    assert held.state_dict() == state
    assert draw(generator) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_continues_in_another_process(kind: str) -> None:
    """In a fresh object with another seed, a generator of each kind continues where the saved one was."""
    saved, fresh = Holder(rng=KINDS[kind](1)), Holder(rng=KINDS[kind](2))
    draw(saved.rng)
    held = HeldGenerators({"dataset": fresh})
    assert held.load_state_dict(HeldGenerators({"dataset": saved}).state_dict()) == []
    assert draw(fresh.rng) == draw(saved.rng)


def test_bound_method_of_a_generator_is_found() -> None:
    """An object that keeps only `rng.gauss` or `rng.random` keeps its generator."""
    generators = [random.Random(0), random.Random(1), np.random.default_rng(0), np.random.RandomState(0)]
    methods = [generators[0].gauss, generators[1].random, generators[2].random, generators[3].randn]
    held = HeldGenerators({"draws": methods})
    assert len(held) == 4
    state = held.state_dict()
    expected = [m(0, 1) if m is methods[0] else m() for m in methods]
    held.load_state_dict(state)
    assert [m(0, 1) if m is methods[0] else m() for m in methods] == expected


def test_shared_generator_is_listed_once() -> None:
    """A generator with several paths has one state, under the first path; equal but separate ones have their own."""
    shared = random.Random(0)
    roots = {"dataset": Holder(a=shared, b=[shared]), "sampler": Holder(generator=shared)}
    assert list(HeldGenerators(roots).state_dict()) == ["dataset.a"]
    assert len(HeldGenerators({"a": random.Random(0), "b": random.Random(0)})) == 2


def test_cycles_end() -> None:
    """Objects that hold each other are visited once."""
    one, other = Holder(rng=random.Random(0)), Holder()
    one.other, other.one, other.itself = other, [one], other
    assert list(HeldGenerators({"root": one}).state_dict()) == ["root.rng"]


def test_paths_can_be_read() -> None:
    """The names give a generator's place as a user would write it."""
    dataset = Holder(transform=Holder(steps=[None, {"flip": random.Random(0)}]))
    assert list(HeldGenerators({"dataset": dataset}).state_dict()) == ["dataset.transform.steps[1]['flip']"]


@pytest.mark.parametrize("kind", KINDS)
def test_generator_that_is_made_when_first_used(kind: str) -> None:
    """If this run still has ``None`` in place of a generator, it gets one in the saved state."""
    saved = Holder(inner=Holder(rng=KINDS[kind](4)))
    draw(saved.inner.rng)
    fresh = Holder(inner=Holder(rng=None))
    held = HeldGenerators({"dataset": fresh})
    assert held.load_state_dict(HeldGenerators({"dataset": saved}).state_dict()) == []
    assert type(fresh.inner.rng) is type(saved.inner.rng)
    assert draw(fresh.inner.rng) == draw(saved.inner.rng)


def test_attribute_that_is_not_there_yet_is_made() -> None:
    """An object that checks ``hasattr`` before it creates its generator gets the saved one under the saved name."""
    fresh = Holder(inner=Holder())
    state = HeldGenerators({"dataset": Holder(inner=Holder(rng=random.Random(4)))}).state_dict()
    assert HeldGenerators({"dataset": fresh}).load_state_dict(state) == []
    assert fresh.inner.rng.random() == random.Random(4).random()


@pytest.mark.parametrize("draws", [True, False])
def test_generator_that_its_object_replaces_unused_is_reported(draws: bool, caplog: pytest.LogCaptureFixture) -> None:
    """If an object creates its generator together with another attribute and so replaces it, this is reported once."""
    fresh = Holder(rng=None)
    held = HeldGenerators({"dataset": fresh})
    held.load_state_dict(HeldGenerators({"dataset": Holder(rng=random.Random(4))}).state_dict())
    held.refresh()
    assert caplog.text == ""
    if draws:
        fresh.rng.random()
        held.refresh()
    fresh.rng = random.Random(4)
    held.refresh()
    held.refresh()
    assert caplog.text.count("A generator was restored as dataset.rng before its object created one") == (not draws)


class Counting(random.Random):
    """Counts its draws in its state."""

    count = 0

    def getstate(self) -> Any:
        return super().getstate(), self.count


def test_state_that_cannot_be_kept_is_named() -> None:
    """A generator with a custom state is refused by the name of its class."""
    with pytest.raises(NotExactError, match=r"A Counting has its own getstate"):
        HeldGenerators({"dataset": Holder(rng=Counting())}).state_dict()


def test_generator_made_after_the_search_is_found_by_the_next() -> None:
    """`search` finds generators that were created since; until then the state lacks them."""
    holder = Holder(rng=None)
    held = HeldGenerators({"dataset": holder})
    holder.rng = random.Random(0)
    assert held.state_dict() == {}
    held.search()
    assert list(held.state_dict()) == ["dataset.rng"]


def test_generator_that_is_gone_is_left_out_and_named() -> None:
    """A path without a generator is not in the state; a path of the state that leads nowhere is returned by name."""
    holder = Holder(a=random.Random(0), b=[random.Random(1)])
    held = HeldGenerators({"dataset": holder})
    state = held.state_dict()
    holder.b.clear()
    assert list(held.state_dict()) == ["dataset.a"]
    holder.a = "taken"
    assert sorted(held.load_state_dict(state)) == ["dataset.a", "dataset.b[0]"]
    assert holder.a == "taken"


def test_state_of_another_kind_is_refused() -> None:
    """A state of another kind of generator is refused, and both kinds are named."""
    state = HeldGenerators({"a": random.Random(0)}).state_dict()
    with pytest.raises(ValueError, match=r"A RandomState can't take the saved state of a python generator"):
        HeldGenerators({"a": np.random.RandomState(0)}).load_state_dict(state)


def test_objects_without_a_state_are_no_generators() -> None:
    """The system's entropy source has no state; classes, modules and numbers are not generators."""
    assert not any(is_generator(v) for v in (random.SystemRandom(), random, random.Random, np.random, 0, None))
    assert len(HeldGenerators({"a": Holder(a=random.SystemRandom(), b=random.Random, c=random, d=np)})) == 0


class Watching:
    """Every property, method and item access of it is an error."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    @property
    def parameters(self) -> Any:
        raise AssertionError("a property was evaluated")

    def __len__(self) -> int:
        raise AssertionError("len was called")

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated over")

    def __bool__(self) -> bool:
        raise AssertionError("its truth was asked for")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    def __hash__(self) -> int:
        raise AssertionError("it was hashed")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy and pickle request
            raise AttributeError(name)
        raise AssertionError(f"{name} was asked for")


def test_walking_calls_nothing_of_the_objects() -> None:
    """Neither properties nor methods of the objects run, whether the state is read or loaded."""
    held = HeldGenerators({"dataset": Watching(), "more": [Watching()]})
    state = held.state_dict()
    assert list(state) == ["dataset.rng", "more[0].rng"]
    assert held.load_state_dict(state) == []


def test_reading_the_state_draws_nothing() -> None:
    """Searching and reading leave all generators unchanged, including the global ones."""
    generator = random.Random(0)
    before, global_before = generator.getstate(), random.getstate()
    held = HeldGenerators({"a": generator})
    held.state_dict()
    held.search()
    assert generator.getstate() == before
    assert random.getstate() == global_before


def test_state_is_a_copy() -> None:
    """Later draws don't reach a state that was read before."""
    generator = np.random.default_rng(0)
    state = HeldGenerators({"a": generator}).state_dict()
    copy = dict(state)
    draw(generator)
    assert state == copy


def test_large_data_is_not_walked_item_by_item() -> None:
    """Arrays and tensors are skipped: a generator beside them is found, and none of their data is read."""
    objects = np.empty(1, dtype=object)
    objects[0] = random.Random(0)
    holder = Holder(rows=torch.zeros(10, 10), table=np.zeros((10, 10)), objects=objects, rng=random.Random(0))
    assert list(HeldGenerators({"dataset": holder}).state_dict()) == ["dataset.rng"]


@given(seed=st.integers(0, 2**32 - 1), num_draws=st.integers(0, 5), kind=st.sampled_from(sorted(KINDS)))
def test_made_generator_is_in_the_saved_state(seed: int, num_draws: int, kind: str) -> None:
    """`make_generator` returns a generator of the same kind that draws the saved one's next numbers."""
    generator = KINDS[kind](seed)
    for _ in range(num_draws):
        draw(generator)
    blob = pack_generator(generator)
    made = make_generator(blob)
    assert pack_generator(made) == blob
    assert draw(made) == draw(generator)


class Lazy:
    """Creates generators when they are needed: as an attribute, in a dict, in a list, in place of ``None``."""

    def __init__(self) -> None:
        self.nothing: Any = None
        self.by_name: dict[str, Any] = {}
        self.rows: list[Any] = []
        self.places: list[Any] = [None, None]


@pytest.mark.parametrize("how", ["attribute", "new attribute", "dict", "list", "place"])
def test_refresh_finds_what_was_made_since(how: str) -> None:
    """A refresh finds a generator that is created after the search, wherever it is."""
    lazy = Lazy()
    held = HeldGenerators({"lazy": lazy})
    held.refresh()
    assert len(held) == 0
    made = random.Random(1)
    if how == "attribute":
        lazy.nothing = made
    elif how == "new attribute":
        lazy.late = made  # type: ignore[attr-defined]
    elif how == "dict":
        lazy.by_name["a"] = made
    elif how == "list":
        lazy.rows.append(made)
    else:
        lazy.places[1] = made
    held.refresh()
    assert len(held) == 1

"""Generators that objects hold are found wherever they are, and continue exactly, as do the children they spawn."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import RandomSampler

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.per_sample import seed_generators
from lightning_faulttolerant.state.generators import (
    HeldGenerators,
    fresh_held_state,
    fresh_rng_state,
    make_generator,
    pack_generator,
)
from lightning_faulttolerant.state.packing import pack_numpy
from lightning_faulttolerant.state.reachable import is_generator
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

KINDS: dict[str, Callable[[int], Any]] = {
    "random.Random": random.Random,
    "torch.Generator": lambda seed: torch.Generator().manual_seed(seed),
    **{f"Generator-{n}": lambda seed, n=n: np.random.Generator(getattr(np.random, n)(seed)) for n in BIT_GENERATORS},
    **{f"RandomState-{n}": lambda s, n=n: np.random.RandomState(getattr(np.random, n)(s)) for n in BIT_GENERATORS},
}


def draw(generator: Any) -> list[float]:
    """Draw three Gaussians, so that one stays in a cache if there is one, and 32 bits, which are half of a word."""
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    integers = generator.randint if isinstance(generator, np.random.RandomState) else generator.integers
    return [*generator.standard_normal(3).tolist(), integers(2**16, dtype=np.uint32)]


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


class NoisyStep(torch.optim.SGD):
    def __init__(self, rng: Any) -> None:
        super().__init__([nn.Parameter(torch.zeros(2))])
        self.rng = rng


def closure_over(rng: Any) -> Callable[[], Any]:
    """Return a function that draws from `rng`, with another cell that is still empty."""

    def call() -> Any:
        return rng, unbound

    if rng is None:
        unbound = 0
    return call


def in_a_cycle(rng: Any) -> Holder:
    """Return an object with an object that holds it and itself."""
    one, other = Holder(rng=rng), Holder()
    one.other, other.one, other.itself = other, [one], other
    return one


def with_attribute(rng: Any) -> Callable[[], Any]:
    """Return a function that `rng` is an attribute of."""

    def call() -> None:
        return None

    call.rng = rng
    return call


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda g: g,
    "attribute": lambda g: Holder(rng=g),
    "slot": Slotted,
    "private slot of a subclass": SlottedChild,
    "dict": lambda g: {"a": 1, 3: g},
    "view of a dict": lambda g: Holder(rngs=MappingProxyType({"a": g})),
    "list": lambda g: [1, "text", None, g],
    "tuple": lambda g: (1.5, (g,)),
    "list of callables": lambda g: Holder(transforms=[Transform(None), Transform(g)]),
    "argument of a partial": lambda g: functools.partial(max, g),
    "keyword of a partial": lambda g: functools.partial(max, key=g),
    "function of a partial": lambda g: functools.partial(Transform(g)),
    "closure": closure_over,
    "default of an argument": lambda g: lambda x=g: x,
    "default of a keyword argument": lambda g: lambda *, x=g: x,
    "attribute of a function": with_attribute,
    "bound method": lambda g: Transform(g).transform,
    "own bound method": lambda g: [g.gauss],
    "own method in C": lambda g: [g.random],
    "cycle": in_a_cycle,
    "child of a module": lambda g: nn.Sequential(nn.Linear(1, 1), nn.Sequential(Augment(g))),
    "sampler": lambda g: Holder(sampler=RandomSampler(range(3), generator=g)),
    "optimizer": NoisyStep,
}


@pytest.mark.parametrize("place", PLACES)
def test_generator_is_found_at_each_place(place: str) -> None:
    """Wherever an object holds a generator, it is found once and restored exactly."""
    generator = random.Random(1)
    held = HeldGenerators({"dataset": PLACES[place](generator)})
    assert len(held) == 1
    draw(generator)
    state = held.state_dict()
    expected = draw(generator)
    assert held.load_state_dict(state) == []
    assert held.state_dict() == state
    assert draw(generator) == expected


def test_shared_generator_is_listed_once() -> None:
    """A generator with several paths has one state, under the first path; equal but separate ones have their own."""
    shared = random.Random(0)
    roots = {"dataset": Holder(a=shared, b=[shared]), "sampler": Holder(generator=shared)}
    assert list(HeldGenerators(roots).state_dict()) == ["dataset.a"]
    assert len(HeldGenerators({"a": random.Random(0), "b": random.Random(0)})) == 2


def test_paths_can_be_read() -> None:
    """The names give a generator's place as a user would write it."""
    dataset = Holder(transform=Holder(steps=[None, {"flip": random.Random(0)}]))
    assert list(HeldGenerators({"dataset": dataset}).state_dict()) == ["dataset.transform.steps[1]['flip']"]


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


def test_large_data_is_not_walked_item_by_item() -> None:
    """Arrays and tensors are skipped: a generator beside them is found, and none of their data is read."""
    objects = np.empty(1, dtype=object)
    objects[0] = random.Random(0)
    holder = Holder(rows=torch.zeros(10, 10), table=np.zeros((10, 10)), objects=objects, rng=random.Random(0))
    assert list(HeldGenerators({"dataset": holder}).state_dict()) == ["dataset.rng"]


@given(seed=st.integers(0, 2**32 - 1), num_draws=st.integers(0, 5), kind=st.sampled_from(sorted(KINDS)))
def test_each_kind_continues(seed: int, num_draws: int, kind: str) -> None:
    """A generator of any kind continues in a fresh object, whether that has one with another seed, or none yet."""
    saved = Holder(rng=KINDS[kind](seed))
    for _ in range(num_draws):
        draw(saved.rng)
    state = HeldGenerators({"dataset": saved}).state_dict()
    expected = draw(saved.rng)
    for rng in (KINDS[kind](2), None):
        fresh = Holder(rng=rng)
        held = HeldGenerators({"dataset": fresh})
        assert held.load_state_dict(state) == []
        held.search()
        assert held.state_dict() == state
        assert type(fresh.rng) is type(saved.rng)
        assert draw(fresh.rng) == expected


REFRESHED: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda holder, made: setattr(holder, "rng", made),
    "new attribute": lambda holder, made: setattr(holder, "late", made),
    "dict": lambda holder, made: holder.by_name.update(a=made),
    "list": lambda holder, made: holder.rows.append(made),
    "place": lambda holder, made: holder.places.__setitem__(1, made),
}


@pytest.mark.parametrize("how", REFRESHED)
def test_refresh_finds_what_was_made_since(how: str) -> None:
    """A generator that is created after the search is in the state from the next refresh on."""
    holder = Holder(rng=None, by_name={}, rows=[], places=[None, None])
    held = HeldGenerators({"lazy": holder})
    held.refresh()
    REFRESHED[how](holder, random.Random(1))
    assert held.state_dict() == {}
    held.refresh()
    assert len(held.state_dict()) == 1


def test_state_that_is_no_plain_value_is_refused() -> None:
    """A custom bit generator whose state holds an object raises rather than keeping half of it."""
    with pytest.raises(TypeError, match="holds a set, which can't be kept"):
        pack_numpy({"bit_generator": "Own", "state": {1, 2}})


# Children that NumPy's generators spawn, and states of new ranks

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "Generator": np.random.default_rng,
    "Generator on MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "BitGenerator": np.random.SFC64,
    "SeedSequence": np.random.SeedSequence,
    "SeedSequence of several words": lambda seed: np.random.SeedSequence([seed or 0, 2**40], spawn_key=(7,)),
}
each_holder = pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)


ALL: dict[str, Callable[[Any], Any]] = {
    **HOLDERS,
    "Random": random.Random,
    "RandomState": np.random.RandomState,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw_with_children(holder: Any) -> list[Any]:
    """Draw from a new child, if the holder has any, and from the holder itself."""
    children = holder.spawn(1) if hasattr(holder, "spawn") else []
    return [word for one in (*children, holder) for word in _words(one)]


def _words(one: Any) -> list[Any]:
    if isinstance(one, np.random.SeedSequence):
        return one.generate_state(3).tolist()
    if isinstance(one, torch.Generator):
        return torch.rand(3, generator=one).tolist()
    if isinstance(one, (random.Random, np.random.RandomState)):
        return [one.random()]
    return getattr(one, "bit_generator", one).random_raw(3).tolist()


@each_holder
def test_children_continue_in_another_process(make: Callable[[Any], Any]) -> None:
    """In a new process, an object that the system has seeded spawns the children that the saved one spawns next."""
    saved, fresh = {"rng": make(None)}, {"rng": make(None)}
    draw_with_children(saved["rng"])
    state = HeldGenerators({"dataset": saved}).state_dict()
    expected = draw_with_children(saved["rng"])
    assert HeldGenerators({"dataset": fresh}).load_state_dict(state) == []
    assert draw_with_children(fresh["rng"]) == expected


def assert_distinct(saved: list[Any], first: list[Any], second: list[Any], again: list[Any]) -> None:
    """Check that two ranks have numbers of their own, which are the same each time."""
    assert first == again
    for numbers in zip(saved, first, second, strict=True):
        assert len(set(numbers)) == 3


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_new_ranks_have_their_own_states(make: Callable[[Any], Any]) -> None:
    """Two ranks that derive generators from one saved state have other numbers and children than it and each other."""
    state = {"rng": pack_generator(make(1))}
    ranks = (make_generator(fresh_held_state(state, rank)["rng"]) for rank in (1, 2, 1))
    assert_distinct(*map(draw_with_children, (make(1), *ranks)))


def test_new_ranks_have_their_own_global_states() -> None:
    """This holds for the generators of Python, NumPy, and torch, too."""
    before, found = rng_state(), []
    for state in (before, *(fresh_rng_state(before, "rank", rank) for rank in (1, 2, 1))):
        set_rng_state(state)
        found.append([random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()])
    set_rng_state(before)
    assert_distinct(*found)


@each_holder
def test_children_of_a_seeded_sample_follow_from_its_place(make: Callable[[Any], Any]) -> None:
    """A sample that is seeded from its place has the same children, whatever was spawned before."""
    held = [HeldGenerators({"dataset": {"rng": make(seed)}}) for seed in (1, 2)]
    draw_with_children(held[1].generators()["dataset['rng']"])
    drawn = []
    for place in (3, 4):
        for one in held:
            seed_generators(0, 0, place, one)
        drawn += [draw_with_children(one.generators()["dataset['rng']"]) for one in held]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert drawn[0] != drawn[2]


def test_state_of_other_bits_is_refused_by_name() -> None:
    """A state of a generator on another bit generator is refused, and both are named."""
    state = HeldGenerators({"a": np.random.default_rng(0)}).state_dict()
    with pytest.raises(ValueError, match=r"A generator on SFC64 can't take the saved state of one on PCG64"):
        HeldGenerators({"a": np.random.Generator(np.random.SFC64(0))}).load_state_dict(state)

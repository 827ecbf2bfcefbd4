"""Seeds: the children that NumPy's generators spawn continue with them, and new ranks get states of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.loader.per_sample import seed_generators
from lightning_faulttolerant.state.generators import (
    HeldGenerators,
    fresh_held_state,
    fresh_rng_state,
    make_generator,
    pack_generator,
)
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

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


def draw(holder: Any) -> list[Any]:
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
    draw(saved["rng"])
    state = HeldGenerators({"dataset": saved}).state_dict()
    expected = draw(saved["rng"])
    assert HeldGenerators({"dataset": fresh}).load_state_dict(state) == []
    assert draw(fresh["rng"]) == expected


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
    assert_distinct(*map(draw, (make(1), *ranks)))


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
    draw(held[1].generators()["dataset['rng']"])
    drawn = []
    for place in (3, 4):
        for one in held:
            seed_generators(0, 0, place, one)
        drawn += [draw(one.generators()["dataset['rng']"]) for one in held]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert drawn[0] != drawn[2]


def test_state_of_other_bits_is_refused_by_name() -> None:
    """A state of a generator on another bit generator is refused, and both are named."""
    state = HeldGenerators({"a": np.random.default_rng(0)}).state_dict()
    with pytest.raises(ValueError, match=r"A generator on SFC64 can't take the saved state of one on PCG64"):
        HeldGenerators({"a": np.random.Generator(np.random.SFC64(0))}).load_state_dict(state)

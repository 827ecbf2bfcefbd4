"""States for generators that a saved run did not have are distinct, valid, and reproducible."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_faulttolerant.state.generators import (
    HeldGenerators,
    fresh_held_state,
    fresh_rng_state,
)
from lightning_faulttolerant.state.rng import rng_state, set_rng_state


class Holder:
    def __init__(self) -> None:
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)
        self.torch = torch.Generator().manual_seed(1)


def held_draws(rank: int | None) -> list[float]:
    """Return a number from each generator of an object, which may have the states of a new rank."""
    holder, source = Holder(), HeldGenerators({"o": Holder()}).state_dict()
    if rank is not None:
        assert HeldGenerators({"o": holder}).load_state_dict(fresh_held_state(source, rank)) == []
    numbers = [each.random() for each in (holder.python, holder.numpy, holder.legacy)]
    return [*numbers, torch.rand((), generator=holder.torch).item()]


def global_draws(rank: int | None) -> list[float]:
    """Return a number from each global generator, which may have the states of a new rank."""
    before = rng_state()
    if rank is not None:
        set_rng_state(fresh_rng_state(before, "rank", rank))
    numbers = [random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()]
    set_rng_state(before)
    return numbers


@pytest.mark.parametrize("draws", [held_draws, global_draws])
def test_states_are_distinct_and_reproducible(draws: Callable[[int | None], list[float]]) -> None:
    """Each rank has its own numbers, different from the source's, and the same each time."""
    found = [draws(rank) for rank in (None, 1, 2, 1)]
    assert found[1] == found[3]
    for numbers in zip(*found[:3], strict=True):
        assert len(set(numbers)) == 3

"""States for generators that a saved run did not have are distinct, valid, and reproducible."""

from __future__ import annotations

import random

import numpy as np
import torch

from lightning_faulttolerant.state.generators import (
    HeldGenerators,
    fresh_held_state,
    fresh_rng_state,
    fresh_torch_state,
)
from lightning_faulttolerant.state.rng import rng_state, set_rng_state


class Holder:
    def __init__(self) -> None:
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)
        self.torch = torch.Generator().manual_seed(1)

    def draws(self) -> list[float]:
        """Return a number from each."""
        drawn = torch.rand((), generator=self.torch).item()
        return [self.python.random(), float(self.numpy.random()), float(self.legacy.rand()), drawn]


def draws() -> list[float]:
    """Return a number from each global generator."""
    return [random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()]


def test_global_states_are_distinct_and_reproducible() -> None:
    """Each name yields its own numbers, different from the source's, and the same each time."""
    source = rng_state()
    found = [draws()]
    for rank in (1, 2, 1):
        set_rng_state(fresh_rng_state(source, "rank", rank))
        found.append(draws())
    assert found[1] == found[3]
    for numbers in zip(*found[:3], strict=True):
        assert len(set(numbers)) == 3


def test_held_states_are_distinct_and_reproducible() -> None:
    """The same holds for generators that objects hold, whatever their kind."""
    source = HeldGenerators({"o": Holder()}).state_dict()
    found = [Holder().draws()]
    for rank in (1, 2, 1):
        holder = Holder()
        assert HeldGenerators({"o": holder}).load_state_dict(fresh_held_state(source, rank)) == []
        found.append(holder.draws())
    assert found[1] == found[3]
    for numbers in zip(*found[:3], strict=True):
        assert len(set(numbers)) == 3


def test_states_of_torch_follow_from_their_names() -> None:
    """Two names yield two states."""
    assert fresh_torch_state("a", 1) == fresh_torch_state("a", 1) != fresh_torch_state("a", 2)

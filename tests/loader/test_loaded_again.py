"""A ResumableDataLoader into which two states are loaded, one after the other."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from lightning_faulttolerant import ResumableDataLoader
from tests.loader.loops import Drawing, own_draws, seed


def rest(loader: ResumableDataLoader[Any], states: list[Any] | None = None) -> list[Any]:
    """Return a loop's events up to the end of the second epoch; note the state before it, and after each batch."""
    events = []
    states = [] if states is None else states
    states.append(loader.state_dict())
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            events.append((epoch, batch.tolist(), own_draws()))
            states.append(loader.state_dict())
    return events


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_state_that_was_loaded_last_is_continued_from(num_workers: int) -> None:
    """Nothing is left of the state that was loaded first, wherever in their epochs the two are."""

    def make() -> ResumableDataLoader[Any]:
        dataset = Drawing(3)
        dataset.lazy = random.Random(7)
        return ResumableDataLoader(dataset, shuffle=True, num_workers=num_workers)

    seed(1)
    states: list[Any] = []
    events = rest(make(), states)
    for before, last in itertools.product(states, range(len(states))):
        loader = make()
        loader.load_state_dict(before)
        loader.load_state_dict(states[last])
        assert rest(loader) == events[last:]

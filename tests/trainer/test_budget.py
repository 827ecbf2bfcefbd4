"""What is done as often as a budget allows takes at most its share of the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_faulttolerant.trainer.budget import Budget


class Clock:
    """Stands still until it is told how much time has passed."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@given(
    share=st.floats(0.05, 1),
    costs=st.lists(st.floats(0.5, 5), min_size=1, max_size=10),
    idle=st.floats(0.5, 3),
)
def test_share_is_kept(share: float, costs: list[float], idle: float) -> None:
    """Over whole periods, from one action to the instant at which the next is allowed, the share is not exceeded."""
    clock = Clock()
    budget = Budget(share, clock=clock)
    spent, began_all = 0.0, clock.seconds
    for cost in costs:
        while not budget.allows():
            clock.seconds += idle
        began = budget.now()
        clock.seconds += cost
        spent += budget.spend(began)
    while not budget.allows():
        clock.seconds += idle
    assert spent == pytest.approx(sum(costs))
    assert spent <= share * (clock.seconds - began_all) * (1 + 1e-6)


def test_first_is_allowed_and_the_next_when_its_time_has_come() -> None:
    """A cost of 1 s at a share of 1% allows the next one 99 s after its end, not before."""
    clock = Clock()
    budget = Budget(0.01, clock=clock)
    assert budget.allows()
    began = budget.now()
    clock.seconds += 1.0
    assert budget.spend(began) == 1.0
    clock.seconds += 98.9
    assert not budget.allows()
    clock.seconds += 0.2
    assert budget.allows()


def test_share_of_one_is_no_limit() -> None:
    """With the whole time as its budget, an action is always allowed."""
    clock = Clock()
    budget = Budget(1.0, clock=clock)
    for _ in range(3):
        began = budget.now()
        clock.seconds += 5.0
        budget.spend(began)
        assert budget.allows()


def test_last_cost_counts() -> None:
    """A cheap action after a dear one brings the short interval back."""
    clock = Clock()
    budget = Budget(0.5, clock=clock)
    for cost in (100.0, 1.0):
        began = budget.now()
        clock.seconds += cost
        budget.spend(began)
    clock.seconds += 1.1
    assert budget.allows()


def test_clock_is_one_that_goes_forward() -> None:
    """Without a clock of its own the budget measures real time."""
    budget = Budget(0.5)
    began = budget.now()
    assert budget.spend(began) >= 0.0

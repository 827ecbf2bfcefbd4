"""Saves and captures take at most their share of the time, and no save delays the next one for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.trainer.save.pace import Budget


class Run:
    """A run in which only batches, saves (by their number) and captures take time."""

    def __init__(
        self,
        share: float = 0.01,
        *,
        save_seconds: Callable[[int], float],
        capture_seconds: float = 0.0,
        batch_seconds: float = 0.1,
        start_seconds: float,
        is_resumed: bool = False,
    ) -> None:
        self.now = 0.0
        self.budget = Budget(share, paces_saves=True, clock=lambda: self.now)
        self.save_seconds = save_seconds
        self.capture_seconds = capture_seconds
        self.batch_seconds = batch_seconds
        self.saves: list[float] = []
        self.seconds_saved = self.seconds_captured = 0.0
        self.budget.begin(start_seconds, None)
        if is_resumed:
            self.budget.begin_saved()

    def train(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            began = self.now
            if began >= self.budget.save_at:
                self.now += self.save_seconds(len(self.saves))
                self.saves.append(began)
                self.seconds_saved += self.now - began
                assert self.budget.spend_on_save(began) == self.now - began
            began = self.now
            if began >= self.budget.capture_at:
                self.now += self.capture_seconds
                self.seconds_captured += self.capture_seconds
                self.budget.spend_on_capture(began)
            self.now += self.batch_seconds


@given(
    share=st.floats(0.005, 0.5),
    costs=st.lists(st.floats(0.05, 5), min_size=1, max_size=9),
    capture=st.floats(0, 0.05),
)
@settings(max_examples=30)
def test_saves_and_captures_together_keep_the_share(share: float, costs: list[float], capture: float) -> None:
    """Over a long run, except for the warm-up, both together take at most the share, and saves are not put off."""
    typical = sum(costs) / len(costs)
    interval = typical / share
    run = Run(
        share,
        save_seconds=lambda number: costs[number % len(costs)],
        capture_seconds=capture * typical,
        batch_seconds=0.02 * interval,
        start_seconds=interval / 10,
    )
    run.train(30 * interval)
    run.seconds_saved = run.seconds_captured = 0.0
    begin, num_saves = run.now, len(run.saves)
    run.train(100 * interval)
    total = run.now - begin
    # A few saves more than the share allows: the measured time begins and ends anywhere.
    assert run.seconds_saved + run.seconds_captured <= share * total + 9 * max(costs)
    assert run.seconds_captured <= share / 2 * total + capture * typical
    assert len(run.saves) - num_saves >= 40


@pytest.mark.parametrize("start_seconds", [0.5, 4.0, 30.0, 300.0])
def test_killed_whenever_it_has_run_three_times_as_long_as_a_start_takes(start_seconds: float) -> None:
    """A resumed run has saved new progress by then, although it does not know how long a save takes here."""
    run = Run(is_resumed=True, start_seconds=start_seconds, save_seconds=lambda number: start_seconds / 2)
    run.train(2 * start_seconds)
    assert run.saves
    assert run.saves[0] + start_seconds / 2 <= 2 * start_seconds
    assert run.saves[0] <= 30.2

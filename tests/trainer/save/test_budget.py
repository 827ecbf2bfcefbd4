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
        save_seconds: Callable[[int], float] = lambda number: 0.2,
        capture_seconds: float = 0.0,
        batch_seconds: float = 0.1,
        start_seconds: float = 6.0,
        fails: Callable[[float], bool] = lambda now: False,
        is_resumed: bool = False,
    ) -> None:
        self.now = 1000.0
        self.budget = Budget(share, paces_saves=True, clock=lambda: self.now)
        self.save_seconds = save_seconds
        self.capture_seconds = capture_seconds
        self.batch_seconds = batch_seconds
        self.fails = fails
        self.saves: list[float] = []
        self.failures: list[float] = []
        self.seconds_saved = self.seconds_captured = 0.0
        self.num_failures = 0
        self.budget.begin(start_seconds, None)
        if is_resumed:
            self.budget.begin_saved()

    def train(self, seconds: float) -> None:
        """Train for `seconds` seconds."""
        end = self.now + seconds
        while self.now < end:
            if self.now >= self.budget.save_at:
                self.save()
            if self.now >= self.budget.capture_at:
                began = self.now
                self.now += self.capture_seconds
                self.seconds_captured += self.capture_seconds
                self.budget.spend_on_capture(began)
            self.now += self.batch_seconds

    def save(self) -> None:
        """Save, or fail to save."""
        began = self.now
        failed = self.fails(began - 1000.0)
        (self.failures if failed else self.saves).append(began - 1000.0)
        self.now += self.save_seconds(len(self.saves) + len(self.failures) - 1)
        self.seconds_saved += self.now - began
        self.num_failures = self.num_failures + 1 if failed else 0
        if failed:
            self.budget.spend_on_failure(began, self.num_failures)
        else:
            assert self.budget.spend_on_save(began) == self.now - began


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


def test_failures_that_are_noticed_at_once_are_retried_soon_then_at_the_usual_pace() -> None:
    """A full disk costs no time: the next try comes soon, later ones as often as saves came."""
    run = Run(save_seconds=lambda number: 0.2, fails=lambda now: 300 <= now < 900)
    run.train(1500)
    first, second, *_, before, last = run.failures
    assert second - first <= 4
    assert last - before <= 20.5
    recovered = min(seconds for seconds in run.saves if seconds > 900)
    assert recovered <= 921
    assert max(after - before for before, after in zip(run.saves[-20:], run.saves[-19:], strict=False)) <= 20.5

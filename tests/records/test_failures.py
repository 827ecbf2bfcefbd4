"""The failures of a run, and the interval that follows from them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from lightning_faulttolerant.records.history_parser import Failures, best_interval, failures_of
from tests.records.made import Story


def of(story: Story, fit: int = 1) -> Failures:
    """Return the failures before a fit that begins now."""
    story.begin(fit=fit)
    return failures_of(story.lines, fit=fit)


def test_kill_is_a_failure_in_the_time_since_its_first_batch() -> None:
    """The time of the start does not count, nor the time without a process."""
    story = (
        Story().begin(since=5).wait(20).start().autosave(seconds=2).train(30).autosave(seconds=0.5).train(10).alive()
    )
    assert of(story.wait(60)) == Failures(number=1, seconds=42.5, save_seconds=0.5)


def test_stop_that_saved_is_no_failure() -> None:
    """SIGTERM, a deadline, and the end of a SLURM job lose no work if they save. Their time counts all the same."""
    for reason in ("stopped by SIGTERM", "stopped by the deadline", "stopped by SIGUSR1", "ValueError"):
        story = Story().begin().start().train(40, 9).end(reason)
        story.lines[-1]["saved"] = story.place
        assert of(story) == Failures(number=0, seconds=40.0)


@pytest.mark.parametrize("reason", ["stopped by SIGTERM", "ValueError"])
def test_end_that_could_not_save_is_a_failure(reason: str) -> None:
    """A stop without time to save, and an exception after the last capture, lose work."""
    story = Story().begin().start().autosave().train(40, 9).end(reason)
    story.lines[-1]["saved"] = {"epoch": 0, "batch": 0, "global_step": 0}
    assert of(story).number == 1
    story = Story().begin().start().train(40, 9).end(reason)
    assert of(story).number == 1


def test_stop_that_saved_the_start_of_a_validation_run_is_no_failure() -> None:
    """The run is repeated, however often training saves."""
    story = Story().begin().start().train(10, 3).validate(30, 9, ends=False).end("stopped by SIGTERM")
    story.lines[-1]["saved"] = {"epoch": 0, "batch": 3, "global_step": 3, "num_validated": 0}
    assert of(story).number == 0


def test_evaluation_counts_its_own_batches() -> None:
    """A ``test`` that ended twenty batches after its autosave has lost them."""
    story = Story().begin(function="test").start(evaluated=0).validate(30, 50).end("ValueError")
    story.lines[-1]["saved"] = {"epoch": 0, "batch": 0, "global_step": 0, "num_validated": 30}
    assert of(story).number == 1
    story.lines[-2]["saved"]["num_validated"] = 50
    assert failures_of(story.lines, fit=1).number == 0


def test_loop_of_crashes_at_the_start_is_no_reason_to_save_more_often() -> None:
    """A process that ends before its first batch has no work to lose."""
    story = Story().begin().start().train(50).alive()
    for _ in range(20):
        story.begin().wait(3).end("ImportError")
    assert of(story) == Failures(number=1, seconds=50.0)


def test_failures_of_earlier_chapters_count() -> None:
    """A finished run that is started again is on the same machines."""
    story = Story().begin().start().train(50).alive().begin().start().train(50).end().done()
    assert of(story) == Failures(number=1, seconds=100.0)


def test_cost_of_a_save_is_that_of_recent_ones_of_the_same_fit() -> None:
    """The first save of each process is not typical, unless there is no other."""
    story = Story().begin().start().autosave(seconds=9)
    for seconds in (5, *[1] * 8):
        story.train(10).autosave(seconds=seconds)
    story.begin().start(resumed=0, name=story.newest, batch=9).autosave(seconds=9).alive()
    assert of(story).save_seconds == 1
    assert of(story, fit=2).save_seconds is None
    assert of(Story().begin().start().autosave(seconds=9)).save_seconds == 9


def test_mean_distance_grows_while_the_process_lives() -> None:
    """Its failure is still to come, but the time without one counts."""
    found = Failures(number=2, seconds=100.0)
    assert (found.mean_seconds_between(), found.mean_seconds_between(200.0)) == (50.0, 150.0)
    assert Failures(seconds=100.0).mean_seconds_between() == math.inf


@given(save=st.floats(1e-3, 100), failure=st.floats(1e-2, 1e7))
def test_best_interval_loses_least(save: float, failure: float) -> None:
    """Neither a shorter nor a longer interval wastes less, by Young's account of saves and of lost work."""
    best = best_interval(save, failure)
    assert best <= failure
    if best < failure:

        def waste(interval: float) -> float:
            return save / interval + interval / (2 * failure)

        assert waste(best) <= min(waste(0.9 * best), waste(1.1 * best))

"""Lines become chapters, processes, fits, and failures; ranks that are slow are named."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightning_faulttolerant.records.history import SECTIONS, Chapter, RunPlace, SlowRank, slow_ranks, summed_times
from lightning_faulttolerant.records.history_parser import Failures, best_interval, failures_of, history_of
from tests.records.made import Story

SIGTERM = "stopped by SIGTERM"


def chapters_of(story: Story) -> tuple[Chapter, ...]:
    """Return the chapters of a run."""
    return history_of(story.lines).chapters


def test_what_a_process_tells_of_itself_is_read() -> None:
    """Each value in a line is found where it belongs."""
    story = Story(100.0).begin(since=3).wait(1).start().train(7, 42).autosave(seconds=0.5, num_bytes=1234).alive()
    [process] = chapters_of(story.train(1, 1).end(SIGTERM))[0].processes
    [fit] = process.fits
    assert (process.began, process.pid, process.host, process.last_seen) == (97, 1, "here", 109.5)
    assert (fit.number, fit.name, fit.began, fit.started, fit.reason) == (1, "fit-1", 100, 101, SIGTERM)
    assert (fit.is_finished, fit.has_trained, fit.num_ranks, fit.resumed) == (False, True, 1, None)
    assert fit.last_place == RunPlace(epoch=0, batch=43, global_step=43)
    assert fit.alive == ((108.5, RunPlace(epoch=0, batch=42, global_step=42)),)
    [autosave] = fit.autosaves
    assert (autosave.taken, autosave.time, autosave.seconds, autosave.num_bytes) == (108, 108.5, 0.5, 1234)
    assert (autosave.name, autosave.is_in_background, autosave.number) == ("autosave-00000001.ckpt", False, 1)


# Of each chapter, for each process, the numbers of its fits.
SHAPES: dict[str, tuple[Story, list[list[list[int]]]]] = {
    "a script that finished": (Story().begin().start().end().done().begin().start().end().done(), [[[1]], [[1]]]),
    "a start that ignores an autosave": (Story().begin().start().autosave().train(1).begin().start(), [[[1]], [[1]]]),
    "a start where no autosave exists": (Story().begin().start().train(1).alive().begin().start(), [[[1], [1]]]),
    "a checkpoint of somebody else": (
        Story().begin().start().autosave().begin().start(resumed=1, name="pretrained.ckpt", continues=False),
        [[[1]], [[1]]],
    ),
}


@pytest.mark.parametrize(("story", "shape"), SHAPES.values(), ids=SHAPES)
def test_when_a_chapter_begins(story: Story, shape: list[list[list[int]]]) -> None:
    """A start that does not continue what is there begins one."""
    assert [
        [[fit.number for fit in process.fits] for process in each.processes] for each in chapters_of(story)
    ] == shape


def test_torn_beginnings_and_unknown_events_cost_only_themselves() -> None:
    """Without the line of its beginning, a fit is still described; events of a later version do no harm."""
    lines = [*Story().begin().start().train(3, 3).alive().lines[1:], {"event": "new", "fit": 1, "time": 5000.0}]
    [process] = history_of(lines).chapters[0].processes
    assert (process.began, process.pid, process.fits[0].started, process.last_seen) == (1000, None, 1000, 1003)


@pytest.mark.parametrize("time", [1e14, -1.0, float("nan"), None, True])
def test_a_time_that_can_not_be_is_passed_over(time: object) -> None:
    """A line without a displayable time does not count, and neither does such a beginning of a process."""
    story = Story().begin().start()
    story.lines[0]["process_began"] = time
    story.lines.append({**story.lines[-1], "time": time})
    [process] = chapters_of(story)[0].processes
    assert (process.began, process.last_seen) == (1000, 1000)


# Failures, and the interval that follows from them.


def run(*, validates: bool = False) -> Story:
    """Return a run that has trained, and may be in a validation run."""
    story = Story().begin().start().train(40, 9)
    return story.validate(30, 9, ends=False) if validates else story


def _tested() -> Story:
    return Story().begin(function="test").start(evaluated=0).validate(40, 50)


def _at(batch: int, **more: int) -> dict[str, Any]:
    return {"epoch": 0, "batch": batch, "global_step": batch, **more}


FAILURES: dict[str, tuple[Story, Failures]] = {
    "a kill, after a start that does not count": (
        Story().begin(since=5).wait(20).start().autosave(seconds=2).train(40).autosave(seconds=0.5).alive().wait(60),
        Failures(number=1, seconds=42.5, save_seconds=0.5),
    ),
    "a stop that saved is none": (run().end(SIGTERM, saved=_at(9)), Failures(number=0, seconds=40.0)),
    "a stop without time to save": (run().end(SIGTERM), Failures(number=1, seconds=40.0)),
    "an exception after the last capture": (run().end("Error", saved=_at(0)), Failures(number=1, seconds=40.0)),
    "a stop that saved the start of a validation run is none": (
        run(validates=True).end(SIGTERM, saved=_at(9, num_validated=0)),
        Failures(number=0, seconds=70.0),
    ),
    "a test that ended after its autosave": (
        _tested().end("ValueError", saved=_at(0, num_validated=30)),
        Failures(number=1, seconds=40.0),
    ),
    "a test that ended with its autosave": (
        _tested().end("ValueError", saved=_at(0, num_validated=50)),
        Failures(number=0, seconds=40.0),
    ),
    "processes that end before their first batch have no work to lose": (
        run().alive().begin().wait(3).end("ImportError").begin().wait(3).end("ImportError"),
        Failures(number=1, seconds=40.0),
    ),
    "the first save of each process is not typical": (
        run().autosave(seconds=9).train(10).autosave(seconds=1).train(10).autosave(seconds=1)
        .begin().start(resumed=0, batch=9).autosave(seconds=9).alive(),
        Failures(number=2, seconds=80.0, save_seconds=1),
    ),
    "unless there is no other": (run().autosave(seconds=9), Failures(number=1, seconds=49.0, save_seconds=9)),
}  # fmt: skip


@pytest.mark.parametrize(("story", "expected"), FAILURES.values(), ids=FAILURES)
def test_failures_before_a_fit_that_begins_now(story: Story, expected: Failures) -> None:
    """A process that lost work is a failure, in the time since its first batch; saves cost what recent ones did."""
    assert failures_of(story.begin().lines, fit=1) == expected
    assert failures_of(story.lines, fit=2).save_seconds is None


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
        waste = [save / interval + interval / (2 * failure) for interval in (best, 0.9 * best, 1.1 * best)]
        assert waste[0] == min(waste)


# Slow ranks.


def own(**seconds: float) -> tuple[float, float, float, float]:
    """Return the seconds of a rank: 1 s in each section that is not given."""
    return tuple(seconds.get(name, 1.0) for name in SECTIONS)  # type: ignore[return-value]


SLOW: dict[str, tuple[list[tuple[float, float, float, float]], float, tuple[tuple[int, str, float], ...]]] = {
    **{name: ([own(), own(**{name: 2.0}), own()], 4.0, ((1, name, 0.333),)) for name in SECTIONS},
    "above twenty percent of what the others need": ([own(), own(step=2.0)], 5.9, ((1, "step", 0.204),)),
    "below": ([own(), own(step=2.0)], 6.1, ()),
    "of two, the other is the median": ([own(data=1.9), own()], 4.9, ((0, "data", 0.225),)),
    "who waits in its step for another's data": ([own(data=0.0, step=2.0), own(data=2.0, step=0.0)], 2.5, ()),
    "short work before a long backward pass": ([(0.001, 0.001, 0, 0), (0.002, 0.002, 0, 0)], 10.0, ()),
    "one rank": ([own()], 1.0, ()),
}


@pytest.mark.parametrize(("ranks", "seconds", "expected"), SLOW.values(), ids=SLOW)
def test_which_ranks_are_slow(ranks: Any, seconds: float, expected: Any) -> None:
    """A rank is named, with the section in which it loses most, if the others lose a fifth by it."""
    assert tuple((each.rank, each.section, each.slower) for each in slow_ranks(ranks, seconds)) == expected


def test_sum_of_many() -> None:
    """Each rank and section has one entry, with the mean over all autosaves."""
    found = [SlowRank(rank=1, section="data", slower=share) for share in (0.3, 0.5)]
    step = SlowRank(rank=0, section="step", slower=0.25, number=3)
    assert summed_times([*found, step]) == [step, SlowRank(rank=1, section="data", slower=0.4, number=2)]

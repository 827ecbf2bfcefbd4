"""Histories of runs that reports and pages are about."""

from __future__ import annotations

from typing import Any

from lightning_faulttolerant.records.accounting import report_of
from lightning_faulttolerant.records.goodput import RunReport
from lightning_faulttolerant.records.history_parser import history_of
from tests.records.made import Story

BEGAN = 1_700_000_000.0


def killed_and_done(now: float = BEGAN) -> Story:
    """Return a run that was killed, stopped, and finished."""
    story = Story(now).begin(since=10).wait(20).start()
    for _ in range(20):
        story.train(100, 10).autosave(seconds=0.5, num_bytes=1_000_000)
    story.train(60, 6).alive().wait(600).wait(10).begin(since=10).wait(20)
    story.start(resumed=5, name=story.newest, batch=200).train(1000, 100).autosave(seconds=2.5, num_bytes=1_000_000)
    story.end("stopped by SIGTERM").wait(30).begin().wait(20).start(resumed=5, name=story.newest, batch=300)
    return story.train(500, 50).autosave(seconds=1).end().wait(5).done()


def with_a_test() -> Story:
    """Return a script that validates, is killed in a validation run and in its test, and ends."""
    story = Story(BEGAN).begin().start().train(100, 10).validate(50, 50, ends=False).autosave().alive()
    story.validate(7, 7, ends=False).alive()
    story.begin().start(resumed=1, name=story.newest, batch=10, evaluated=50, repeats=7).validate(
        50, 50, first=50
    ).autosave()
    fit = story.end().newest
    story.begin(same=True, fit=2, function="test").start(evaluated=0).validate(30, 30).autosave().validate(5, 5).alive()
    test = story.newest
    story.begin().start(resumed=1, name=fit, batch=10).end()
    story.begin(same=True, fit=2, function="test").start(resumed=1, name=test, batch=10, evaluated=30, repeats=5)
    return story.validate(70, 70).autosave(seconds=9).end().done()


def often_killed(num_faults: int, *, num_autosaves: int = 5) -> Story:
    """Return a run with this many faults, each of them after some autosaves."""
    story = Story(BEGAN).begin(since=8).wait(2).start()
    for number in range(num_faults + 1):
        for _ in range(num_autosaves):
            story.train(60, 120).autosave(seconds=0.9, num_bytes=48_300_000)
        saved = story.batch
        if number < num_faults:
            story.train(25, 50).alive().wait(180).begin(since=8).wait(3)
            story.start(resumed=1.5, name=story.newest, batch=saved)
    return story.end()


def reported(story: Story, *, run_id: str = "train-1", **options: Any) -> RunReport:
    """Return the report of a story, made when it ends."""
    options = {"made": story.now, **options}
    report = report_of(history_of(story.lines), run_id=run_id, path=f"/runs/{run_id}", **options)
    assert report is not None
    return report

"""A long history is shortened."""

from __future__ import annotations

import math

from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.records.accounting import chapter_report
from lightning_faulttolerant.records.goodput import Account, ContinuedEvaluation
from lightning_faulttolerant.records.history import RunHistory
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.records.lines import parse_lines
from lightning_faulttolerant.trainer.run.history_file import shortened, text_of
from tests.records.made import Story, stories


def accounts_of(history: RunHistory) -> list[Account]:
    """Return the accounts of all chapters."""
    return [chapter_report(chapter).account for chapter in history.chapters]


def again_in(history: RunHistory) -> list[tuple[ContinuedEvaluation, ...]]:
    """Return what is told of the evaluations that were continued."""
    return [chapter_report(chapter).continued for chapter in history.chapters]


def told_by(history: RunHistory) -> list[object]:
    """Return the report's facts about each fit."""
    return [
        (process.began, fit.number, fit.started, fit.last_seen, fit.reason, fit.place, fit.last_place, fit.resumed,
         fit.num_autosaves, math.fsum(autosave.seconds for autosave in fit.autosaves),
         sum(autosave.num_bytes or 0 for autosave in fit.autosaves),
         max((autosave.longest for autosave in fit.autosaves), default=0.0),
         fit.function, sum(run.num_batches for run in fit.validations), sum(run.number for run in fit.validations))
        for chapter in history.chapters for process in chapter.processes for fit in process.fits
    ]  # fmt: skip


@settings(max_examples=50)
@given(story=stories(), num_kept=st.integers(0, 3))
def test_shortened_history_tells_the_same(story: Story, num_kept: int) -> None:
    """Account, processes, fits, and the sums of autosaves stay as they were, and shortening again changes nothing."""
    once = shortened(story.lines, max_bytes=10**9, num_kept=num_kept)
    before, after = history_of(story.lines), history_of(once)
    assert (accounts_of(after), told_by(after)) == (accounts_of(before), told_by(before))
    assert again_in(after) == again_in(before)
    assert shortened(once, max_bytes=10**9, num_kept=num_kept) == once
    assert len(once) <= len(story.lines)


@settings(max_examples=50)
@given(story=stories(), more=stories(), num_kept=st.integers(0, 3))
def test_shortened_history_continues(story: Story, more: Story, num_kept: int) -> None:
    """Lines that are appended after shortened lines are read as after the full ones."""
    lines = shortened(story.lines, max_bytes=10**9, num_kept=num_kept)
    following = [
        {**line, **{name: line[name] + 1e6 for name in ("time", "taken", "process_began") if name in line}}
        for line in more.lines
    ]
    following = [{**line, "process": f"later-{line['process']}"} if "process" in line else line for line in following]
    whole, short = history_of([*story.lines, *following]), history_of([*lines, *following])
    assert [len(chapter.processes) for chapter in short.chapters] == [
        len(chapter.processes) for chapter in whole.chapters
    ]


def test_loop_of_crashes_is_forgotten_from_its_beginning() -> None:
    """If there are too many processes, the oldest are forgotten, and this is recorded, once and again."""
    story = Story()
    for _ in range(300):
        story.begin().start().autosave(seconds=1).train(10).end("ValueError").wait(5)
    lines = shortened(story.lines, max_bytes=20_000)
    history = history_of(lines)
    num_left = sum(len(chapter.processes) for chapter in history.chapters)
    assert len(text_of(lines)) <= 10_000
    assert 0 < num_left < 300
    assert history.num_forgotten == 300 - num_left
    for _ in range(300):
        story.begin().start().autosave(seconds=1).train(10).end("ValueError").wait(5)
    lines = shortened([*lines, *story.lines[len(story.lines) // 2 :]], max_bytes=20_000)
    history = history_of(parse_lines(text_of(lines)))
    assert history.num_forgotten == 600 - sum(len(chapter.processes) for chapter in history.chapters)
    assert lines[0]["since"] == 1000

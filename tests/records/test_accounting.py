"""The account of a run's time: each second of it is in one place, and in the right one."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.records.accounting import ChapterReport, chapter_report, report_of
from lightning_faulttolerant.records.goodput import KINDS, SAVING, Account
from lightning_faulttolerant.records.history import (
    ALIVE,
    AUTOSAVE,
    AUTOSAVES,
    BEGIN,
    DONE,
    END,
    SHORTENED,
    START,
    VALIDATION,
)
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.trainer.run.history_file import shortened
from tests.records.made import Story


def told(story: Story, *, is_shortened: bool = False) -> ChapterReport:
    """Return the report of the only chapter of a run."""
    lines = shortened(story.lines, max_bytes=10**9, num_kept=0) if is_shortened else story.lines
    [chapter] = history_of(lines).chapters
    return chapter_report(chapter)


def row(story: Story, **account: float) -> Any:
    """Return a row: a run, and its account."""
    return story, account


FIRST, SECOND = (f"autosave-0000000{number}.ckpt" for number in (1, 2))
SIGTERM = "stopped by SIGTERM"
# A process is one line, or a few.
# fmt: off
ACCOUNTS = {
    "an undisturbed run starts, trains, and waits for its autosaves": row(
        Story().wait(5).begin(since=5).wait(2).start().autosave(seconds=1).train(100).autosave(seconds=3).train(50)
        .autosave(seconds=1).end().wait(4).done(),
        starting=7, training=150, saving=5, outside=4),
    "training after the autosave that a restart used is lost; then the run is down": row(
        Story().begin().start().autosave(seconds=1).train(100).autosave(seconds=2).train(30).alive()
        .wait(60).wait(5).begin(since=5).wait(7).start(resumed=3, batch=1).train(40).end().done(),
        training=140, saving=3, redone=30, down=60, restarting=9, restoring=3),
    "an autosave written in the background has the state of before": row(
        Story().begin().start().train(100).autosave(seconds=1, written_in=20).train(5).alive()
        .begin().start(resumed=0, batch=1).train(10).end(),
        training=110, saving=1, redone=25),
    "a run killed before its first autosave begins again": row(
        Story().begin().start().train(8).alive().wait(2).begin(since=1).start().train(9).end(),
        redone=8, training=9, down=1, restarting=1),
    "processes that never reach a batch are restarts": row(
        Story().begin().start().autosave().train(10).end("ValueError")
        .wait(5).begin(since=4).wait(2).end("ValueError").wait(5).begin(since=4).wait(2).end("ValueError"),
        training=10, down=2, restarting=12),
    "fits of a script keep their work": row(
        Story().begin().start().train(50).autosave(seconds=1).end()
        .wait(3).begin(same=True, fit=2).wait(2).start().train(8).autosave().train(20).alive()
        .wait(10).begin().wait(4).start(resumed=1, name=FIRST, batch=1).end()
        .wait(3).begin(same=True, fit=2).wait(2).start(resumed=1, name=SECOND, batch=1).train(25).end().wait(6).done(),
        training=83, saving=1, outside=11, redone=20, down=10, restoring=2, restarting=7),
    "for another checkpoint, the last mark before its place gives its time": row(
        Story().begin().start().train(10, 10).alive().train(10, 10).alive().train(10, 10).alive()
        .begin().start(resumed=0, name="hpc_ckpt_1.ckpt", batch=25).train(5).end(),
        training=25, redone=10),
    "data of work that is done again is part of it": row(
        Story().begin().start().train(70).data(20).autosave(seconds=1).train(10).data(10).alive()
        .begin().start(resumed=0, batch=1).train(30).data(3).end().done(),
        training=100, data=23, saving=1, redone=20),
    "data in the line of a background save is that of its state": row(
        Story().begin().start().data(20).autosave(seconds=1, written_in=10).data(9).alive()
        .begin().start(resumed=0, batch=1).train(30).end().done(),
        training=30, data=20, saving=1, redone=19),
    "a hang lasts until a watcher noticed it; only then there is no process": row(
        Story().begin().start().train(100).autosave().train(6).alive().wait(4)
        .wait(301).begin(since=0.5, hang=(1110, 1410)).wait(2).start(resumed=0, batch=1).train(10).end().done(),
        training=110, redone=6, hung=300, down=4.5, restarting=2.5),
    "a process that its end wakes up has hung all the same": row(
        Story().begin().start().train(100).autosave().train(6).alive().wait(300).train(2).autosave().end("SystemExit")
        .wait(1).begin(hang=(1106, 1406)).start(resumed=0, batch=2).train(10).end().done(),
        training=118, hung=300, down=1),
    "validation has its own time, without the autosaves that it waits for": row(
        Story().begin().start().train(100).validate(30, 9, ends=False).autosave(seconds=2).validate(10).train(50)
        .validate(5).end().done(),
        training=150, evaluation=45, saving=2),
    "a killed validation run does its batches again from the autosave": row(
        Story().begin().start().train(100).validate(30, 9, ends=False).autosave().validate(8, 4, ends=False).alive()
        .wait(60).begin().start(resumed=0, batch=1, evaluated=9).validate(20, 6, first=9).train(7).end().done(),
        training=107, evaluation=50, redone=8, down=60),
    "a stopped validation run loses nothing": row(
        Story().begin().start().train(100).validate(30, 9, ends=False).autosave().end(SIGTERM)
        .begin().start(resumed=0, batch=1, evaluated=9).validate(20, 6, first=9).end().done(),
        training=100, evaluation=50),
    "a validation run whose start was captured is lost from there": row(
        Story().begin().start().train(100).validate(30, 9, ends=False)
        .autosave(seconds=1, taken=1100.0, num_validated=0).end(SIGTERM)
        .begin().start(resumed=0, batch=1, evaluated=0).validate(50, 15).end().done(),
        training=100, evaluation=50, saving=1, redone=30),
    "batches that ran three times are counted twice": row(
        Story().begin().start().validate(5, 5, ends=False).autosave().validate(9, 9, ends=False).alive()
        .begin().start(resumed=0, evaluated=5).validate(4, 4, first=5, ends=False).alive()
        .begin().start(resumed=0, evaluated=5).validate(20, 20, first=5).end().done(),
        evaluation=25, redone=13),
    "evaluations of a script count like fits": row(
        Story().begin().start().train(100).autosave(seconds=1).end().wait(2).begin(same=True, fit=2, function="test")
        .wait(1).start(evaluated=0).validate(40, 40).autosave(seconds=1).validate(7, 7).alive()
        .wait(30).begin().wait(3).start(resumed=1, name=FIRST, batch=1).end()
        .begin(same=True, fit=2, function="test").wait(1).start(resumed=1, name=SECOND, batch=1, evaluated=40)
        .validate(60, 60).autosave(seconds=1).end().wait(4).done(),
        training=100, evaluation=100, saving=3, outside=7, redone=7, down=30, restoring=2, restarting=2),
    "if a clock goes back, no time passes": row(
        Story().begin().start().train(10).autosave(seconds=1)
        .wait(-500).begin(since=5).start(resumed=1, batch=1).train(520).end(),
        training=30, saving=1),
}
# fmt: on


@pytest.mark.parametrize(("story", "account"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_account_of_a_run(story: Story, account: dict[str, float]) -> None:
    """Each second is where it belongs."""
    found = told(story)
    assert {kind: getattr(found.account, kind) for kind in KINDS if getattr(found.account, kind)} == account
    assert all(one.ended == other.began for one, other in pairwise(found.segments))
    assert all(segment.seconds > 0 for segment in found.segments)
    assert all(one.process <= other.process for one, other in pairwise(found.segments))
    ended = found.chapter.done or max(process.last_seen for process in found.chapter.processes)
    assert found.account.total == found.ended - found.began == ended - found.chapter.processes[0].began
    assert found.account.goodput <= found.account.goodput_while_up <= 1
    waited = math.fsum(line["seconds"] for line in story.lines if line["event"] == AUTOSAVE)
    assert math.fsum(each.seconds for each in found.segments if each.kind == SAVING) == waited
    assert told(story, is_shortened=True).account == found.account


def test_evaluation_that_runs_from_its_start_again_is_the_same_chapter() -> None:
    """If only its start could be saved, all of it is lost, although autosaves exist and nothing is restored."""
    story = Story().begin(function="test").start(evaluated=0).autosave().validate(40, 40).alive()
    story.wait(1).begin(function="test").start(evaluated=0)
    story.lines[-1]["continues"] = True
    found = told(story.validate(100, 100).end().done())
    assert (found.account.evaluation, found.account.redone, found.account.down) == (100, 40, 1)


def test_shares_of_an_account() -> None:
    """Goodput is what counts of the whole, or of the time in which a process was there."""
    account = Account(training=100, evaluation=10, data=5, redone=6, hung=300, down=4.5, restarting=2.5)
    assert (account.total, account.lost) == (428, 6 + 300 + 4.5 + 2.5)
    assert (account.goodput, account.goodput_while_up) == (110 / 428, 110 / 423.5)
    assert (Account().total, Account().goodput, Account().goodput_while_up) == (0, 0, 0)
    assert report_of(history_of([]), run_id="run", path="run", made=0.0) is None


_anything = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2000), st.floats(), st.text(max_size=3), st.lists(st.integers()),
    st.dictionaries(
        st.sampled_from(["epoch", "batch", "global_step", "seconds", "path", "since", "first"]), st.integers(-1, 50)
    ),
)  # fmt: skip
_names = [
    "time", "fit", "process", "process_began", "pid", "host", "epoch", "batch", "global_step", "resumed", "continues",
    "seconds", "taken", "bytes", "number", "since", "longest", "reason", "text", "saved", "name", "num_ranks",
    "function", "num_validated", "validation", "until", "first", "num_batches", "data", "slow", "hang",
]  # fmt: skip
_events = st.sampled_from([BEGIN, START, AUTOSAVE, AUTOSAVES, VALIDATION, ALIVE, END, DONE, SHORTENED, "else", 3])


@settings(max_examples=50)
@given(lines=st.lists(st.builds(
    lambda event, fit, rest: {"event": event, "fit": fit, **rest},
    _events, st.integers(0, 2), st.dictionaries(st.sampled_from(_names), _anything),
)))  # fmt: skip
def test_whatever_the_lines_say_is_read(lines: list[dict[str, Any]]) -> None:
    """Edited lines, or those of another version, never raise, and the parts still sum up."""
    for chapter in map(chapter_report, history_of(lines).chapters):
        assert all(one.ended == other.began for one, other in pairwise(chapter.segments))
        assert chapter.account.total == pytest.approx(chapter.ended - chapter.began)

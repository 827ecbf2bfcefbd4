"""The account of a run's time: each second of it is in one place, and in the right one."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.records.accounting import chapter_report, report_of
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
from tests.records.made import Story, stories


def account_of(story: Story) -> dict[str, float]:
    """Return the nonzero entries of the account of the only chapter of a run."""
    [chapter] = history_of(story.lines).chapters
    account = chapter_report(chapter).account
    return {kind: getattr(account, kind) for kind in KINDS if getattr(account, kind)}


def test_run_without_a_fault() -> None:
    """An undisturbed run has started, trained, and waited for its autosaves, and nothing is lost."""
    story = Story().wait(5).begin(since=5).wait(2).start()
    story.autosave(seconds=1).train(100).autosave(seconds=3).train(50).autosave(seconds=1).end().wait(4).done()
    assert account_of(story) == {"starting": 7, "training": 150, "saving": 5, "outside": 4}
    [chapter] = history_of(story.lines).chapters
    account = chapter_report(chapter).account
    assert (account.total, account.lost, account.goodput) == (166, 0, 150 / 166)


def test_killed_run_does_work_again() -> None:
    """Training after the autosave that a restart used is lost, up to the last sign of life; then the run is down.

    The same work counts when it is done the second time.
    """
    story = Story().begin().start().autosave(seconds=1).train(100).autosave(seconds=2)
    story.train(30).alive()
    story.wait(60).wait(5).begin(since=5).wait(7).start(resumed=3, name=story.newest, batch=1).train(40).end().done()
    assert account_of(story) == {
        "training": 100 + 40,
        "saving": 3,
        "redone": 30,
        "down": 60,
        "restarting": 5 + 7 - 3,
        "restoring": 3,
    }


def test_autosave_written_in_background_has_the_state_of_before() -> None:
    """Training that continued while an autosave was written is lost with the process."""
    story = Story().begin().start().train(100).autosave(seconds=1, written_in=20).train(5).alive()
    story.begin().start(resumed=0, name=story.newest, batch=1).train(10).end()
    assert account_of(story) == {"training": 110, "saving": 1, "redone": 25}


def test_process_that_saved_nothing_is_lost_whole() -> None:
    """If a third process resumes from an autosave of the first, all training of the second is lost."""
    story = Story().begin().start().train(10).autosave()
    name = story.newest
    story.train(5).alive().begin().start(resumed=0, name=name, batch=1).train(20).alive()
    story.wait(1).begin().start(resumed=0, name=name, batch=1).train(30).end()
    assert account_of(story) == {"training": 40, "redone": 25, "down": 1}


def test_run_killed_before_its_first_autosave_begins_again() -> None:
    """Without an autosave all training is lost, and the restart belongs to the same chapter."""
    story = Story().begin().start().train(8).alive().wait(2).begin(since=1).start().train(9).end()
    assert account_of(story) == {"redone": 8, "training": 9, "down": 1, "restarting": 1}


def test_loop_of_crashes_before_the_first_batch() -> None:
    """Processes that never reach a batch count as time of restarts, not of no process."""
    story = Story().begin().start().autosave().train(10).end("ValueError")
    for _ in range(3):
        story.wait(1).wait(4).begin(since=4).wait(2).end("ValueError")
    assert account_of(story) == {"training": 10, "down": 3, "restarting": 18}


def test_fits_of_a_script_keep_their_work() -> None:
    """A restart that restores a finished fit loses nothing of it, and the way to the fit in progress is restarting."""
    story = Story().begin().start().train(50).autosave(seconds=1).end()
    first = story.newest
    story.wait(3).begin(same=True, fit=2).wait(2).start().train(8).autosave().train(20).alive()
    second = story.newest
    story.wait(10).begin().wait(4).start(resumed=1, name=first, batch=1).end()
    story.wait(3).begin(same=True, fit=2).wait(2).start(resumed=1, name=second, batch=1).train(25).end().wait(6).done()
    assert account_of(story) == {
        "training": 50 + 8 + 25,
        "saving": 1,
        "outside": 5 + 6,
        "redone": 20,
        "down": 10,
        "restoring": 2,
        "restarting": 3 + 4,
    }


def test_place_tells_where_no_autosave_does() -> None:
    """For another checkpoint, such as Lightning's own, the last mark that is not after its place gives its time."""
    story = Story().begin().start().train(10, 10).alive().train(10, 10).alive().train(10, 10).alive()
    story.begin().start(resumed=0, name="hpc_ckpt_1.ckpt", batch=25).train(5).end()
    assert account_of(story) == {"training": 25, "redone": 10}


# Waiting for data, and hangs.


def test_waiting_for_data_is_no_progress() -> None:
    """What training waits for data is taken from the time that counted."""
    story = Story().begin().start().train(70).data(20).alive().train(5).data(5).end().done()
    assert account_of(story) == {"training": 75, "data": 25}
    [chapter] = history_of(story.lines).chapters
    assert chapter_report(chapter).account.goodput == 0.75


def test_data_of_work_that_is_done_again_is_part_of_it() -> None:
    """Only what training had waited up to the autosave's state counts as waiting for data."""
    story = Story().begin().start().train(70).data(20).autosave(seconds=1).train(10).data(10).alive()
    story.begin().start(resumed=0, name=story.newest, batch=1).train(30).data(3).end().done()
    assert account_of(story) == {"training": 100, "data": 23, "saving": 1, "redone": 20}


def test_data_that_a_background_save_was_written_during_is_done_again() -> None:
    """The seconds in its line are those of the state, not those of the time when it was written."""
    story = Story().begin().start().data(20).autosave(seconds=1, written_in=10).data(9).alive()
    story.begin().start(resumed=0, name=story.newest, batch=1).train(30).end().done()
    assert account_of(story) == {"training": 30, "data": 20, "saving": 1, "redone": 19}


def test_hang_is_no_time_without_a_process() -> None:
    """From its beginning until a watcher noticed it, a process hung; only after that there was none."""
    story = Story().begin().start().train(100).autosave().train(6).alive().wait(4)
    since = story.now
    story.wait(300).wait(1).begin(since=0.5, hang=(since, since + 300)).wait(2)
    story.start(resumed=0, name=story.newest, batch=1).train(10).end().done()
    assert account_of(story) == {"training": 110, "redone": 6, "hung": 300, "down": 4.5, "restarting": 2.5}
    [chapter] = history_of(story.lines).chapters
    account = chapter_report(chapter).account
    assert account.lost == 6 + 300 + 4.5 + 2.5
    assert account.goodput_while_up == 110 / (account.total - 4.5)


def test_process_that_its_end_wakes_up_has_hung_all_the_same() -> None:
    """The signal that ends it interrupts its sleep: it trains a batch more, saves, and writes its end."""
    story = Story().begin().start().train(100).autosave().train(6).alive()
    since = story.now
    story.wait(300).train(2).autosave().end("SystemExit")
    story.wait(1).begin(hang=(since, since + 300)).start(resumed=0, name=story.newest, batch=2).train(10).end().done()
    assert account_of(story) == {"training": 118, "hung": 300, "down": 1}


def test_hang_of_an_earlier_process_counts_once() -> None:
    """Each later start tells of the last hang, which is over by then."""
    story = Story().begin().start().train(100).autosave().end("ValueError")
    hang = (story.now, story.now + 50)
    for _ in range(3):
        story.wait(60).begin(hang=hang).start(resumed=0, name=story.newest, batch=1).train(10).autosave().alive()
    assert account_of(story) == {"training": 130, "hung": 50, "down": 130}


# Evaluation.


def again_in(story: Story) -> list[tuple[int, int, bool]]:
    """Return for each continued evaluation its process, how many batches ran again, and whether more may have."""
    [chapter] = history_of(story.lines).chapters
    return [(each.process + 1, each.num_again, each.was_killed) for each in chapter_report(chapter).continued]


def test_validation_has_its_own_time() -> None:
    """A validation run counts, apart from training, without the autosaves that it waits for."""
    story = Story().begin().start().train(100).validate(30, 9, ends=False).autosave(seconds=2).validate(10).train(50)
    story.validate(5).end().done()
    assert account_of(story) == {"training": 150, "evaluation": 45, "saving": 2}
    [chapter] = history_of(story.lines).chapters
    assert chapter_report(chapter).account.goodput == 195 / 197
    assert [(run.num_batches, run.seconds, run.is_over) for run in chapter.fits[0].validations] == [
        (10, 40, True),
        (1, 5, True),
    ]


def test_killed_validation_does_its_batches_again_from_the_autosave() -> None:
    """What was validated before the autosave counts, in both processes; what came after it is lost."""
    story = Story().begin().start().train(100).validate(30, 9, ends=False).autosave().validate(8, 4, ends=False).alive()
    story.wait(60).begin().start(resumed=0, name=story.newest, batch=1, evaluated=9)
    story.validate(20, 6, first=9).train(7).end().done()
    assert account_of(story) == {"training": 107, "evaluation": 50, "redone": 8, "down": 60}
    assert again_in(story) == [(2, 4, True)]
    runs = [run for fit in history_of(story.lines).chapters[0].fits for run in fit.validations]
    assert [(run.first, run.num_batches, run.is_over) for run in runs] == [(0, 13, False), (9, 6, True)]


def test_stopped_validation_loses_nothing() -> None:
    """A stop that saves its place repeats no batch."""
    story = Story().begin().start().train(100).validate(30, 9, ends=False).autosave().end("stopped by SIGTERM")
    story.begin().start(resumed=0, name=story.newest, batch=1, evaluated=9).validate(20, 6, first=9).end().done()
    assert account_of(story) == {"training": 100, "evaluation": 50}
    assert again_in(story) == [(2, 0, False)]


def test_repeated_validation_is_lost_whole() -> None:
    """A stop that can only save the capture of the run's start repeats all of its batches.

    The state counts from when it was captured, not from when it was written.
    """
    story = Story().begin().start().train(100).validate(30, 9, ends=False).autosave(seconds=1)
    story.lines[-1] |= {"taken": story.now - 31, "num_validated": 0}
    story.end("stopped by SIGTERM").begin().start(resumed=0, name=story.newest, batch=1, evaluated=0)
    story.validate(50, 15).end().done()
    assert account_of(story) == {"training": 100, "evaluation": 50, "saving": 1, "redone": 30}
    assert again_in(story) == [(2, 9, False)]


def test_whole_validation_after_the_autosave_is_lost() -> None:
    """A run that was over, but came after the autosave, is run again; training before it, too."""
    story = Story().begin().start().train(50).validate(10, 3).autosave().train(20).validate(10, 3).alive()
    story.begin().start(resumed=0, name=story.newest, batch=1).train(20).validate(10, 3).end().done()
    assert account_of(story) == {"training": 70, "evaluation": 20, "redone": 30}
    assert again_in(story) == [(2, 3, True)]


def test_batches_that_ran_three_times_are_counted_twice() -> None:
    """Each process that goes back counts what the processes before it had done after that place."""
    story = Story().begin().start().validate(5, 5, ends=False).autosave()
    name = story.newest
    story.validate(9, 9, ends=False).alive()
    story.begin().start(resumed=0, name=name, evaluated=5).validate(4, 4, first=5, ends=False).alive()
    story.begin().start(resumed=0, name=name, evaluated=5).validate(20, 20, first=5).end().done()
    assert again_in(story) == [(2, 9, True), (3, 4, True)]
    assert account_of(story) == {"evaluation": 25, "redone": 13}


def test_evaluations_of_a_script_count_like_fits() -> None:
    """A script that fits and tests: the killed test continues at its batch, and the restored fit costs a restart."""
    story = Story().begin().start().train(100).autosave(seconds=1).end()
    fit = story.newest
    story.wait(2).begin(same=True, fit=2, function="test").wait(1).start(evaluated=0).autosave()
    story.validate(40, 40).autosave(seconds=1).validate(7, 7).alive()
    test = story.newest
    story.wait(30).begin().wait(3).start(resumed=1, name=fit, batch=1).end()
    story.begin(same=True, fit=2, function="test").wait(1).start(resumed=1, name=test, evaluated=40)
    story.validate(60, 60).autosave(seconds=1).end().wait(4).done()
    assert account_of(story) == {
        "training": 100,
        "evaluation": 100,
        "saving": 3,
        "outside": 3 + 4,
        "redone": 7,
        "down": 30,
        "restoring": 2,
        "restarting": 2,
    }
    assert again_in(story) == [(2, 7, True)]
    [chapter] = history_of(story.lines).chapters
    assert [fit.name for fit in chapter.fits] == ["fit-1", "test-2", "fit-1", "test-2"]


def test_evaluation_that_runs_from_its_start_again_is_the_same_chapter() -> None:
    """If only its start could be saved, all of it is lost, although autosaves exist and nothing is restored."""
    story = Story().begin(function="test").start(evaluated=0).autosave().validate(40, 40).alive()
    story.wait(1).begin(function="test").start(evaluated=0)
    story.lines[-1]["continues"] = True
    story.validate(100, 100).end().done()
    assert account_of(story) == {"evaluation": 100, "redone": 40, "down": 1}
    assert again_in(story) == [(2, 40, True)]


def test_history_of_an_earlier_version_is_read() -> None:
    """Its fits have no function and no validation runs: all of their time is training."""
    story = Story().begin().start().train(100).alive().train(30).end().done()
    assert not any({"function", "num_validated", "validation"} & line.keys() for line in story.lines)
    [fit] = history_of(story.lines).chapters[0].fits
    assert (fit.name, fit.is_evaluation, fit.validations) == ("fit-1", False, ())
    assert account_of(story) == {"training": 130}


@settings(max_examples=50)
@given(story=stories())
def test_validation_is_never_more_than_it_was(story: Story) -> None:
    """What counts as evaluation is at most what was evaluated, and if no process went back, exactly that."""
    told = [chapter_report(chapter) for chapter in history_of(story.lines).chapters]
    assert math.fsum(chapter.account.evaluation for chapter in told) <= story.seconds_evaluated
    if not any(chapter.account.redone for chapter in told) and not any(
        fit.reason is None for chapter in told for fit in chapter.chapter.fits
    ):
        assert math.fsum(chapter.account.evaluation for chapter in told) == story.seconds_evaluated


def test_clock_of_another_machine_is_behind() -> None:
    """If a clock goes back, no time passes, and nothing becomes negative."""
    story = Story().begin().start().train(10).autosave(seconds=1)
    story.wait(-500).begin(since=5).start(resumed=1, name=story.newest, batch=1).train(520).end()
    assert account_of(story) == {"training": 30, "saving": 1}


def wall_seconds(story: Story) -> float:
    """Return the wall time of all chapters, from the first process to the last line of each."""
    chapters = history_of(story.lines).chapters
    return math.fsum(
        (chapter.done or max(process.last_seen for process in chapter.processes)) - chapter.processes[0].began
        for chapter in chapters
    )


@settings(max_examples=50)
@given(story=stories())
def test_parts_sum_up_to_the_whole(story: Story) -> None:
    """Segments follow each other without gaps, none is negative, and the account adds up to the wall time."""
    report = report_of(history_of(story.lines), run_id="run", path="/runs/run", made=story.now, is_whole=True)
    assert report is not None
    for chapter in report.chapters:
        assert all(one.ended == other.began for one, other in pairwise(chapter.segments))
        assert all(segment.seconds > 0 for segment in chapter.segments) or len(chapter.segments) == 1
        assert chapter.account.total == chapter.ended - chapter.began
        assert chapter.account.goodput <= chapter.account.goodput_while_up <= 1
    assert math.fsum(chapter.account.total for chapter in report.chapters) == wall_seconds(story)


@settings(max_examples=50)
@given(story=stories())
def test_waiting_is_never_lost_from_the_account(story: Story) -> None:
    """The seconds that training waited for autosaves are in the account, each of them."""
    waited = math.fsum(line["seconds"] for line in story.lines if line["event"] == AUTOSAVE)
    chapters = [chapter_report(chapter) for chapter in history_of(story.lines).chapters]
    assert math.fsum(chapter.account.saving for chapter in chapters) == waited
    saving = [segment for chapter in chapters for segment in chapter.segments if segment.kind == SAVING]
    assert math.fsum(segment.seconds for segment in saving) == waited


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


def test_empty_account_has_no_goodput() -> None:
    """An account without any time has no shares."""
    assert (Account().total, Account().goodput, Account().goodput_while_up) == (0, 0, 0)
    assert report_of(history_of([]), run_id="run", path="run", made=0.0) is None

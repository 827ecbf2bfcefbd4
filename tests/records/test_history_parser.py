"""Lines become chapters, processes, and fits."""

from __future__ import annotations

import pytest

from lightning_faulttolerant.records.history import FINISHED, Chapter, RunPlace
from lightning_faulttolerant.records.history_parser import history_of
from tests.records.made import Story


def chapters_of(story: Story) -> tuple[Chapter, ...]:
    """Return the chapters of a run."""
    return history_of(story.lines).chapters


def shape_of(story: Story) -> list[list[list[int]]]:
    """Return the numbers of the fits of each process of each chapter."""
    return [[[fit.number for fit in process.fits] for process in chapter.processes] for chapter in chapters_of(story)]


def test_what_a_process_tells_of_itself_is_read() -> None:
    """Each value in a line is found where it belongs."""
    story = Story(100.0).begin(since=3).wait(1).start()
    story.train(7, 42).autosave(seconds=0.5, num_bytes=1234).alive().train(1, 1).end("stopped by SIGTERM")
    [chapter] = chapters_of(story)
    [process] = chapter.processes
    [fit] = process.fits
    assert (process.began, process.pid, process.host, process.last_seen) == (97, 1, "here", 109.5)
    assert (fit.number, fit.began, fit.started, fit.last_seen) == (1, 100, 101, 109.5)
    assert (fit.reason, process.reason) == ("stopped by SIGTERM", "stopped by SIGTERM")
    assert (fit.is_finished, fit.has_trained, fit.num_ranks, fit.resumed) == (False, True, 1, None)
    assert (fit.place, fit.last_place) == (
        RunPlace(epoch=0, batch=0, global_step=0),
        RunPlace(epoch=0, batch=43, global_step=43),
    )
    assert fit.alive == ((108.5, RunPlace(epoch=0, batch=42, global_step=42)),)
    [autosave] = fit.autosaves
    assert (autosave.taken, autosave.time, autosave.seconds, autosave.num_bytes) == (108, 108.5, 0.5, 1234)
    assert (autosave.name, autosave.is_in_background, autosave.number) == ("autosave-00000001.ckpt", False, 1)


def test_what_was_restored_is_read() -> None:
    """A resumed fit reports from which autosave, how long that took, and how exact it was."""
    story = Story().begin().start().autosave().begin().start(resumed=2.5, name="autosave-00000001.ckpt", batch=3)
    resumed = chapters_of(story)[0].processes[1].fits[0].resumed
    assert resumed is not None
    assert (resumed.path, resumed.position) == ("/runs/run/fit-1/autosave-00000001.ckpt", "somewhere")
    assert (resumed.seconds, resumed.restored, resumed.not_exact, resumed.continues) == (2.5, ("weights",), (), True)


def test_start_after_the_end_of_a_script_is_a_new_chapter() -> None:
    """A script that finished and is run again begins again."""
    story = Story().begin().start().end().done().wait(9).begin().start().train(3).end().done()
    assert shape_of(story) == [[[1]], [[1]]]
    assert [chapter.done for chapter in chapters_of(story)] == [1000, 1012]


def test_start_that_does_not_continue_is_a_new_chapter() -> None:
    """A start that ignores an existing autosave is a new chapter; without an autosave to resume from, it is not."""
    story = Story().begin().start().autosave().train(1).begin().start().end()
    assert shape_of(story) == [[[1]], [[1]]]
    story = Story().begin().start().train(1).alive().begin().start().end()
    assert shape_of(story) == [[[1], [1]]]


def test_start_from_a_checkpoint_of_somebody_else_is_a_new_chapter() -> None:
    """A checkpoint that the user names makes the autosaves obsolete, and so begins a chapter."""
    story = Story().begin().start().autosave().train(1)
    story.begin().start(resumed=1, name="pretrained.ckpt", continues=False).end()
    assert shape_of(story) == [[[1]], [[1]]]


def test_later_fits_are_of_the_same_process() -> None:
    """The second fit of a script begins neither a chapter nor a process, though it begins at the beginning."""
    story = Story().begin().start().autosave().end().begin(same=True, fit=2).start().autosave().train(1)
    story.begin().start(resumed=0, name="autosave-00000001.ckpt").end().begin(same=True, fit=2).start()
    assert shape_of(story) == [[[1, 2], [1, 2]]]
    [first, second] = chapters_of(story)[0].processes
    assert [fit.has_trained for fit in (*first.fits, *second.fits)] == [True, True, False, True]
    assert first.fits[0].reason == FINISHED


def test_torn_beginning_costs_what_it_said() -> None:
    """Without the line of a beginning, the other lines still describe their fit."""
    lines = Story().begin().start().train(3, 3).alive().lines[1:]
    [chapter] = history_of(lines).chapters
    [process] = chapter.processes
    assert (process.began, process.pid, process.fits[0].started, process.last_seen) == (1000, None, 1000, 1003)


def test_unknown_events_are_passed_over() -> None:
    """Events that a later version of the package may add do no harm."""
    story = Story().begin().start()
    story.lines.append({"event": "new", "fit": 1, "time": 5000.0})
    assert chapters_of(story)[0].processes[0].last_seen == 1000


@pytest.mark.parametrize("time", [1e14, -1.0, float("nan"), None, True])
def test_a_time_that_can_not_be_is_passed_over(time: object) -> None:
    """A line without a displayable time does not count, and neither does such a beginning of a process."""
    story = Story().begin().start()
    story.lines[0]["process_began"] = time
    story.lines.append({**story.lines[-1], "time": time})
    [process] = chapters_of(story)[0].processes
    assert (process.began, process.last_seen) == (1000, 1000)

"""What a watcher reads in heartbeats, when it takes a section for a hang, and what it says of ranks."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.storage.store import open_store
from lightning_faulttolerant.supervision import heartbeats as heartbeats_module, watch as watcher_module
from lightning_faulttolerant.supervision.heartbeats import (
    END_OF_EPOCH,
    EVALUATION_BATCH,
    FILE_NAME,
    FIRST_BATCH,
    OFF,
    OUTSIDE,
    REPORT,
    SAVE,
    SETUP,
    STOP,
    TEARDOWN,
    TRAINING_BATCH,
    Heartbeat,
    ProcessHeartbeat,
    SectionTimes,
    TrainingFailure,
    heartbeat_in,
    last_hang,
    read_failures,
    read_heartbeats,
    write_failure,
)
from lightning_faulttolerant.supervision.watch import (
    Hang,
    HangWatcher,
    lagging_ranks,
    waits_for_others,
    write_hang_report,
)
from tests.processes import Child


class Clock:
    """A clock that a test moves, from look to look."""

    def __init__(self, step: float = 0.5) -> None:
        self.now = 100.0
        self.step = step

    def __call__(self) -> float:
        return self.now


def looks(watcher: HangWatcher, clock: Clock, seconds: float) -> Hang | None:
    """Let a watcher look for so long; return the hang that it finds."""
    found = None
    for _ in range(int(seconds / clock.step)):
        clock.now += clock.step
        found = watcher.look() or found
    return found


def watched(
    directory: Path, *, hang: int = 0, timeout: float = 0, run: str = "", step: float = 0.5
) -> tuple[Heartbeat, HangWatcher, Clock]:
    """Return the heartbeat of this process, and its watcher."""
    clock, heartbeat = Clock(step), Heartbeat(directory)
    heartbeat.describe(rank=0, num_ranks=1, hang=hang, hang_timeout_ms=int(1000 * timeout), directory=run)
    return heartbeat, HangWatcher(directory, clock=clock, look_every_seconds=step), clock


def test_the_limits_of_batches_are_learned(tmp_path: Path) -> None:
    """Ten times the slowest of their kind, and never less than five minutes."""
    heartbeat, watcher, clock = watched(tmp_path)
    heartbeat.begin_batch(TRAINING_BATCH, 0, 0)
    assert looks(watcher, clock, 100) is None
    heartbeat.begin_batch(EVALUATION_BATCH, 0, 1, 0)
    looks(watcher, clock, 1)
    heartbeat.begin_batch(EVALUATION_BATCH, 0, 1, 1)
    assert looks(watcher, clock, 299) is None
    hang = looks(watcher, clock, 5)
    assert hang is not None
    assert "the section evaluation batch (epoch 0, batch 1, evaluation batch 1) for 30" in hang.text
    assert "300 s is the limit (the slowest of its kind took 0.5 s)" in hang.text
    heartbeat.begin_batch(TRAINING_BATCH, 0, 1)
    assert looks(watcher, clock, 990) is None
    assert looks(watcher, clock, 20) is not None


def test_sections_other_than_batches_may_always_take_half_an_hour(tmp_path: Path) -> None:
    """One that had nothing to do says nothing about the next one; one that took long may take longer."""
    for section in (SETUP, FIRST_BATCH, SAVE, END_OF_EPOCH, TEARDOWN):
        (tmp_path / str(section)).mkdir()
        heartbeat, watcher, clock = watched(tmp_path / str(section), step=10)
        for _ in range(3):
            heartbeat.begin(section)
            looks(watcher, clock, 10)
        assert looks(watcher, clock, 1780) is None
        heartbeat.begin(section)
        assert looks(watcher, clock, 2000) is None
        assert looks(watcher, clock, 20_000) is not None


def test_the_same_place_may_take_twice_as_long_after_each_hang(tmp_path: Path) -> None:
    """So a limit that is wrong can't end a run. The next start knows it, and other places keep their limit."""
    (tmp_path / "run").mkdir()
    limits = []
    for start in range(3):
        (tmp_path / str(start)).mkdir()
        heartbeat, watcher, clock = watched(tmp_path / str(start), run=str(tmp_path / "run"), step=5)
        heartbeat.begin_batch(TRAINING_BATCH, 0, 4)
        looks(watcher, clock, 5)
        heartbeat.begin_batch(TRAINING_BATCH, 0, 5)
        hang = looks(watcher, clock, 1300)
        assert hang is not None
        limits.append(hang.limit_seconds)
        other = replace(hang.beat, batch=6)
        assert watcher.times.limit(other)[0] == 300
        watcher.write_learned()
    assert limits == [300, 600, 1200]
    assert "doubled after each hang here, 2 so far" in hang.text


def test_only_time_in_which_the_watcher_looked_counts(tmp_path: Path) -> None:
    """A machine that slept for an hour has no hang, and ``--monitor-interval 30`` doesn't make a minute of thirty."""
    (tmp_path / "rarely").mkdir()
    for directory, timeout, step, hour in ((tmp_path, 5, 0.5, 3600), (tmp_path / "rarely", 100, 30, 0)):
        heartbeat, watcher, clock = watched(directory, timeout=timeout, step=step)
        heartbeat.begin(SAVE)
        assert looks(watcher, clock, 4 * step) is None
        clock.now += hour
        assert looks(watcher, clock, 2) is None
    assert [looks(watcher, clock, 30) is not None for _ in range(2)] == [True, False]


def test_a_directory_that_hangs_holds_no_watcher_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hung file system keeps waiting is a thread, not the process that has to end the run."""
    release = threading.Event()

    def hang(path: str, *_: object, **__: object) -> Any:
        if not path.startswith(f"{tmp_path}/run"):
            return open_store(path)
        release.wait(60)
        raise OSError

    monkeypatch.setattr(heartbeats_module, "open_file", hang)
    for module in (heartbeats_module, watcher_module):
        monkeypatch.setattr(module, "open_store", hang)
    monkeypatch.setattr(watcher_module, "STORAGE_ANSWERS_WITHIN_SECONDS", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heartbeat, watcher, clock = watched(tmp_path, run=f"{tmp_path}/run")
    heartbeat.begin(TRAINING_BATCH)
    looks(watcher, clock, 60)
    heartbeat.begin(SAVE)
    looks(watcher, clock, 60)
    watcher.write_learned()
    path = write_hang_report("the report", f"{tmp_path}/run")
    assert Path(path).parent == tmp_path
    assert Path(path).read_text() == "the report"
    release.set()


@pytest.mark.parametrize(
    ("hang", "section", "expected"), [(OFF, SAVE, None), (0, OUTSIDE, None), (REPORT, SAVE, True), (0, SAVE, False)]
)
def test_what_is_watched(tmp_path: Path, hang: int, section: int, expected: bool | None) -> None:
    """With ``hang="off"``, and outside of a fit, nothing hangs; the heartbeat says whether a report is enough."""
    heartbeat, watcher, clock = watched(tmp_path, hang=hang, timeout=5)
    heartbeat.begin(section)
    found = looks(watcher, clock, 100)
    assert (None if found is None else found.is_only_reported) == expected


def test_the_next_start_knows_what_was_learned(tmp_path: Path) -> None:
    """The slowest sections and the last hang are beside the history, and damaged files are no reason to stop."""
    directory = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    hung, later, damaged = SectionTimes(), SectionTimes(), SectionTimes()
    hung.follow(directory)
    hung.learn(TRAINING_BATCH, 60.0)
    hung.note_hang(marks_at(0, 5), 300.0)
    noticed = time.time()
    hung.writing()()
    later.follow(directory)
    assert later.limit(marks_at(0, 1))[0] == 600
    later.writing()()
    times = last_hang(directory)
    assert times is not None
    assert (times[1] - times[0], times[1]) == (pytest.approx(300.0, abs=0.01), pytest.approx(noticed, abs=1.0))
    (tmp_path / "run" / FILE_NAME).write_text(json.dumps([1]))
    damaged.follow(directory)
    assert damaged.limit(marks_at(0, 1))[0] == 1800
    assert last_hang(directory) is None


def marks_at(rank: int, batch: int) -> ProcessHeartbeat:
    """Return the heartbeat of a rank in a training batch."""
    return ProcessHeartbeat(
        process_id=rank + 1,
        count=1,
        section=TRAINING_BATCH,
        epoch=0,
        batch=batch,
        evaluated=-1,
        saved=None,
        rank=rank,
        num_ranks=2,
        hang=0,
        hang_timeout_seconds=0.0,
        directory="",
    )


def test_which_rank_is_behind() -> None:
    """A stopped one, else the one at an earlier batch, else the one that is in no collective."""
    in_collective = 'Current thread 1:\n  File "x/torch/distributed/distributed_c10d.py", line 3 in all_reduce'
    elsewhere = 'Current thread 1:\n  File "train.py", line 3 in training_step'

    def told(batches: tuple[int, int], states: str = "SS", stacks: tuple[str, str] = ("", "")) -> str:
        ranks = tuple((marks_at(rank, batch), 1.0) for rank, batch in enumerate(batches))
        hang = Hang(beat=ranks[0][0], seconds=1.0, limit_seconds=1.0, why="", ranks=ranks)
        return lagging_ranks(hang, dict(enumerate(states, 1)), dict(enumerate(stacks)))

    assert told((4, 4), "ST") == "A signal has stopped rank 1."
    assert told((4, 3)) == "The others are ahead of rank 1."
    assert told((4, 4), stacks=(in_collective, elsewhere)) == "The others wait in a collective for rank 1."
    assert told((4, 4), stacks=(elsewhere, elsewhere)) == "All ranks are at the same place."

    watch = 'Thread 1:\n  File "x/lightning_faulttolerant/trainer/ranks/watch.py", line 115 in _run'
    assert not waits_for_others(watch)  # each rank has that thread, whatever its main thread does
    gather = 'Thread 1:\n  File "x/lightning_faulttolerant/trainer/ranks/line.py", line 3 in receive'
    assert waits_for_others(f"{watch}\n\n{gather}")


# Heartbeats


def test_a_watcher_reads_what_was_marked(tmp_path: Path) -> None:
    """Each note changes the count, and all numbers arrive."""
    heartbeat = Heartbeat(tmp_path)
    heartbeat.describe(rank=1, num_ranks=2, hang=STOP, hang_timeout_ms=1500, directory="/runs/größe")
    heartbeat.begin_batch(TRAINING_BATCH, 3, 14, 2)
    [first] = read_heartbeats(tmp_path)
    assert (first.section, first.epoch, first.batch, first.evaluated) == (TRAINING_BATCH, 3, 14, 2)
    assert (first.rank, first.num_ranks, first.hang, first.hang_timeout_seconds) == (1, 2, STOP, 1.5)
    assert (first.process_id, first.directory, first.saved) == (os.getpid(), "/runs/größe", None)
    heartbeat.begin(SAVE)
    heartbeat.note_saved((1, 2, 3, 4))
    [second] = read_heartbeats(tmp_path)
    assert (second.section, second.saved, second.epoch) == (SAVE, (1, 2, 3, 4), 3)
    assert second.count > first.count


def test_marks_have_their_memory_from_the_start(tmp_path: Path) -> None:
    """In a file with a hole, a heartbeat would end the process by SIGBUS once the memory is full."""
    Heartbeat(tmp_path)
    assert (tmp_path / f"heartbeat-{os.getpid()}").stat().st_blocks > 0


def test_a_forked_process_has_its_own_marks(tmp_path: Path) -> None:
    """A process that is forked in a fit, as a rank is, does not write into its parent's heartbeat."""
    heartbeat_in(tmp_path).begin(SAVE)
    child = Child(lambda: heartbeat_in(tmp_path).begin(TRAINING_BATCH))
    assert child.wait() == 0
    found = {each.process_id: each.section for each in read_heartbeats(tmp_path)}
    assert found == {os.getpid(): SAVE, child.process_id: TRAINING_BATCH}
    assert heartbeat_in(tmp_path) is heartbeat_in(str(tmp_path))


def test_a_rank_that_only_lost_another_one_is_not_the_cause(tmp_path: Path) -> None:
    """The failure that comes first is that of the first rank that has failed by itself."""
    cause = TrainingFailure(kind="ValueError", text="boom", function="fit", epoch=0, batch=1, rank=1, time=2.0)
    lost = TrainingFailure(kind="Lost", text="", function="fit", epoch=0, batch=1, time=1.0, is_lost=True)
    for failure in (lost, cause):
        write_failure(tmp_path, failure)
        (tmp_path / f"failure-{os.getpid()}.json").rename(tmp_path / f"failure-{failure.rank}.json")
    assert read_failures(tmp_path) == [cause, lost]

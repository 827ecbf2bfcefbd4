from __future__ import annotations

import os
from pathlib import Path

from lightning_faulttolerant.supervision.heartbeats import (
    SAVE,
    STOP,
    TRAINING_BATCH,
    Heartbeat,
    TrainingFailure,
    heartbeat_in,
    read_failures,
    read_heartbeats,
    write_failure,
)
from tests.processes import Child


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

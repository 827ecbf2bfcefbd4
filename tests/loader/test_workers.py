"""Data-loading workers: how they are set up, ended, and reached by signals, and the memory that they share."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import ResumableDataLoader
from lightning_faulttolerant.loader.ring import WorkerRing
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.processes import is_running
from lightning_faulttolerant.testing.processes import fork_and_run
from tests.loader.loops import follow, listed, seed
from tests.loader.made import Drawing
from tests.processes import wait_for


class Telling(Dataset[Any]):
    """Returns a number that depends on how the worker was set up."""

    setup = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return Telling.setup


def _set_up(number: int, worker_id: int) -> None:
    Telling.setup = 10 * number + worker_id


@pytest.mark.parametrize(("own", "default", "expected"), [(None, 1, 10), (2, 1, 20), (2, None, 20), (None, None, 0)])
def test_workers_are_set_up_as_the_user_says(own: int | None, default: int | None, expected: int) -> None:
    """The user's `worker_init_fn` runs; without one, the default one does, if any."""
    functions = [None if number is None else partial(_set_up, number) for number in (own, default)]
    loader = DataLoader(Telling(), batch_size=2, num_workers=2, worker_init_fn=functions[0])
    tracked = TrackedLoader(loader, default_worker_init=functions[1]).copy_of(loader)
    worker_1 = 0 if expected == 0 else 1
    assert [batch.tolist() for batch in tracked] == [[expected] * 2, [expected + worker_1] * 2]


def test_copy_that_is_gone_takes_its_workers_along() -> None:
    """Nothing keeps workers alive once the copy is dropped; the tracker then reports that it is gone."""
    loader = DataLoader(Drawing(4), num_workers=1, persistent_workers=True)
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    next(iter(tracked))
    assert len(multiprocessing.active_children()) == 1
    gc.disable()
    try:
        del tracked
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="no longer exists"):
        tracker.loader  # noqa: B018 - it raises


class Stuck(Dataset[Any]):
    """Reports that a sample is being read, and never returns."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.begun = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.begun[index % 2] = 1
        if self.how == "sleep":
            time.sleep(1000)
        while self.how == "busy loop":
            pass
        return sum(range(10**13))  # a loop in C that runs no Python handler


@pytest.mark.parametrize(("how", "timeout"), [("sleep", 600), ("busy loop", 600), ("loop in C", 0.5)])
def test_stuck_workers_are_ended(how: str, timeout: float) -> None:
    """They are gone although they never return; a handler of children's deaths hears nothing, and is put back."""
    dataset = Stuck(how)
    tracker, tracked = follow(DataLoader(dataset, num_workers=2))
    iterator = iter(tracked)
    wait_for(dataset.begun.all)
    heard: list[int] = []

    def handler(signum: int, frame: object) -> None:
        heard.append(signum)

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        tracker.close_workers(timeout_seconds=timeout)
        time.sleep(0.01)  # a late signal would arrive here
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert heard == [] or how == "loop in C"  # if the machine is so slow that they have not ended in time
    wait_for(lambda: not multiprocessing.active_children())
    del iterator


def test_workers_are_closed_twice_and_alone() -> None:
    """Closing is harmless without workers, before the first iteration, and a second time; other children stay."""
    TrackedLoader(DataLoader(Drawing(2))).close_workers()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    try:
        tracker, tracked = follow(DataLoader(Drawing(4), num_workers=1))
        tracker.close_workers()
        iterator = iter(tracked)
        next(iterator)
        tracker.close_workers()
        tracker.close_workers()
        assert multiprocessing.active_children() == [child]
        del iterator
    finally:
        child.kill()
        child.join()


def test_workers_continue_through_signals_until_told() -> None:
    """A signal to the whole process group doesn't end workers; once they are released, SIGTERM does."""
    tracker, tracked = follow(DataLoader(Drawing(40), batch_size=1, num_workers=2))
    seed(1)
    expected = [listed(batch) for batch in DataLoader(Drawing(40), batch_size=1, num_workers=2)]
    seed(1)
    iterator = iter(tracked)
    found = [listed(next(iterator)) for _ in range(2)]  # both are set up
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        for worker in workers:
            os.kill(worker.pid, signum)
        found += [listed(next(iterator)) for _ in range(4)]
    found += [listed(next(iterator)) for _ in range(20)]
    assert found == expected[: len(found)]
    assert all(worker.is_alive() for worker in workers)
    tracker.release_workers()
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    del iterator


UNFINISHED = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_faulttolerant.loader.tracked import TrackedLoader
loader = DataLoader(TensorDataset(torch.arange(40)), num_workers=2, persistent_workers=True)
tracker = TrackedLoader(loader)
tracked = tracker.copy_of(loader)
iterator = iter(tracked)
next(iterator), next(iterator)  # from then on, no worker is ended by a signal that Python sends to all daemons
if os.fork() == 0:
    sys.exit(0)
os.wait()
next(iterator)  # a child's end is not the run's
raise RuntimeError("of the user")
"""


def test_process_with_living_workers_can_end() -> None:
    """A user's exception that leaves an iterator behind ends the process, which does not wait for workers."""
    ended = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("RuntimeError: of the user")


@pytest.mark.parametrize("kind", [DataLoader, ResumableDataLoader])
@pytest.mark.parametrize("in_thread", [False, True])
def test_workers_end_if_their_parent_is_killed_while_they_start(
    tmp_path: Path, kind: type[DataLoader[int]], in_thread: bool
) -> None:
    """Torch looks for the parent only after the function that sets up a worker: its own loader is the control."""

    def init(worker: int) -> None:
        (tmp_path / f"worker-{os.getpid()}").touch()
        wait_for(is_dead.exists)

    def train() -> None:
        loader = kind(list(range(100)), num_workers=2, worker_init_fn=init)  # type: ignore[arg-type]
        if not in_thread:
            list(loader)
        thread = threading.Thread(target=list, args=(loader,))
        thread.start()
        thread.join()

    is_dead = tmp_path / "dead"
    process_id = fork_and_run(train, output=tmp_path / "output", seed=1)
    wait_for(lambda: len([*tmp_path.glob("worker-*")]) == 2)
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    if kind is DataLoader or in_thread:  # else the kernel ends them, whatever they do
        is_dead.touch()
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")]
    deadline = time.monotonic() + (1 if kind is DataLoader else 600)
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [process_id for process_id in workers if is_running(process_id)]
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    assert left == (workers if kind is DataLoader else [])


def test_workers_outlive_the_thread_that_created_them() -> None:
    """The kernel takes the end of that thread for the end of their parent."""
    found: list[object] = []
    iterators: list[Iterator[object]] = []

    def begin() -> None:
        iterators.append(iter(ResumableDataLoader(list(range(20)), num_workers=2, batch_size=None)))
        found.append(next(iterators[0]))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(0.2)
    found.extend(iterators[0])
    assert found == list(range(20))


# The memory that workers share with the main process.


@settings(max_examples=25, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    num_slots=st.integers(1, 6),
    num_batches=st.integers(0, 15),
    length=st.integers(0, 40).map(lambda half: 2 * half),
)
def test_last_states_of_each_worker_are_there(num_workers: int, num_slots: int, num_batches: int, length: int) -> None:
    """The last states of each worker, one per slot, are as it left them; older and too long ones are refused.

    Each worker has states of another length, and one that is too long touches no other.
    """
    ring = WorkerRing(num_workers=num_workers, num_slots=num_slots, slot_bytes=64)

    def state(worker: int, count: int) -> bytes:
        return bytes([worker, count]) * (length // (2 + worker))

    for count in range(num_batches + 1):
        for worker in range(num_workers):
            ring.put(worker, count, state(worker, count))
    for worker in range(num_workers):
        for count in range(num_batches + 1):
            if count <= num_batches - num_slots:
                with pytest.raises(LookupError, match=f"worker {worker} has no state after {count} batches"):
                    ring.get(worker, count)
            elif len(state(worker, count)) > 64:
                with pytest.raises(LookupError, match=f"worker {worker} has {length} bytes, but its slots have 88"):
                    ring.get(worker, count)
            else:
                assert ring.get(worker, count) == state(worker, count)


def test_state_that_is_on_its_way_is_waited_for() -> None:
    """A batch that was handed out, but is not fetched yet, is waited for."""
    ring = WorkerRing(num_workers=1, num_slots=2, slot_bytes=8)
    ring.register(0, os.getpid())
    ring.put(0, 0, b"first")
    threading.Timer(0.05, ring.put, (0, 1, b"second")).start()
    assert ring.get(0, 1) == b"second"


def test_what_workers_say_arrives() -> None:
    """Each message arrives once, whichever workers send it, as long as there is room; states stay whole."""
    ring = WorkerRing(num_workers=3, num_slots=1, slot_bytes=8)
    for worker in range(3):
        ring.put(worker, 0, b"state %d" % worker)
    assert ring.said() == []
    ring.say(1, ["one", "zwölf"])
    ring.say(2, ["one"])
    ring.say(2, ["one", "two"])
    assert ring.said() == ["one", "zwölf", "two"]
    ring.say(0, ["ö" * 4096])
    assert ring.said()[0] == "ö" * (len(ring.said()[0]))
    assert 1000 < len(ring.said()[0]) < 4096
    assert [ring.get(worker, 0) for worker in range(3)] == [b"state 0", b"state 1", b"state 2"]

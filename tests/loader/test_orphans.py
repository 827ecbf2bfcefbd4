"""Data-loading workers end with the process that created them, and not before."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from lightning_faulttolerant import ResumableDataLoader
from lightning_faulttolerant.processes import is_running
from lightning_faulttolerant.testing.processes import fork_and_run


@pytest.mark.parametrize("kind", [DataLoader, ResumableDataLoader])
@pytest.mark.parametrize("in_thread", [False, True])
def test_workers_end_if_their_parent_is_killed_while_they_start(
    tmp_path: Path, kind: type[DataLoader[int]], in_thread: bool
) -> None:
    """Torch looks for the parent only after the function that sets up a worker: its own loader is the control."""

    def init(worker: int) -> None:
        (tmp_path / f"worker-{os.getpid()}").touch()
        while not is_dead.exists():
            time.sleep(0.01)

    def train() -> None:
        loader = kind(list(range(100)), num_workers=2, worker_init_fn=init)  # type: ignore[arg-type]
        if not in_thread:
            list(loader)
        thread = threading.Thread(target=list, args=(loader,))
        thread.start()
        thread.join()

    is_dead = tmp_path / "dead"
    process_id = fork_and_run(train, output=tmp_path / "output", seed=1)
    while len(found := list(tmp_path.glob("worker-*"))) < 2:
        time.sleep(0.01)
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    is_dead.touch()
    workers = [int(path.name.partition("-")[2]) for path in found]
    deadline = time.monotonic() + (2 if kind is DataLoader else 60)
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
    time.sleep(0.5)
    found.extend(iterators[0])
    assert found == list(range(20))

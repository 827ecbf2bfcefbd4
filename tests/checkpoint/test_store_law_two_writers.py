"""Two processes in one directory, by mistake: neither destroys a save that the other has made or is making."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file
from tests.checkpoint.writers import FILE_WRITERS, FORK, SERIES, content, leftovers
from tests.faulty_files import FaultyFiles


@contextmanager
def _held_at(directory: Path, kind: str, main: Callable[[], object]) -> Iterator[FORK.Process]:
    """Run a function in another process, held at its first step of a kind until the block ends; it must succeed."""
    reached, go_on = FORK.Event(), FORK.Event()

    def hold(step, carry_out):
        reached.set()
        assert go_on.wait(60)
        return carry_out()

    def held() -> None:
        with FaultyFiles(directory, hold, kind=kind, at=1):
            main()

    process = FORK.Process(target=held)
    process.start()
    assert reached.wait(60)
    yield process
    if process.is_alive():
        go_on.set()
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.parametrize("kind", ["write", "fsync", "close", "rename"])
@pytest.mark.parametrize("writer", FILE_WRITERS, ids=lambda writer: writer.name)
def test_a_save_does_not_disturb_the_one_of_a_living_process(writer, kind, tmp_path):
    """A living process's temporary file must not be removed, and both saves must succeed."""
    writer.save(tmp_path, 1)
    with _held_at(tmp_path, kind, lambda: writer.save(tmp_path, 2)):
        held = leftovers(tmp_path)
        assert len(held) == 1
        for number in (3, 4):
            writer.save(tmp_path, number)
            assert writer.number(tmp_path) == number
        assert leftovers(tmp_path) == held
    assert writer.number(tmp_path) in (2, 4)
    assert leftovers(tmp_path) == []


def test_the_leftover_of_a_process_goes_once_it_is_dead(tmp_path):
    """The next save of a series must remove the temporary file of a process once it is dead."""
    SERIES.save(tmp_path, 1)
    with _held_at(tmp_path, "rename", lambda: SERIES.save(tmp_path, 2)) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert len(leftovers(tmp_path)) == 1
        SERIES.save(tmp_path, 3)
    assert leftovers(tmp_path) == []
    assert SERIES.number(tmp_path) == 3


def test_a_stopped_process_is_alive(tmp_path):
    """A process that was suspended, as by a debugger or a scheduler, must find its temporary file when it continues."""
    with _held_at(tmp_path, "rename", lambda: SERIES.save(tmp_path, 2)) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        SERIES.save(tmp_path, 3)
        assert len(leftovers(tmp_path)) == 1
        os.kill(process.pid, signal.SIGCONT)
    assert leftovers(tmp_path) == []


def test_a_reader_meets_no_half_file_while_another_process_saves(tmp_path):
    """A reader must find a whole autosave each time while saves continue, never an error."""
    SERIES.save(tmp_path, 1)

    def save_many() -> None:
        series = AutosaveSeries(tmp_path, keep_last=100)  # a reader without the lock may meet a file that is deleted
        for number in range(2, 60):
            series.save(content(number), epoch=0, batch=number, global_step=number)

    process = FORK.Process(target=save_many)
    process.start()
    seen = set()
    while process.is_alive():
        seen.add(SERIES.number(tmp_path))
    process.join()
    assert process.exitcode == 0
    assert SERIES.number(tmp_path) == 59
    assert len(seen) > 1


FROZEN = torch.ones(1000)


def _fill(directory: Path, first: int, barrier, incremental: bool) -> None:
    series = AutosaveSeries(directory, keep_last=100, incremental=incremental)
    barrier.wait()
    for number in range(first, first + 15):
        series.save({**content(number), "frozen": FROZEN}, epoch=0, batch=number, global_step=number)
        time.sleep(0.001)


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
def test_two_series_writers_lose_nothing(tmp_path, incremental):
    """Even without the lock, all autosaves that two processes save at the same time must exist and verify."""
    barrier = FORK.Barrier(2)
    processes = [FORK.Process(target=_fill, args=(tmp_path, first, barrier, incremental)) for first in (100, 200)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    found = {load_file(path)["number"] for path in AutosaveSeries(tmp_path).paths()}
    assert found == {*range(100, 115), *range(200, 215)}

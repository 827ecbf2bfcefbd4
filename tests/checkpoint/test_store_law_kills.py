"""The store law: after SIGKILL at any instant and at each step, the last committed checkpoint verifies and loads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.writers import (
    DIRECTORY,
    FILE_WRITERS,
    FORK,
    SHARDS,
    Writer,
    exit_code,
    leftovers,
    prepared,
    temporary_directory_elsewhere,
)
from tests.faulty_files import FaultyFiles
from tests.file_faults import kill_after, kill_before
from tests.harness import places

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield an empty directory on a disk: the others of the suite are in memory."""
    with tempfile.TemporaryDirectory(dir=places.on_disk()) as directory:
        yield Path(directory)


@pytest.fixture(params=["same", "other"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory for checkpoints; ``$TMPDIR`` is on the same file system or on another, and must stay empty."""
    root, elsewhere = tmp_path / "root", tmp_path / "tmpdir"
    root.mkdir()
    elsewhere.mkdir()
    if request.param == "other":
        if not MEMORY.is_dir() or os.stat(MEMORY).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is no second file system here")
        root = Path(tempfile.mkdtemp(dir=MEMORY))
    with temporary_directory_elsewhere(elsewhere):
        yield root / "run"
    assert list(elsewhere.iterdir()) == []
    shutil.rmtree(root)


def _kill_at_each_step(writer: Writer, directory: Path, fault, *, num_before: int) -> int:
    """Kill a process at step 1, 2, ... of a save until one finishes; return how many were killed."""
    fresh = prepared(writer, directory, num_saves=num_before)
    for at in range(1, 200):
        here = fresh()

        def main(here: Path = here, at: int = at) -> None:
            with FaultyFiles(directory, fault, at=at):
                writer.save(here, num_before + 1)

        code = exit_code(main)
        found = writer.number(here)
        if code == 0:
            assert found == num_before + 1
            return at - 1
        assert code == -signal.SIGKILL
        assert found in (num_before, num_before + 1)
        # The next process continues without an error, and cleans up.
        assert exit_code(lambda here=here: writer.save(here, num_before + 2)) == 0
        assert writer.number(here) == num_before + 2
        assert not writer.removes_leftovers or leftovers(here) == []
    raise AssertionError("a save does not end")


# The disk before a step is the same as after the previous one.
@pytest.mark.parametrize("fault", [pytest.param(kill_before, marks=pytest.mark.slow), kill_after])
@pytest.mark.parametrize("writer", FILE_WRITERS, ids=lambda writer: writer.name)
def test_killed_at_each_step_of_a_save(writer, fault, directory):
    """Before and after each step, the old save or the one in flight must exist, and the next one must succeed."""
    assert _kill_at_each_step(writer, directory, fault, num_before=3) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("directory", ["other"], indirect=True)
@pytest.mark.parametrize(("writer", "num_steps"), [(DIRECTORY, 40), (SHARDS, 25)], ids=["directory", "shards"])
def test_killed_at_each_step_of_a_directory(writer, num_steps, directory):
    """The same must hold for checkpoints of several files, which take many steps."""
    assert _kill_at_each_step(writer, directory, kill_before, num_before=2) >= num_steps


@pytest.mark.parametrize("writer", FILE_WRITERS, ids=lambda writer: writer.name)
def test_killed_at_each_step_of_the_first_save(writer, tmp_path):
    """A first save that is killed must leave nothing or itself, never a file that stops the next start."""
    assert _kill_at_each_step(writer, tmp_path, kill_before, num_before=0) >= 6


def _save_for_ever(writer: Writer, directory: Path, number: int, returned: int) -> None:
    while True:
        number += 1
        writer.save(directory, number)
        os.write(returned, b".")


def _kill_at_random(writer: Writer, directory: Path, *, num_kills: int) -> None:
    draw = random.SystemRandom()
    number, num_saves = 0, 0
    for kill in range(num_kills):
        reader, returned = os.pipe()
        process = FORK.Process(target=_save_for_ever, args=(writer, directory, number, returned))
        process.start()
        os.close(returned)
        with open(reader, "rb", buffering=0) as answers:
            num_returned = len(answers.read(1)) if kill % 2 else 0
            time.sleep(draw.uniform(0, writer.seconds))
            process.kill()
            process.join()
            num_returned += len(answers.readall())
        found = writer.number(directory)
        assert found in (number + num_returned, number + num_returned + 1)
        number, num_saves = found, num_saves + num_returned
    assert num_saves >= num_kills / 2, "hardly a kill came after a save: the test has seen nothing"
    writer.save(directory, number + 1)
    assert writer.number(directory) == number + 1
    assert not writer.removes_leftovers or leftovers(directory) == []


@pytest.mark.parametrize("writer", FILE_WRITERS, ids=lambda writer: writer.name)
def test_killed_at_random_instants(writer, directory):
    """At any instant, the save that returned last or the one in flight must exist."""
    _kill_at_random(writer, directory, num_kills=10)


@pytest.mark.parametrize("directory", ["other"], indirect=True)
def test_directory_killed_at_random_instants(directory):
    """At any instant, the directory that was completed last or the one in flight must exist."""
    _kill_at_random(DIRECTORY, directory, num_kills=20)


@pytest.mark.slow
@pytest.mark.parametrize("writer", [*FILE_WRITERS, DIRECTORY, SHARDS], ids=lambda writer: writer.name)
def test_killed_at_200_random_instants(writer, directory):
    """Each way to save must survive many kills, half of them on one file system and half across two."""
    _kill_at_random(writer, directory, num_kills=100)

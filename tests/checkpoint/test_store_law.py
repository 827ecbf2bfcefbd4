"""The store law: after a kill, a power loss, or an error at any step, the last committed checkpoint verifies and loads.

The fast tests take some of the steps, the slow ones all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError
from tests.checkpoint.writers import (
    DIRECTORY,
    FILE_WRITERS,
    FORK,
    INCREMENTAL,
    ONE_PATH,
    SERIES,
    SHARDS,
    WRITERS,
    content,
    exit_code,
    leftovers,
    prepared,
    temporary_directory_elsewhere,
)
from tests.faulty_files import FaultyFiles, PowerLoss
from tests.file_faults import fail_with, kill_after, kill_before, lose, write_short
from tests.harness import places

KEEPS = ["synced", "names", "removals"]
ERRORS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE, errno.EROFS]
MEMORY = Path("/dev/shm")
_SKIPPED = 77
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


def cases(*names, fast, slow):
    """Mark the rows of a test that are slow, except for those that are fast as well."""
    rows = [*fast, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow if row not in fast)]
    return pytest.mark.parametrize(names, rows, ids=lambda value: str(getattr(value, "name", value)))


@pytest.fixture
def disk():
    """An empty directory on a disk: the others of the suite are in memory."""
    with tempfile.TemporaryDirectory(dir=places.on_disk()) as directory:
        yield Path(directory)


@pytest.fixture(params=[pytest.param("same", marks=pytest.mark.slow), "other"])
def directory(request, disk):
    """A directory for checkpoints; ``$TMPDIR`` is on the same file system or on another, and must stay empty."""
    root, elsewhere = disk / "root", disk / "tmpdir"
    root.mkdir()
    elsewhere.mkdir()
    if request.param == "other":
        if not MEMORY.is_dir() or os.stat(MEMORY).st_dev == os.stat(disk).st_dev:
            pytest.skip("there is no second file system here")
        root = Path(tempfile.mkdtemp(dir=MEMORY))
    with temporary_directory_elsewhere(elsewhere):
        yield root / "run"
    assert list(elsewhere.iterdir()) == []
    shutil.rmtree(root)


def check_next_save(writer, directory, number):
    """Save once more, as the next process would: it succeeds, loads, and cleans up."""
    writer.save(directory, number)
    assert writer.number(directory) == number
    assert not writer.removes_leftovers or leftovers(directory) == []


@cases(
    *("writer", "num_before", "every", "fault"),
    fast=[(writer, before, 9, kill_after) for writer in WRITERS for before in (0, 3)],
    slow=[(writer, before, 1, fault) for writer in WRITERS for before in (0, 3) for fault in (kill_before, kill_after)],
)
def test_killed_at_a_step_of_a_save(writer, num_before, every, fault, directory):
    """The old save or the one in flight exists, and a first save leaves nothing or itself; the next one succeeds."""
    fresh = prepared(writer, directory, num_saves=num_before)
    for at in range(every // 2 + 1, 300, every):
        here = fresh()

        def main(here=here, at=at):
            with FaultyFiles(directory, fault, at=at):
                writer.save(here, num_before + 1)

        code = exit_code(main)
        found = writer.number(here)
        if code == 0:
            assert found == num_before + 1
            break
        assert code == -signal.SIGKILL
        assert found in (num_before, num_before + 1)
        check_next_save(writer, here, num_before + 2)
    assert 6 < at < 299


@cases("writer", "num_kills", fast=[(SERIES, 5), (DIRECTORY, 4)], slow=[(writer, 100) for writer in WRITERS])
def test_killed_at_random_instants(writer, num_kills, directory):
    """At any instant, the save that returned last or the one in flight exists."""
    draw = random.SystemRandom()
    number = num_saves = 0

    def save_for_ever(number, returned):
        while True:
            number += 1
            writer.save(directory, number)
            os.write(returned, b".")

    for kill in range(num_kills):
        reader, returned = os.pipe()
        process = FORK.Process(target=save_for_ever, args=(number, returned))
        process.start()
        os.close(returned)
        with open(reader, "rb", buffering=0) as answers:
            num_returned = len(answers.read(1)) if kill % 2 == 0 else 0
            time.sleep(draw.uniform(0, writer.seconds))
            process.kill()
            process.join()
            num_returned += len(answers.readall())
        found = writer.number(directory)
        assert found in (number + num_returned, number + num_returned + 1)
        number, num_saves = found, num_saves + num_returned
    assert num_saves >= num_kills / 2, "hardly a kill came after a save: the test has seen nothing"
    check_next_save(writer, directory, number + 1)


def power_losses(directory, keeps, action, every=1):
    """Lose the power at steps of an action, then after it; yield each time whether the action was done."""
    original = directory.with_name("original")
    shutil.copytree(directory, original, symlinks=True)
    for at in range(1, 300, every):
        shutil.rmtree(directory)
        shutil.copytree(original, directory, symlinks=True)
        with PowerLoss(directory, at=at, keeps=keeps) as loss:
            action()
        yield not loss.has_lost
        if not loss.has_lost:
            return
    raise AssertionError("the action does not end")


@cases(
    *("writer", "num_before", "keeps", "every"),
    fast=[
        *((SERIES, before, keeps, 1) for before in (0, 3) for keeps in KEEPS),
        *((ONE_PATH, 1, keeps, 1) for keeps in KEEPS),
        *((writer, 3, keeps, 9) for writer in (DIRECTORY, SHARDS) for keeps in KEEPS[:2]),
        *((INCREMENTAL, before, "removals", 3) for before in (0, 3)),
    ],
    slow=[(writer, before, keeps, 1) for writer in WRITERS for before in (0, 1, 3) for keeps in KEEPS],
)
def test_power_lost_at_a_step_of_a_save(writer, num_before, keeps, every, tmp_path):
    """A finished save survives; until then, the old save or the one in flight; the next save succeeds."""
    root = tmp_path / "root"
    directory = root / "run" / "fit-0"
    root.mkdir()
    for number in range(1, num_before + 1):
        writer.save(directory, number)
    num_steps = 0
    for is_done in power_losses(root, keeps, lambda: writer.save(directory, num_before + 1), every):
        found = writer.number(directory)
        assert found == num_before + 1 if is_done else found in (num_before, num_before + 1)
        writer.save(directory, num_before + 2)
        assert writer.number(directory) == num_before + 2
        num_steps += every
    assert num_steps > 6


@pytest.mark.parametrize("keeps", KEEPS)
def test_save_after_save_survives_power_losses(keeps, tmp_path):
    """A run that continues after each power loss never falls behind a save that was reported as done."""
    root = tmp_path / "root"
    root.mkdir()
    number = 0
    for at in range(2, 30, 3):
        with PowerLoss(root, at=at, keeps=keeps) as loss:
            SERIES.save(root / "run", number + 1)
            SERIES.save(root / "run", number + 2)
        found = SERIES.number(root / "run")
        assert found in ((number, number + 1, number + 2) if loss.has_lost else (number + 2,))
        number = found
    assert number > 5


@pytest.fixture
def damaged(tmp_path):
    """A series of three sound autosaves and two damaged ones after them; one of the two was already set aside."""
    series = AutosaveSeries(tmp_path / "root" / "run", keep_last=9)
    for number in range(1, 6):
        path = Path(series.save({"number": number}, epoch=0, batch=number, global_step=number))
        if number > 3:
            path.write_bytes(path.read_bytes()[:-1])
        if number == 4:
            path.rename(f"{path}.damaged")
    return series


def is_sound(path):
    """Return whether a file verifies."""
    try:
        verify_file(path)
    except DamagedCheckpointError:
        return False
    return True


def kills(directory, action):
    """Kill a process at each step of an action; yield each time whether the action was done."""
    original = directory.with_name("original")
    shutil.copytree(directory, original, symlinks=True)
    for at in range(1, 100):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(original, directory, symlinks=True)

        def main(at=at):
            with FaultyFiles(directory, kill_before, at=at):
                action()

        code = exit_code(main)
        yield code == 0
        if code == 0:
            return
    raise AssertionError("the action does not end")


@pytest.mark.parametrize("how", [*KEEPS, pytest.param("kill", marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", ["newest", "set_aside", "remove_all"])
def test_interrupted_at_each_step_of_searching_setting_aside_or_removing(damaged, action, how):
    """No file is lost before its time, and the newest sound one or none is found, never only damaged ones: an error."""
    root, run = Path(damaged.directory).parent, Path(damaged.directory)
    if action != "newest":
        damaged.newest()
    newest = "autosave-00000003-epoch=0-batch=3.ckpt"
    arguments = ["label"] if action == "set_aside" else []

    def act():
        getattr(damaged, action)(*arguments)

    for is_done in kills(root, act) if how == "kill" else power_losses(root, how, act):
        if action != "remove_all":
            assert {path.name[:17] for path in run.rglob("autosave-*")} == {f"autosave-{n:08d}" for n in range(1, 6)}
        found = damaged.newest()
        assert found in (damaged.store.path(newest), None)
        if action == "newest":
            assert found is not None
        elif is_done:
            assert found is None or (action == "remove_all" and how == "synced")
        if action == "set_aside":
            damaged.set_aside("again")
            assert any(is_sound(path) for path in run.rglob(newest))
        elif action == "remove_all":
            damaged.remove_all()
        assert action == "newest" or damaged.newest() is None


@cases(
    *("writer", "number", "every"),
    fast=[
        *((SERIES, number, 1) for number in ERRORS[:2]),
        *((ONE_PATH, number, 1) for number in ERRORS[2:]),
        *((writer, errno.ENOSPC, 7) for writer in (*WRITERS[2:], WRITERS[0])),
    ],
    slow=[(writer, number, 1) for writer in WRITERS for number in ERRORS],
)
def test_an_error_at_a_step_is_raised_and_keeps_the_old_file(writer, number, every, tmp_path):
    """The error keeps its number and path, the old save stays, nothing is left, and the next save works."""
    fresh = prepared(writer, tmp_path, num_saves=3)
    for at in range(every // 2 + 1, 300, every):
        here = fresh()
        raised = None
        with FaultyFiles(tmp_path, fail_with(number), at=at) as files:
            try:
                writer.save(here, 4)
            except OSError as error:
                raised = error
        if raised is None:
            assert len(files.steps) < at, f"the error at {files.steps[at - 1]} was swallowed"
            break
        assert (raised.errno, raised.strerror) == (number, os.strerror(number))
        assert str(here) in str(raised.filename)
        # The new file may be found only if it was published already.
        is_published = any(step.kind == "rename" for step in files.steps[: at - 1])
        assert writer.number(here) in ((3, 4) if is_published else (3,))
        assert not writer.cleans_up or leftovers(here) == []
        check_next_save(writer, here, 5)
    assert 6 < at < 299


def _first_of_two(step, carry_out):
    raise OSError({"fsync": errno.EIO, "unlink": errno.EROFS}[step.kind], os.strerror(errno.EIO))


FAULTS = {
    "disk full from the first write": (fail_with(errno.ENOSPC), "write", 1, errno.ENOSPC),
    "disk full from the second write": (fail_with(errno.ENOSPC), "write", 2, errno.ENOSPC),
    "lost rename": (lose, "rename", None, errno.EIO),
    "bad disk that can't delete either": (_first_of_two, ("fsync", "unlink"), None, errno.EIO),
}


@pytest.mark.parametrize(("fault", "kind", "at", "number"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)
def test_a_lasting_fault_is_raised_as_the_first_error(writer, fault, kind, at, number, tmp_path):
    """A full disk and a rename that is only reported as done are errors, which the cleanup does not hide."""
    writer.save(tmp_path / "run", 1)
    with FaultyFiles(tmp_path, fault, kind=kind, at=at, lasting=True), pytest.raises(OSError, match=r".+") as caught:
        writer.save(tmp_path / "run", 2)
    assert caught.value.errno == number
    assert writer.number(tmp_path / "run") == 1
    assert not writer.cleans_up or fault is _first_of_two or leftovers(tmp_path) == []


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)
def test_short_writes_lose_nothing(writer, tmp_path):
    """A system that accepts only half of each write gets the rest."""
    with FaultyFiles(tmp_path, write_short, kind="write") as files:
        writer.save(tmp_path / "run", 1)
    assert sum(step.num_bytes for step in files.steps) > content(1)["weights"].nbytes * 1.5
    assert writer.number(tmp_path / "run") == 1


def _in_a_small_tmpfs(directory, main):
    """Run a function in a forked process whose directory is a file system of 2 MiB."""

    def mount_and_run():
        system = ctypes.CDLL(None, use_errno=True)
        flags = _CLONE_NEWNS if os.geteuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
        if system.unshare(flags) or system.mount(b"none", b"/", None, 0x44000, None):  # MS_REC | MS_PRIVATE
            os._exit(_SKIPPED)
        if system.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, b"size=2m"):
            os._exit(_SKIPPED)
        main()

    return exit_code(mount_and_run)


@cases("writer", fast=[(SERIES,)], slow=[(writer,) for writer in WRITERS])
def test_a_small_file_system_runs_full(writer, tmp_path):
    """On a disk that is really full, the save raises ENOSPC and keeps all files; with room again, it works."""
    directory = tmp_path / "mounted"
    directory.mkdir()

    def main():
        writer.save(directory / "run", 1)
        filler = directory / "filler"
        free = os.statvfs(directory)
        filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 100_000))
        with pytest.raises(OSError, match="No space left on device"):
            writer.save(directory / "run", 2)
        assert writer.number(directory / "run") == 1
        assert not writer.cleans_up or leftovers(directory) == []
        filler.unlink()
        check_next_save(writer, directory / "run", 2)

    code = _in_a_small_tmpfs(directory, main)
    if code == _SKIPPED:
        pytest.skip("no tmpfs may be mounted here; a full disk is injected above")
    assert code == 0
    assert list(directory.iterdir()) == [], "it was not mounted"


@cases("writer", fast=[(SERIES,)], slow=[(writer,) for writer in WRITERS])
def test_a_directory_that_may_not_be_written(writer):
    """A missing permission is raised as such, and the old file stays; root runs this as another user."""
    directory = Path(tempfile.mkdtemp())
    try:
        writer.save(directory / "run", 1)
        directory.chmod(0o755)
        (directory / "run").chmod(0o555)

        def main():
            if os.geteuid() == 0:
                os.setuid(65534)
            with pytest.raises(PermissionError):
                writer.save(directory / "run", 2)

        assert exit_code(main) == 0
        assert writer.number(directory / "run") == 1
        assert not writer.cleans_up or leftovers(directory) == []
    finally:
        (directory / "run").chmod(0o755)
        shutil.rmtree(directory)


# Two processes in one directory, by mistake.


@cases(
    *("writer", "kind", "fate"),
    fast=[
        *((SERIES, "rename", fate) for fate in ("waits", "killed", "stopped")),
        *(
            (writer, kind, "waits")
            for writer, kind in zip(FILE_WRITERS[:4], ("write", "fsync", "close", "rename"), strict=True)
        ),
    ],
    slow=[(writer, kind, "waits") for writer in FILE_WRITERS for kind in ("write", "fsync", "close", "rename")],
)
def test_a_save_does_not_disturb_the_one_of_a_living_process(writer, kind, fate, tmp_path):
    """The temporary file of a process that lives, or is only stopped, stays, and both saves succeed."""
    writer.save(tmp_path, 1)
    reached, go_on = FORK.Event(), FORK.Event()

    def hold(step, carry_out):
        reached.set()
        go_on.wait()
        return carry_out()

    def held():
        with FaultyFiles(tmp_path, hold, kind=kind, at=1):
            writer.save(tmp_path, 2)

    process = FORK.Process(target=held)
    process.start()
    reached.wait()
    left = leftovers(tmp_path)
    assert len(left) == 1
    if fate != "waits":
        os.kill(process.pid, signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    if fate == "killed":
        process.join()
    for number in (3, 4):
        writer.save(tmp_path, number)
        assert writer.number(tmp_path) == number
        assert leftovers(tmp_path) == ([] if fate == "killed" else left)
    if fate != "killed":
        os.kill(process.pid, signal.SIGCONT)
        go_on.set()
        process.join()
        assert process.exitcode == 0
    assert writer.number(tmp_path) in (2, 4)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("incremental", [False, True])
def test_two_writers_lose_nothing_and_a_reader_meets_no_half_file(tmp_path, incremental):
    """All autosaves that two processes save at the same time exist and verify; a reader finds a whole one each time."""
    SERIES.save(tmp_path, 1)

    def fill(first):
        series = AutosaveSeries(tmp_path, keep_last=100, incremental=incremental)  # deletes none below the reader
        for number in range(first, first + 15):
            series.save(content(number), epoch=0, batch=number, global_step=number)

    processes = [FORK.Process(target=fill, args=(first,)) for first in (100, 200)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert SERIES.number(tmp_path) > 0
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    found = {SERIES.load(path)["number"] for path in AutosaveSeries(tmp_path).paths()}
    assert found == {1, *range(100, 115), *range(200, 215)}


def test_a_reader_beside_a_writer_of_directories_finds_a_whole_one_each_time(tmp_path):
    """While another process saves and deletes without a pause, a reader finds a checkpoint and damages nothing."""
    DIRECTORY.save(tmp_path, 1)
    process = FORK.Process(target=lambda: [DIRECTORY.save(tmp_path, number) for number in range(2, 22)])
    process.start()
    num_looks = last = 0
    while process.is_alive() or not num_looks:
        latest = DIRECTORY.newest(tmp_path)
        assert latest is not None
        try:
            number = int(Path(latest, "number.txt").read_text())
        except FileNotFoundError:  # deleted since
            continue
        assert number >= last
        last, num_looks = number, num_looks + 1
    process.join()
    assert process.exitcode == 0
    assert not any("damaged" in name for name in os.listdir(tmp_path))
    assert DIRECTORY.number(tmp_path) == 21

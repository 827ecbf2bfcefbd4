"""The store law: after a kill, a power loss, or an error at any step, the last committed checkpoint verifies and loads.

Any change that a disk makes to an autosave is detected, or it loads as it was saved.
The fast tests take some of the steps, the slow ones all.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.processes import is_running
from tests.checkpoint.writers import (
    DIRECTORY,
    FILE_WRITERS,
    INCREMENTAL,
    ONE_PATH,
    SERIES,
    SHARDS,
    WRITERS,
    newest_of,
    save_file,
)
from tests.faulty_files import FaultyFiles, PowerLoss, fail_with, kill_after, kill_before, lose, write_short
from tests.processes import Child, in_child

KILLS = {"kill before": kill_before, "kill after": kill_after}
LOSSES = ["synced", "names", "removals"]
ERRORS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE, errno.EROFS]


def cases(*names, fast, slow):
    """Mark the rows of a test that are slow, except for those that are fast as well."""
    rows = [*fast, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow if row not in fast)]
    return pytest.mark.parametrize(names, rows, ids=lambda value: str(getattr(value, "name", value)))


def attempts(root, every=1):
    """Yield the numbers of steps, each time with the directory as it was before the first."""
    original = root.with_name("original")
    root.mkdir(exist_ok=True)
    shutil.copytree(root, original, symlinks=True)
    for at in range(every // 2 + 1, 300, every):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root, symlinks=True)
        yield at
    raise AssertionError("the action does not end")


def is_done(action, how, root, at):
    """Do an action that a kill or a power loss interrupts at a step; return whether it had ended before."""
    if how in LOSSES:
        with PowerLoss(root, at=at, keeps=how) as loss:
            action()
        return not loss.has_lost

    def main():
        with FaultyFiles(root, KILLS[how], at=at):
            action()

    code = in_child(main)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def leftovers(directory):
    """Return the names of temporary files."""
    return sorted(path.name for path in directory.rglob("*") if ".tmp" in path.name)


def check_next_save(writer, directory, number, *, cleans_up=True):
    """Save once more, as the next process would: it succeeds, loads, and cleans up after the dead."""
    writer.save(directory, number)
    assert writer.number(directory) == number
    assert not cleans_up or not writer.removes_leftovers or leftovers(directory) == []


@cases(
    *("writer", "num_before", "how", "every"),
    fast=[
        *((writer, before, "kill after", 9) for writer in WRITERS for before in (0, 3)),
        *((SERIES, before, how, 1) for before in (0, 3) for how in LOSSES),
        *((ONE_PATH, 1, how, 1) for how in LOSSES),
        *((writer, 3, how, 9) for writer in (DIRECTORY, SHARDS) for how in LOSSES[:2]),
        *((INCREMENTAL, before, "removals", 3) for before in (0, 3)),
    ],
    slow=[(writer, before, how, 1) for writer in WRITERS for before in (0, 1, 3) for how in (*KILLS, *LOSSES)],
)
def test_interrupted_at_a_step_of_a_save(writer, num_before, how, every, tmp_path):
    """The old save or the one in flight exists, a finished one in any case, and the next one succeeds."""
    root = tmp_path / "root"
    run = root / "run" / "fit-0"
    for number in range(1, num_before + 1):
        writer.save(run, number)
    for at in attempts(root, every):
        ended = is_done(lambda: writer.save(run, num_before + 1), how, root, at)
        assert writer.number(run) in ((num_before + 1,) if ended else (num_before, num_before + 1))
        if ended:
            break
        check_next_save(writer, run, num_before + 2, cleans_up=how in KILLS)
    assert at > 6


def is_sound(path):
    """Return whether a file verifies."""
    try:
        verify_file(path)
    except DamagedCheckpointError:
        return False
    return True


@pytest.mark.parametrize("how", [*LOSSES, pytest.param("kill before", marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", ["load_newest", "set_aside", "remove_all"])
def test_interrupted_at_a_step_of_searching_setting_aside_or_removing(action, how, tmp_path):
    """No file is lost before its time, and the newest sound one or none is found, never only damaged ones: an error."""
    root, run = tmp_path / "root", tmp_path / "root" / "run"
    damaged = AutosaveSeries(run, keep_last=9)
    for number in range(1, 6):  # three sound ones, and two damaged ones, the first of which was set aside
        path = Path(damaged.save({"number": number}, epoch=0, batch=number, global_step=number))
        if number > 3:
            path.write_bytes(path.read_bytes()[:-1])
        if number == 4:
            path.rename(f"{path}.damaged")
    if action != "load_newest":
        newest_of(damaged)
    name = "autosave-00000003-epoch=0-batch=3.ckpt"
    arguments = ["label"] if action == "set_aside" else []
    for at in attempts(root):
        ended = is_done(lambda: getattr(damaged, action)(*arguments), how, root, at)
        if action != "remove_all":
            assert {path.name[:17] for path in run.rglob("autosave-*")} == {f"autosave-{n:08d}" for n in range(1, 6)}
        found = newest_of(damaged)
        assert found in (damaged.store.path(name), None)
        if action == "load_newest":
            assert found is not None
        elif ended:
            assert found is None or (action == "remove_all" and how == "synced")
        if action == "set_aside":
            damaged.set_aside("again")
            assert any(is_sound(path) for path in run.rglob(name))
        elif action == "remove_all":
            damaged.remove_all()
        assert action == "load_newest" or newest_of(damaged) is None
        if ended:
            break


@cases(
    *("writer", "number", "every"),
    fast=[
        *((SERIES, number, 1) for number in ERRORS[:2]),
        *((ONE_PATH, number, 1) for number in ERRORS[2:]),
        *((writer, errno.ENOSPC, 7) for writer in (INCREMENTAL, DIRECTORY, SHARDS)),
    ],
    slow=[(writer, number, 1) for writer in WRITERS for number in ERRORS],
)
def test_an_error_at_a_step_is_raised_and_keeps_the_old_file(writer, number, every, tmp_path):
    """The error keeps its number and path, the old save stays, nothing is left, and the next save works."""
    root, raised = tmp_path / "root", None
    for saved in (1, 2, 3):
        writer.save(root / "run", saved)
    for at in attempts(root, every):
        raised = None
        with FaultyFiles(root, fail_with(number), at=at) as files:
            try:
                writer.save(root / "run", 4)
            except OSError as error:
                raised = error
        if raised is None:
            assert len(files.steps) < at, f"the error at {files.steps[at - 1]} was swallowed"
            break
        assert (raised.errno, raised.strerror) == (number, os.strerror(number))
        assert str(root / "run") in str(raised.filename)
        # The new file may be found only if it was published already.
        is_published = any(step.kind == "rename" for step in files.steps[: at - 1])
        assert writer.number(root / "run") in ((3, 4) if is_published else (3,))
        assert not writer.cleans_up or leftovers(root) == []
        check_next_save(writer, root / "run", 5)
    assert at > 6


def _first_of_two(step, carry_out):
    raise OSError({"fsync": errno.EIO, "unlink": errno.EROFS}[step.kind], os.strerror(errno.EIO))


FAULTS = {
    "disk full from the first write": (fail_with(errno.ENOSPC), "write", 1, errno.ENOSPC),
    "disk full from the second write": (fail_with(errno.ENOSPC), "write", 2, errno.ENOSPC),
    "lost rename": (lose, "rename", None, errno.EIO),
    "bad disk that can't delete either": (_first_of_two, ("fsync", "unlink"), None, errno.EIO),
    "a system that accepts only half of each write": (write_short, "write", None, None),
}


@pytest.mark.parametrize(("fault", "kind", "at", "number"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)
def test_a_lasting_fault_is_raised_as_the_first_error(writer, fault, kind, at, number, tmp_path):
    """A full disk and a rename that is only reported as done are errors, which the cleanup does not hide."""
    writer.save(tmp_path / "run", 1)
    with FaultyFiles(tmp_path, fault, kind=kind, at=at, lasting=True):
        if number is None:
            writer.save(tmp_path / "run", 2)
        else:
            with pytest.raises(OSError, match=r".+") as caught:
                writer.save(tmp_path / "run", 2)
            assert caught.value.errno == number
    assert writer.number(tmp_path / "run") == (1 if number else 2)
    assert not writer.cleans_up or fault is _first_of_two or leftovers(tmp_path) == []


# Two processes in one directory, by mistake.


@cases(
    *("writer", "kind"),
    fast=[(SERIES, "rename"), *zip(FILE_WRITERS, ("write", "fsync", "close"), strict=True)],
    slow=[(writer, kind) for writer in FILE_WRITERS for kind in ("write", "fsync", "close", "rename")],
)
def test_a_save_does_not_disturb_the_one_of_a_living_process(writer, kind, tmp_path):
    """The temporary file of a process that is stopped stays, and both saves succeed."""
    writer.save(tmp_path, 1)

    def stop(step, carry_out):
        os.kill(os.getpid(), signal.SIGSTOP)
        return carry_out()

    def stopped():
        with FaultyFiles(tmp_path, stop, kind=kind, at=1):
            writer.save(tmp_path, 2)

    with Child(stopped) as process:
        os.waitid(os.P_PID, process.process_id, os.WSTOPPED | os.WNOWAIT)
        left = leftovers(tmp_path)
        assert len(left) == 1
        for number in (3, 4):
            writer.save(tmp_path, number)
            assert (writer.number(tmp_path), leftovers(tmp_path)) == (number, left)
        os.kill(process.process_id, signal.SIGCONT)
        assert process.wait() == 0
    assert writer.number(tmp_path) in (2, 4)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("incremental", [False, True])
def test_two_writers_lose_nothing_and_a_reader_meets_no_half_file(tmp_path, incremental):
    """All autosaves that two processes save at the same time exist and verify; a reader finds a whole one each time."""
    SERIES.save(tmp_path, 1)

    def fill(first):
        series = AutosaveSeries(tmp_path, keep_last=100, incremental=incremental)  # deletes none below the reader
        for number in range(first, first + 15):
            save_file(series, number)

    processes = [Child(functools.partial(fill, first)) for first in (100, 200)]
    while any(is_running(process.process_id) for process in processes):
        assert SERIES.number(tmp_path) > 0
    assert [process.wait() for process in processes] == [0, 0]
    found = {SERIES.load(path)["number"] for path in AutosaveSeries(tmp_path).paths()}
    assert found == {1, *range(100, 115), *range(200, 215)}


def test_a_reader_beside_a_writer_of_directories_finds_a_whole_one_each_time(tmp_path):
    """While another process saves and deletes without a pause, a reader finds a checkpoint and damages nothing."""
    DIRECTORY.save(tmp_path, 1)
    process = Child(lambda: [DIRECTORY.save(tmp_path, number) for number in range(2, 22)])
    numbers = []
    while is_running(process.process_id) or not numbers:
        latest = DIRECTORY.newest(tmp_path)
        assert latest is not None
        try:
            numbers.append(int(Path(latest, "number.txt").read_text()))
        except FileNotFoundError:  # deleted since
            continue
    assert numbers == sorted(numbers)
    assert process.wait() == 0
    assert not any("damaged" in name for name in os.listdir(tmp_path))
    assert DIRECTORY.number(tmp_path) == 21


# The law for bytes

WEIGHTS = {"weight": torch.linspace(0, 1, 7), "bias": torch.tensor([True, False])}
CONTENT: dict[str, Any] = {
    "state_dict": WEIGHTS,
    "epoch": 3,
    "callbacks": {"Mine": {"losses": [0.5, None], "name": "x"}},
}
CHANGED = {**CONTENT, "epoch": 4, "state_dict": {**WEIGHTS, "weight": torch.linspace(1, 2, 7)}}
Changes = Iterator[bytes]


def flipped(data: bytes, other: bytes) -> Changes:
    """Flip each single bit."""
    for at in range(len(data)):
        yield from (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8))


def moved(data: bytes, other: bytes) -> Changes:
    """Drop or double each byte, or put bytes before or after the file: all bytes after a place move."""
    for at in range(len(data)):
        yield data[:at] + data[at + 1 :]
        yield data[: at + 1] + data[at:]
    for tail in (b"\0", b"x" * 22, bytes(4096), b"PK\x05\x06" + bytes(18), data):
        yield data + tail
        yield tail + data


def cut(data: bytes, other: bytes) -> Changes:
    """End the file anywhere; its length may have been restored with zeros or ones."""
    for size in range(len(data)):
        yield data[:size]
        yield from (data[:size] + fill * (len(data) - size) for fill in (b"\0", b"\xff"))


def swapped(data: bytes, other: bytes) -> Changes:
    """Put each two blocks in each other's place."""
    for second in range(64, len(data) - 64, 64):
        for first in range(0, second, 64):
            one, two = data[first : first + 64], data[second : second + 64]
            yield data[:first] + two + data[first + 64 : second] + one + data[second + 64 :]


def torn(data: bytes, other: bytes) -> Changes:
    """Begin as one save and end as another, as a torn overwrite would, at each place."""
    assert len(other) == len(data)
    yield from (other[:at] + data[at:] for at in range(1, len(data)) if other[at:] != data[at:])


EVERY = {flipped: 41, moved: 13, cut: 17, swapped: 3, torn: 7}
ALL = [pytest.param(damage, 1, marks=pytest.mark.slow) for damage, every in EVERY.items() if every > 1]


@pytest.mark.parametrize("read", [verify_file, load_file], ids=["verified", "loaded"])
@pytest.mark.parametrize(("damage", "every"), [*EVERY.items(), *ALL])
def test_each_change_is_detected_or_harmless(
    tmp_path: Path, read: Callable[[Path], Any], damage: Callable[[bytes, bytes], Changes], every: int
) -> None:
    """Verifying and loading refuse the same changes: all but those after which the content is as it was saved."""
    path = tmp_path / "a.ckpt"
    sound, other = (
        Path(AutosaveSeries(tmp_path / name).save(content, epoch=0, batch=1, global_step=1)).read_bytes()
        for name, content in (("series", CONTENT), ("other", CHANGED))
    )
    num_refused = num_changes = 0
    for number, data in enumerate(damage(sound, other)):
        if number % every or data == sound:
            continue
        path.write_bytes(data)
        num_changes += 1
        try:
            loaded = read(path)
        except DamagedCheckpointError:
            num_refused += 1
            continue
        assert damage is not moved
        loaded = torch.load(path, weights_only=True) if read is verify_file else loaded
        state = {name: (value.dtype, value.tolist()) for name, value in loaded.pop("state_dict").items()}
        assert state == {name: (value.dtype, value.tolist()) for name, value in WEIGHTS.items()}
        assert loaded == {name: value for name, value in CONTENT.items() if name != "state_dict"}
    assert num_refused > num_changes / 2

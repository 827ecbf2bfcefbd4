"""The faults of the trials: one line of `KINDS` each. Another line adds another kind to all trials."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FIT_MOMENTS = ("setup", "training", "saving", "validation", "teardown")
WITH_WORKERS = ("training", "saving", "validation")
"""The moments at which the loaders have workers, or soon will."""
_MIB = 1 << 20
_held: list[int] = []
"""Descriptors that a fault keeps until its process ends."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        cause: Causes it, in a training process, with the directory of the script and the seed of the trial. Returns
            ``False`` if it is not possible yet.
        ends: How the command may end, in addition to 0. The same command then has to finish the run.
        moments: When it may come.
        num_ranks: On how many ranks.
        num_workers: The number of loader workers, if the kind needs some.
        mounts: What has to be a small, separate file system: the shared memory, or the autosaves.
    """

    cause: Callable[[Path, int], object]
    ends: tuple[int, ...] = ()
    moments: tuple[str, ...] = FIT_MOMENTS
    num_ranks: tuple[int, ...] = (1, 2)
    num_workers: int | None = None
    mounts: str = ""


def _raise(*_: object) -> None:
    raise ValueError("an exception")


def _wait_for_thread_that_raises(*_: object) -> None:
    answered = threading.Event()
    threading.Thread(target=lambda: (_raise(), answered.set()), daemon=True).start()
    answered.wait()


def _send(signum: int, process_id: Callable[[], int] = os.getpid) -> Callable[[Path, int], None]:
    return lambda *_: os.kill(process_id(), signum)


def _use_up_memory(*_: object) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 64 * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    while True:
        taken.append(bytearray(_MIB))


def _hold_the_interpreter(*_: object) -> None:
    while True:  # a signal interrupts the sleep
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL


def _kill_worker(_: Path, seed: int) -> bool:
    workers = multiprocessing.active_children()
    if workers:
        os.kill(random.Random(seed).choice(workers).pid or 0, signal.SIGKILL)
    return bool(workers)


def _read_from_nobody(directory: Path, _: int) -> None:
    os.mkfifo(directory / "fifo")
    os.open(directory / "fifo", os.O_RDONLY)  # blocks in C until another process writes


def _fill(directory: Path) -> None:
    """Fill a small file system until this process ends."""
    path = directory / f"filling-{os.getpid()}"
    _held.append(os.open(path, os.O_WRONLY | os.O_CREAT))
    os.unlink(path)
    for size in (_MIB // 4, 4096):
        with suppress(OSError):
            while True:
                os.write(_held[-1], bytes(size))
    room = os.statvfs(directory)
    assert room.f_bavail * room.f_frsize < _MIB, "the file system is not full"


def _fill_autosaves(directory: Path, seed: int) -> None:
    _fill(directory / "autosaves")
    if seed % 2:  # somebody makes room after a while
        threading.Timer(0.5, os.ftruncate, (_held[-1], 0)).start()


def _later(clock: Callable[[], float], seconds: float) -> float:
    return clock() + seconds


def _let_clock_jump(sign: int) -> Callable[[Path, int], None]:
    def jump(directory: Path, seed: int) -> None:
        """Change the time of the process, and that of its files; end it soon, so that another has to find them."""
        seconds = sign * 86_400 * random.Random(seed).choice([1, 400, 4000])
        time.time = functools.partial(_later, time.time, seconds)
        for path in (directory / "autosaves").rglob("*"):
            with suppress(FileNotFoundError):
                then = path.stat().st_mtime + seconds
                if path.is_file():
                    os.utime(path, (then, then))
        threading.Timer(random.Random(seed).uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGKILL)).start()

    return jump


_TERM, _INT = 128 + signal.SIGTERM, 128 + signal.SIGINT
KINDS: dict[str, Kind] = {
    "exception": Kind(_raise),
    "exception-in-thread": Kind(lambda *_: threading.Thread(target=_raise).start()),
    "exception-in-awaited-thread": Kind(_wait_for_thread_that_raises),
    "os._exit": Kind(lambda *_: os._exit(1)),
    "os._exit-with-0": Kind(lambda *_: os._exit(0)),
    "abort": Kind(lambda *_: os.abort()),
    "segfault": Kind(lambda *_: ctypes.string_at(0)),
    "out-of-memory": Kind(_use_up_memory),
    "SIGKILL": Kind(_send(signal.SIGKILL)),
    "SIGTERM": Kind(_send(signal.SIGTERM), ends=(_TERM,)),
    "SIGINT": Kind(_send(signal.SIGINT), ends=(_INT,)),
    "SIGTERM-to-command": Kind(_send(signal.SIGTERM, os.getppid), ends=(_TERM,)),
    "SIGINT-to-command": Kind(_send(signal.SIGINT, os.getppid), ends=(_INT,)),
    "SIGKILL-to-command": Kind(_send(signal.SIGKILL, os.getppid), ends=(-signal.SIGKILL,)),
    "SIGSTOP": Kind(_send(signal.SIGSTOP)),
    "GIL": Kind(_hold_the_interpreter),
    "worker-killed": Kind(_kill_worker, moments=WITH_WORKERS, num_workers=2),
    # See `StuckDataset`.
    "worker-deadlock": Kind(lambda here, _: (here / "deadlock").touch(), moments=WITH_WORKERS, num_workers=2),
    "rank-without-collective": Kind(lambda *_: threading.Event().wait(), num_ranks=(2,)),
    "shared-memory-full": Kind(lambda *_: _fill(Path("/dev/shm")), num_workers=2, mounts="/dev/shm"),
    "autosaves-full": Kind(_fill_autosaves, mounts="autosaves"),
    "file-system-blocks": Kind(_read_from_nobody),
    "clock-jumps-ahead": Kind(_let_clock_jump(1)),
    "clock-jumps-back": Kind(_let_clock_jump(-1)),
}

"""The faults of the trials: one line of `KINDS` each. Another line adds another kind to all trials."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import random
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
    """

    cause: Callable[[Path, int], object]
    ends: tuple[int, ...] = ()
    moments: tuple[str, ...] = FIT_MOMENTS
    num_ranks: tuple[int, ...] = (1, 2)
    num_workers: int | None = None


def _raise(*_: object) -> None:
    raise ValueError("an exception")


def _send(signum: int, process_id: Callable[[], int] = os.getpid) -> Callable[[Path, int], None]:
    return lambda *_: os.kill(process_id(), signum)


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
    "os._exit-with-0": Kind(lambda *_: os._exit(0)),
    "SIGKILL": Kind(_send(signal.SIGKILL)),
    "SIGTERM": Kind(_send(signal.SIGTERM), ends=(_TERM,)),
    "SIGINT": Kind(_send(signal.SIGINT), ends=(_INT,)),
    "SIGTERM-to-command": Kind(_send(signal.SIGTERM, os.getppid), ends=(_TERM,)),
    "SIGKILL-to-command": Kind(_send(signal.SIGKILL, os.getppid), ends=(-signal.SIGKILL,)),
    "SIGSTOP": Kind(_send(signal.SIGSTOP)),
    "GIL": Kind(_hold_the_interpreter),
    "worker-killed": Kind(_kill_worker, moments=WITH_WORKERS, num_workers=2),
    # See `StuckDataset`.
    "worker-deadlock": Kind(lambda here, _: (here / "deadlock").touch(), moments=WITH_WORKERS, num_workers=2),
    "rank-without-collective": Kind(lambda *_: threading.Event().wait(), num_ranks=(2,)),
    "file-system-blocks": Kind(_read_from_nobody),
    "clock-jumps-ahead": Kind(_let_clock_jump(1)),
    "clock-jumps-back": Kind(_let_clock_jump(-1)),
}

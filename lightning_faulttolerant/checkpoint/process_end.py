"""The end of this process: a call that comes early enough to reach a remote store, and a hard end.

The hard end is for a process whose main thread waits in a collective that no other rank joins.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def call_at_end(function: Callable[[], None], *, is_remote: bool) -> None:
    """Call a function when the interpreter ends; it may be called twice.

    Args:
        function: Takes no arguments.
        is_remote: Whether it needs the network.
    """
    atexit.register(function)
    # asyncio resolves hosts in threads, and threads can't be started any more when the functions of atexit are called.
    # A function that needs the network must run before. It is registered like the end of asyncio's own thread pool.
    # (That pool registers itself when it is first used, and the functions are called in the reverse order.) These
    # functions are also the only ones that a process of `multiprocessing` calls when it ends.
    register = getattr(threading, "_register_atexit", None)
    if register is not None and (is_remote or multiprocessing.parent_process() is not None):
        register(function)


def end_process(exit_code: int, why: str) -> None:
    """End this process immediately, from any thread, and print the reason on stderr."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or "0"
    with contextlib.suppress(OSError):
        # Not sys.stderr: the main thread may hold its lock.
        os.write(2, f"\n[rank {rank}] FaultTolerance: {why}\n".encode())
    os._exit(exit_code)


def leave_process(exit_code: int) -> NoReturn:
    """End this process from its main thread: no hook, ``finally`` block, or exit handler runs, but all output is kept.

    Args:
        exit_code: The exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)

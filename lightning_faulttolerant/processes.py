"""Processes: which are alive on this machine, which belong together, and how this one ends.

It ends with a call that comes early enough to reach a remote store, or hard, if its main thread waits in a collective
that no other rank joins.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

_SET_DEATH_SIGNAL = 1
"""The option of `prctl` (``PR_SET_PDEATHSIG``)."""
_SESSION, _STARTED_AT = 3, 19
"""The places of a process's session and start among the fields of its ``stat`` from its state on."""


def is_alive(process_id: int) -> bool:
    """Return whether a process on this machine is alive, or may be."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def started_at(process_id: int) -> int:
    """Return when a process started, in the clock ticks of ``/proc``; 0 if unknown."""
    fields = _stat_fields(process_id)
    return int(fields[_STARTED_AT]) if len(fields) > _STARTED_AT else 0


def is_running(process_id: int, started: int = 0) -> bool:
    """Return whether a process is alive and has not ended, as a zombie has.

    Args:
        process_id: The process.
        started: When it started, as `started_at` returns it: another process may have the same id by now. 0 if unknown.
    """
    if not is_alive(process_id):
        return False
    fields = _stat_fields(process_id)
    if not fields:  # it has gone in between, or this is not Linux
        return not _stat_fields(os.getpid())
    return fields[0] not in "ZX" and started in (0, int(fields[_STARTED_AT]))


def _stat_fields(process_id: int) -> list[str]:
    """Return the fields of a process's ``stat`` from its state on; nothing without ``/proc``."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name is in brackets and may contain anything


def this_machine() -> str:
    """Return an id that two processes share if each can tell whether the other is alive, as far as is known.

    Containers may share a host name (``--network=host``), and process ids mean nothing across containers.
    """
    try:
        return f"{this_boot()} {os.readlink('/proc/self/ns/pid')}" if this_boot() else ""
    except OSError:  # not Linux
        return ""


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Return the id of the current boot of this machine. Empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def parents_and_states() -> tuple[dict[int, int], dict[int, str]]:
    """Return the parent's process id and the state of each process of the machine; nothing without ``/proc``."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        process_id = int(entry.name)
        if fields := _stat_fields(process_id):
            states[process_id], parents[process_id] = fields[0], int(fields[1])
    return parents, states


def in_sessions(leaders: Set[int]) -> set[int]:
    """Return the processes of sessions that have not ended; nothing without ``/proc``.

    Args:
        leaders: The process ids of the leaders, which the sessions keep when their leaders have ended.
    """
    fields = {int(entry.name): _stat_fields(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return {one for one, stat in fields.items() if stat and int(stat[_SESSION]) in leaders and stat[0] not in "ZX"}


def with_variable(name: str, value: str) -> set[int]:
    """Return the processes that were started with an environment variable; nothing without ``/proc``."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def with_children(process_ids: set[int], parents: Mapping[int, int]) -> set[int]:
    """Return processes and all their descendants.

    Args:
        process_ids: The processes.
        parents: The parent of each process, as `parents_and_states` returns them.
    """
    found = set(process_ids)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def send_signal(process_id: int, signum: int) -> None:
    """Send a signal to a process, if it is still there and belongs to this user."""
    with contextlib.suppress(OSError):
        os.kill(process_id, signum)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def call_at_end(function: Callable[[], None], *, is_remote: bool) -> None:
    """Call a function when the interpreter ends; it may be called twice.

    Args:
        function: Takes no arguments.
        is_remote: Whether it needs the network.
    """
    import multiprocessing  # slow to import, and the command line does without it

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

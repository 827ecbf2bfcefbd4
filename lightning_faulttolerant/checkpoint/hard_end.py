"""End a process that nothing else can end: its main thread waits in a collective that no other rank joins."""

from __future__ import annotations

import contextlib
import os


def end_process(exit_code: int, why: str) -> None:
    """End this process immediately, from any thread, and print the reason on stderr."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or "0"
    with contextlib.suppress(OSError):
        # Not sys.stderr: the main thread may hold its lock.
        os.write(2, f"\n[rank {rank}] FaultTolerance: {why}\n".encode())
    os._exit(exit_code)

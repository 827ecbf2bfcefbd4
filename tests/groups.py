"""Runs a function on the ranks of a group as torchrun would start them: forked processes with its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_faulttolerant.testing.exactness import fork_and_run


def run_group(
    main: Callable[[int], Any], *, num_ranks: int, directory: Path, timeout_seconds: float = 60
) -> tuple[list[int], str]:
    """Run `main` on each rank; return the exit codes, including those of killed ranks, and all printed output.

    If a rank fails, the others are killed 10 seconds later. All are killed when the time is up.
    """
    port = _free_port()
    outputs = [Path(tempfile.mkstemp(dir=directory, suffix=".txt")[1]) for _ in range(num_ranks)]
    running: dict[int, int] = {}
    for rank, output in enumerate(outputs):

        def rank_main(rank: int = rank) -> None:
            if num_ranks > 1:
                os.environ.update(_environment(rank, num_ranks, port))
            main(rank)

        running[fork_and_run(rank_main, output=output, seed=1)] = rank
    codes = [-int(signal.SIGKILL)] * num_ranks
    deadline = time.monotonic() + timeout_seconds
    while running and time.monotonic() < deadline:
        for process_id, rank in list(running.items()):
            done, status = os.waitpid(process_id, os.WNOHANG)
            if done:
                del running[process_id]
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + 10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process_id, signal.SIGKILL)
        time.sleep(0.005)
    for process_id in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    return codes, "\n".join(f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(outputs))


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in {**values, **torchrun}.items()}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if sys.platform == "win32":
    raise ImportError("processes are forked")

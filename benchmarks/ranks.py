"""Runs a function in several ranks on this machine, each a process that is set up as torchrun sets it up."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def in_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, limit_seconds: float = 600) -> Any:
    """Return what rank 0's call of `function` returns: in each rank, a forked process, it is called with `arguments`.

    Args:
        function: Returns on rank 0 what ``torch.load(weights_only=True)`` takes.
        num_ranks: The world size.
        arguments: For each call.
        limit_seconds: After this time the processes are killed.

    Raises:
        TimeoutError: If they have not ended by then.
        Exception: What one of them has raised, as torch shows it.
    """
    with tempfile.TemporaryDirectory() as directory:
        kept, deadline = Path(directory) / "result.pt", time.monotonic() + limit_seconds
        ranks = mp.start_processes(
            _rank, (num_ranks, _free_port(), kept, function, arguments), num_ranks, join=False, start_method="fork"
        )
        try:
            while not ranks.join(deadline - time.monotonic()):  # it returns whenever one of them has ended
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{num_ranks} ranks have not ended within {limit_seconds} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return torch.load(kept)


def _rank(
    rank: int, num_ranks: int, port: int, kept: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        TORCHELASTIC_RUN_ID="benchmark",
    )
    result = function(*arguments)
    if rank == 0:
        torch.save(result, kept)
    sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

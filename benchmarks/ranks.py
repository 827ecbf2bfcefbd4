"""Runs a function in several ranks on this machine, each a process that is set up as torchrun sets it up."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.testing.processes import run_ranks


def in_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, limit_seconds: float = 600) -> Any:
    """Call `function` with `arguments` in each of so many ranks, and return what rank 0's call returns.

    Args:
        function: Returns on rank 0 what ``torch.load(weights_only=True)`` takes.
        num_ranks: The world size.
        arguments: For each call.
        limit_seconds: After this time the processes are killed.

    Raises:
        RuntimeError: If one of them fails.
        TimeoutError: If they have not ended in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        kept = Path(directory) / "result.pt"
        outputs = [Path(directory) / f"rank-{rank}.txt" for rank in range(num_ranks)]

        def main(rank: int) -> None:
            result = function(*arguments)
            if rank == 0:
                torch.save(result, kept)

        exit_code = run_ranks(main, outputs=outputs, seed=0, timeout_seconds=limit_seconds)
        if exit_code != 0:
            printed = "\n".join(output.read_text()[-2000:] for output in outputs if output.exists())
            raise RuntimeError(f"A rank ended with exit code {exit_code}:\n{printed}")
        return torch.load(kept)

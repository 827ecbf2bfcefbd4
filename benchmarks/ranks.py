"""Run a function in several ranks on this machine, in processes set up the way torchrun does it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.testing.processes import run_ranks


def in_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, limit_seconds: float = 600) -> Any:
    """Call `function` with `arguments` in each of `num_ranks` ranks, and return the result of rank 0.

    Args:
        function: Its result on rank 0 must be loadable by ``torch.load(weights_only=True)``.
        num_ranks: The world size.
        arguments: The arguments of each call.
        limit_seconds: After this time, the processes are killed.

    Raises:
        RuntimeError: If a process fails.
        TimeoutError: If the processes have not ended in time.
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

"""Runs a function on several ranks: forked processes with a gloo group."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.processes import run_all

TIMEOUT = timedelta(seconds=20)
"""How long a collective of the default group waits."""


def on_ranks(main: Callable[[int], Any], tmp_path: Path, *, num_ranks: int = 2) -> list[Any]:
    """Run `main` on forked ranks; return each one's result, the text of its error, or that it is dead."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    run_all(functools.partial(_run_rank, main, rank, tmp_path, num_ranks) for rank in range(num_ranks))
    answers = [tmp_path / f"answer-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(answer.read_text()) if answer.exists() else "dead" for answer in answers]


def _run_rank(main: Callable[[int], Any], rank: int, tmp_path: Path, num_ranks: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=num_ranks, timeout=TIMEOUT
    )
    # If a rank ended now, it would cause an error in the others, which may still be connecting.
    (tmp_path / f"connected-{rank}").touch()
    while len(list(tmp_path.glob("connected-*"))) < num_ranks:
        time.sleep(0.002)
    try:
        answer = main(rank)
    except Exception as error:  # noqa: BLE001 - the exception of a rank is its result
        answer = f"{type(error).__name__}: {error}"
    (tmp_path / f"answer-{rank}.json").write_text(json.dumps(answer))

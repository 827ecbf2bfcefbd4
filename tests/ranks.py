"""Runs a function on several ranks: forked processes with a gloo group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=20)
"""How long a collective of the default group waits."""
_MAX_SECONDS = 60.0


def on_ranks(main: Callable[[int], Any], tmp_path: Path, *, num_ranks: int = 2) -> list[Any]:
    """Run `main` on forked ranks; return each one's result, the text of its error, or that it is dead."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    process_ids = []
    for rank in range(num_ranks):
        process_id = os.fork()
        if not process_id:
            try:
                _run_rank(main, rank, tmp_path, num_ranks)
            except BaseException:  # noqa: BLE001 - a forked process must not continue with pytest
                traceback.print_exc()
            finally:
                os._exit(0)
        process_ids.append(process_id)
    _wait(process_ids)
    answers = [tmp_path / f"answer-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(answer.read_text()) if answer.exists() else "dead" for answer in answers]


def _wait(process_ids: list[int]) -> None:
    left, deadline = set(process_ids), time.monotonic() + _MAX_SECONDS
    while left and time.monotonic() < deadline:
        left -= {process_id for process_id in left if os.waitpid(process_id, os.WNOHANG)[0]}
        time.sleep(0.005)
    for process_id in left:  # a hang is a failure
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)


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

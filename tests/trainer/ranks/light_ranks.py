"""Runs a function on many ranks: forked processes without a process group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_light(main: Callable[[int], Any], tmp_path: Path, *, num_ranks: int, seconds: float = 90) -> list[Any]:
    """Return each rank's result, the text of its error, or that it is dead; a rank that hangs is a failure."""
    process_ids = [_forked(main, rank, tmp_path) for rank in range(num_ranks)]
    left, deadline = set(process_ids), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left -= {process_id for process_id in left if os.waitpid(process_id, os.WNOHANG)[0]}
        time.sleep(0.005)
    for process_id in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    assert not left, "a rank hangs"
    answers = [tmp_path / f"answer-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(answer.read_text()) if answer.exists() else "dead" for answer in answers]


def _forked(main: Callable[[int], Any], rank: int, tmp_path: Path) -> int:
    path = tmp_path / f"answer-{rank}.json"
    path.unlink(missing_ok=True)
    process_id = os.fork()
    if process_id:
        return process_id
    try:
        try:
            answer = main(rank)
        except Exception as error:  # noqa: BLE001 - the exception of a rank is its result
            answer = f"{type(error).__name__}: {error}"
        path.write_text(json.dumps(answer))
    except BaseException:  # noqa: BLE001 - a forked process must not continue with pytest
        traceback.print_exc()
    finally:
        os._exit(0)

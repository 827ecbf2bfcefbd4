"""Runs of several ranks that are stopped from outside: each is a process that gets signals, and always ends."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.testing.processes import _environment, _Rendezvous, fork_and_run
from tests.laws.ranks import Apart
from tests.laws.rows import rows_of
from tests.runs import fit_net


def rank_fit(
    num_ranks: int,
    callbacks: list[Callback],
    directory: Path,
    *,
    train: Any = None,
    validation: Any = None,
    **own: Any,
) -> Trainer:
    """Fit on several ranks, with 8 batches an epoch; `own` are the Trainer's arguments."""
    return fit_net(
        callbacks,
        directory,
        train=(train or rows_of(32 * num_ranks))(),
        validation=(validation or rows_of(8 * num_ranks, shuffle=False))(),
        module=Apart(),
        **{"devices": num_ranks, "strategy": "ddp", **own},
    )


class RankEnded(NamedTuple):
    """How the process of a rank ended."""

    exit_code: int
    output: str
    seconds: float


class RankProcesses:
    """Forked processes, one for each rank, with torchrun's environment (if several); leaving the context kills them."""

    def __init__(self, main: Callable[[int], Any], *, num_ranks: int = 2, environment: Mapping[str, str] = {}) -> None:
        directory, self._began = Path(tempfile.mkdtemp()), time.monotonic()
        self._outputs = [directory / f"output-{rank}.txt" for rank in range(num_ranks)]
        self._rendezvous = _Rendezvous() if num_ranks > 1 else None
        self._ended: dict[int, RankEnded] = {}
        self.process_ids: list[int] = []

        def run(rank: int) -> None:
            torch.set_num_threads(1)
            main(rank)

        for rank, output in enumerate(self._outputs):
            own = {} if self._rendezvous is None else _environment(rank, num_ranks, self._rendezvous.port)
            started = fork_and_run(
                lambda rank=rank: run(rank), output=output, seed=1 + 1000 * rank, environment={**own, **environment}
            )
            self.process_ids.append(started)

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        return self._outputs[rank].read_text() if self._outputs[rank].exists() else ""

    def send(self, signum: int, *ranks: int) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            os.kill(self.process_ids[rank], signum)

    def wait_for(self, text: str, *ranks: int) -> None:
        """Wait until each of these ranks has printed a text."""
        for rank in ranks:
            while text not in self.output(rank):
                assert self._is_running(rank), self.output(rank)
                time.sleep(0.005)

    def _is_running(self, rank: int) -> bool:
        if rank not in self._ended:
            done, status = os.waitpid(self.process_ids[rank], os.WNOHANG)
            if done:
                seconds = time.monotonic() - self._began
                self._ended[rank] = RankEnded(os.waitstatus_to_exitcode(status), self.output(rank), seconds)
        return rank not in self._ended

    def wait(self) -> list[RankEnded]:
        """Wait until all have ended; the test's own limit is the only one."""
        while sum(self._is_running(rank) for rank in range(len(self.process_ids))):  # checks all, to record the time
            time.sleep(0.005)
        return [self._ended[rank] for rank in range(len(self.process_ids))]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process_id in enumerate(self.process_ids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process_id, signal.SIGKILL)
            if rank not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
                os.waitpid(process_id, 0)
        if self._rendezvous is not None:
            self._rendezvous.close()

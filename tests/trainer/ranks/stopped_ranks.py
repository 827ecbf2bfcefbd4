"""Runs of several ranks that are stopped from outside: each is a process that gets signals, and always ends."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.testing.processes import _environment, _Rendezvous, fork_and_run
from tests.laws.ranks import Apart
from tests.laws.rows import rows_of
from tests.runs import fit_net

SECONDS = 60.0
"""No run may take longer."""


def rank_fit(
    num_ranks: int,
    *,
    users: Callable[[], list[Callback]] = list,
    train: Callable[[], Any] | None = None,
    validation: Callable[[], Any] | None = None,
    **arguments: Any,
) -> Callable[[list[Callback], Path], Trainer]:
    """Return a fit on several ranks, of 8 batches an epoch; `arguments` are the Trainer's."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(
            [*users(), *callbacks],
            directory,
            train=(train or rows_of(32 * num_ranks))(),
            validation=(validation or rows_of(8 * num_ranks, shuffle=False))(),
            module=Apart(),
            **{"devices": num_ranks, "strategy": "ddp", **arguments},
        )

    return fit


@dataclass(frozen=True)
class RankEnded:
    """How the process of a rank ended."""

    exit_code: int
    output: str
    seconds: float


class RankProcesses:
    """Forked processes, one for each rank, with torchrun's environment; leaving the context kills them.

    Args:
        main: Receives the rank.
        num_ranks: The number of ranks.
        environment: Variables in addition to torchrun's; for one rank torchrun's are left out.
    """

    def __init__(self, main: Callable[[int], Any], *, num_ranks: int = 2, environment: Mapping[str, str] = {}) -> None:
        self._directory = Path(tempfile.mkdtemp())
        self._began = time.monotonic()
        self._rendezvous = _Rendezvous() if num_ranks > 1 else None
        self.process_ids: list[int] = []
        self._ended: dict[int, RankEnded] = {}
        for rank in range(num_ranks):
            own = {} if self._rendezvous is None else _environment(rank, num_ranks, self._rendezvous.port)
            self.process_ids.append(
                fork_and_run(
                    lambda rank=rank: self._run(main, rank),
                    output=self._output(rank),
                    seed=1 + 1000 * rank,
                    environment={**own, **environment},
                )
            )

    @staticmethod
    def _run(main: Callable[[int], Any], rank: int) -> None:
        torch.set_num_threads(1)
        main(rank)

    def _output(self, rank: int) -> Path:
        return self._directory / f"output-{rank}.txt"

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        return self._output(rank).read_text() if self._output(rank).exists() else ""

    def send(self, signum: int, *ranks: int) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            os.kill(self.process_ids[rank], signum)

    def wait_for(self, text: str, *ranks: int, seconds: float = 30.0) -> None:
        """Wait until each of these ranks has printed a text."""
        deadline = time.monotonic() + seconds
        for rank in ranks:
            while text not in self.output(rank):
                if time.monotonic() > deadline or not self._is_running(rank):
                    outputs = "\n".join(self.output(other) for other in range(len(self.process_ids)))
                    raise AssertionError(f"rank {rank} has not printed {text!r}:\n{outputs}")
                time.sleep(0.005)

    def _is_running(self, rank: int) -> bool:
        if rank not in self._ended:
            done, status = os.waitpid(self.process_ids[rank], os.WNOHANG)
            if done:
                seconds = time.monotonic() - self._began
                self._ended[rank] = RankEnded(os.waitstatus_to_exitcode(status), self.output(rank), seconds)
        return rank not in self._ended

    def wait(self, *, seconds: float = SECONDS) -> list[RankEnded]:
        """Wait until all have ended.

        Raises:
            AssertionError: If they don't; nothing may hang.
        """
        deadline = time.monotonic() + seconds
        while sum(self._is_running(rank) for rank in range(len(self.process_ids))):  # checks all, to record the time
            if time.monotonic() > deadline:
                outputs = "\n".join(self.output(rank) for rank in range(len(self.process_ids)))
                raise AssertionError(f"Only the ranks {sorted(self._ended)} have ended:\n{outputs}")
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

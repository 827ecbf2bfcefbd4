"""Runs of several ranks that are stopped from outside: each is a process that gets signals, and always ends."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer

from tests.laws.processes import rendezvous, signal_to
from tests.laws.ranks import Apart
from tests.laws.rows import rows_of
from tests.processes import Script
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
    """Fit on ranks, with 8 batches an epoch; `own` are the Trainer's arguments."""
    return fit_net(
        callbacks,
        directory,
        train=(train or rows_of(32 * num_ranks))(),
        validation=(validation or rows_of(8 * num_ranks, shuffle=False))(),
        module=Apart(),
        **{"devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto", **own},
    )


class RankEnded(NamedTuple):
    """How the process of a rank ended, and when."""

    exit_code: int
    output: str
    at: float


class RankProcesses:
    """Scripts, one for each rank."""

    def __init__(self, scripts: list[Script]) -> None:
        self._scripts = scripts

    def send(self, signum: int, rank: int) -> None:
        os.kill(self._scripts[rank].process_id, signum)

    def wait_for(self, text: str) -> None:
        for script in self._scripts:
            while text not in script.printed():
                assert script.is_running(), script.printed()
                time.sleep(0.005)

    def wait(self) -> list[RankEnded]:
        """Wait until all have ended; the test's own limit is the only one."""
        ended: dict[int, RankEnded] = {}
        while len(ended) < len(self._scripts):
            for rank, script in enumerate(self._scripts):
                if rank not in ended and not script.is_running():
                    found = script.wait()
                    ended[rank] = RankEnded(found.exit_code, found.output, time.monotonic())
            time.sleep(0.005)
        return [ended[rank] for rank in sorted(ended)]


@contextlib.contextmanager
def rank_processes(
    main: Callable[[int], Any], *, num_ranks: int = 2, environment: Mapping[str, str] = {}
) -> Iterator[RankProcesses]:
    """Yield ranks, with torchrun's environment if there are several; leaving the context kills them."""
    with rendezvous(num_ranks) as environments:

        def run(rank: int) -> None:
            os.environ.update({**environments[rank], **environment})
            torch.set_num_threads(1)
            main(rank)

        scripts = [Script(functools.partial(run, rank), seed=1 + 1000 * rank) for rank in range(num_ranks)]
        try:
            yield RankProcesses(scripts)
        finally:
            for script in scripts:
                signal_to(script.process_id, signal.SIGKILL, os.killpg)

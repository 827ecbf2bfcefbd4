"""Ranks that torchrun starts again meet each other, not those that have died, and continue exactly."""

from __future__ import annotations

import functools
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.ranks.strategies import apart_from_earlier_ranks
from tests.agents import Agent
from tests.launched import RankRecorder, assert_same
from tests.rank_runs import RankNet, for_ranks, shuffled
from tests.runs import fit_net, make_trainer
from tests.scripts import protected

pytestmark = [*for_ranks, pytest.mark.slow]
NUM_RESTARTS = 3
NUM_RUNS = 20
AT_ONCE = 4
LATE_SECONDS = 0.3


def num_restarts() -> int:
    """Return how often torchrun has started the ranks again."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class KillInBatch(Callback):
    """Kills the ranks in turn, one at each of the first three starts, each in a later batch."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == num_restarts() + 2:
            kill_in_turn(trainer)


def kill_in_turn(trainer: Trainer) -> None:
    """Kill this process if its rank's turn is at this start."""
    if num_restarts() < NUM_RESTARTS and trainer.global_rank == num_restarts() % 2:
        os.kill(os.getpid(), signal.SIGKILL)


def come_late() -> None:
    """Let rank 0 come last, so that rank 1 looks for it before it is there, and finds the dead one if it can."""
    if os.environ["RANK"] == "0" and num_restarts():
        time.sleep(LATE_SECONDS)


def train(directory: Path, callbacks: list[Callback]) -> None:
    """Train on two ranks, recorded."""
    train, recorder = shuffled(num_batches=3), RankRecorder(directory, 0, 1)
    callbacks = [*callbacks[:1], recorder, *callbacks[1:]]
    fit_net(callbacks, directory, module=RankNet(), train=train, devices=2, strategy="ddp")


def test_killed_at_each_start(tmp_path: Path) -> None:
    """A run whose ranks are killed in turn, three times, is the uninterrupted run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    outputs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    assert run_ranks(lambda rank: train(whole, []), outputs=outputs, seed=1, timeout_seconds=60) == 0

    def script() -> None:
        come_late()
        train(killed, [protected(dirpath=killed / "autosaves", run_id="run"), KillInBatch()])

    agent = Agent(script, max_restarts=NUM_RESTARTS)
    assert agent.wait() == 0, agent.output
    assert agent.output.count("Resumed exactly") == NUM_RESTARTS
    assert_same(whole, killed, num_processes=NUM_RESTARTS + 1)


def meet(directory: Path, *, apart: bool) -> None:
    """Let Lightning connect the ranks. One of them dies as soon as they are, at all starts but the last."""
    strategy = DDPStrategy(timeout=timedelta(seconds=60 if apart else 5))
    trainer = make_trainer([], directory, devices=2, strategy=strategy)
    come_late()
    if apart:
        apart_from_earlier_ranks(trainer.strategy.setup_environment)
    else:
        trainer.strategy.setup_environment()
    distributed.barrier()
    print(f"rank {trainer.global_rank} has met the other one", flush=True)
    kill_in_turn(trainer)


def num_met(directory: Path, *, num_runs: int, apart: bool) -> int:
    """Run the script under several agents; return how often two ranks have met."""
    num_met = 0
    for first in range(0, num_runs, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, num_runs))
        script = functools.partial(meet, directory, apart=apart)
        agents = [Agent(script, max_restarts=NUM_RESTARTS) for _ in numbers]
        for agent in agents:
            agent.wait()
        num_met += sum(agent.output.count("rank 1 has met the other one") for agent in agents)
    return num_met


def test_ranks_meet_at_each_start(tmp_path: Path) -> None:
    """Three restarts, twenty times: the ranks of each start meet, and no restart is wasted."""
    assert num_met(tmp_path, num_runs=NUM_RUNS, apart=True) == NUM_RUNS * (NUM_RESTARTS + 1)


def test_ranks_that_share_the_store_meet_the_dead(tmp_path: Path) -> None:
    """The negative control: without a part of the store for each start, restarts are wasted.

    Whether a rank calls the other one, or waits for its call, depends on their ports: it may go well a few times.
    """
    assert num_met(tmp_path, num_runs=AT_ONCE, apart=False) < AT_ONCE * (NUM_RESTARTS + 1)

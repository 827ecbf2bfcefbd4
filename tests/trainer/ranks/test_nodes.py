"""Ranks exchange by node: each keeps few connections, and a lost rank or node is an error everywhere, never a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup
from tests.light_ranks import run_light

NODES, PER_NODE = 4, 8
NUM_RANKS = NODES * PER_NODE
BIG = 3_000_000


def join(
    rank: int,
    path: Path,
    *,
    timeout: float = 20,
    per_node: int = PER_NODE,
    num_ranks: int = NUM_RANKS,
    start: int = 0,
) -> NodeGroup:
    """Return the group of a rank, which is on a simulated node."""
    return NodeGroup(
        dist.FileStore(str(path / f"store-{start}"), num_ranks),
        timedelta(seconds=timeout),
        rank=rank,
        num_ranks=num_ranks,
        host="127.0.0.1",
        node=f"node {rank // per_node}",
    )


def whole_node(rank: int) -> bool:
    """Return whether a rank is on the third node."""
    return rank // PER_NODE == 2


@pytest.mark.parametrize(
    ("method", "dies"),
    [
        ("to_first", whole_node),
        ("from_first", whole_node),
        ("to_all", lambda rank: rank == 11),
        ("to_all", lambda rank: rank == 0),
    ],
    ids=["node-to-first", "node-from-first", "rank", "first"],
)
def test_dead_ranks_end_an_exchange(tmp_path: Path, method: str, dies: Callable[[int], bool]) -> None:
    """If a node, a rank, or rank 0 dies inside an exchange, every rank raises in this one or the next, in seconds."""

    def main(rank: int) -> Any:
        ranks = join(rank, tmp_path)
        ranks.to_all("connected", rank)
        if dies(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        getattr(ranks, method)("step", os.urandom(BIG // 10))
        ranks.to_all("next", rank)
        return "not noticed"

    began = time.monotonic()
    answers = run_light(main, tmp_path, num_ranks=NUM_RANKS)
    assert time.monotonic() - began < 18  # the time limit of an exchange is 20 s
    for rank, answer in enumerate(answers):
        if dies(rank):
            assert answer == "dead"
        else:
            assert answer.startswith(f"RanksLostError: rank {rank} had no answer at '"), answer

"""Ranks exchange by node: each keeps few connections, and a lost rank or node is an error everywhere, never a hang."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_faulttolerant.trainer.ranks.nodes import Listener, LostLinkError, NodeGroup, connect_to, receive_from
from lightning_faulttolerant.trainer.ranks.strategies import open_line
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


def test_ranks_at_different_steps_say_so(tmp_path: Path) -> None:
    """A rank on another node that is at another step is named by rank 0, and all ranks raise."""

    def main(rank: int) -> Any:
        ranks = join(rank, tmp_path, per_node=2, num_ranks=4)
        return ranks.to_all("other" if rank == 3 else "step", rank)

    answers = run_light(main, tmp_path, num_ranks=4)
    assert answers[0].startswith("RanksLostError: the ranks are out of step: rank 0 is at 'step'")
    assert "rank 3 is at 'other'" in answers[0]
    assert all(answer.startswith("RanksLostError") for answer in answers)


def test_a_stranger_does_not_take_the_place_of_a_rank() -> None:
    """Connections without the token, with a message that is too long, or with none are closed."""
    listener = Listener("the token")
    address, deadline = ("127.0.0.1", listener.port), time.monotonic() + 20
    strangers = [connect_to(address, rank=1, token=token, deadline=deadline) for token in ("another", "x" * 10_000)]
    socket.create_connection(address).close()
    own = connect_to(address, rank=1, token="the token", deadline=deadline)
    links = listener.accept(1, deadline)
    assert list(links) == [1]
    own.send(b"hello", deadline)
    assert receive_from(links, deadline) == {1: b"hello"}
    with pytest.raises(LostLinkError, match="rank 7: its connection is closed"):
        receive_from({7: strangers[0]}, deadline)
    for link in (*links.values(), own, *strangers):
        link.close()
    listener.close()


def test_the_line_goes_by_node(tmp_path: Path) -> None:
    """A message of the last rank reaches rank 0, the answer reaches all, and a killed rank is named to rank 0."""

    def main(rank: int) -> Any:
        line = open_line(join(rank, tmp_path, per_node=2, num_ranks=6))
        told: list[tuple[int, Any]] = []
        if rank == 5:
            line.send({"hello": rank})
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            told += line.receive()
            if rank == 0 and (5, {"hello": 5}) in told and (3, None) not in told:
                line.send({"answer": 0})
            if rank == 3 and told:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0 and (3, None) in told:
                line.send({"end": 3})
                break
            if (0, {"end": 3}) in told:
                break
            time.sleep(0.01)
        line.close()
        return [number for number, message in told if message is None] if rank == 0 else (0, {"answer": 0}) in told

    assert run_light(main, tmp_path, num_ranks=6) == [[3], True, True, "dead", True, True]

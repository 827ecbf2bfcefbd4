"""Ranks exchange values and messages: in order, and a lost rank is an error on the others, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_faulttolerant.trainer.ranks.connection import Hub
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup
from lightning_faulttolerant.trainer.ranks.strategies import connect_all, open_line
from tests.ranks import TIMEOUT, on_ranks


def test_ranks_that_lost_each_other_say_where_they_are(tmp_path: Path) -> None:
    """Ranks at different steps don't take each other's values for their own; a killed one is an error on the other."""
    answer, _ = on_ranks(lambda rank: connect_all().to_first(f"step {rank}", rank), tmp_path / "steps")
    assert answer.startswith("RanksLostError: the ranks are out of step")
    assert "step 0" in answer
    assert "step 1" in answer

    def main(rank: int) -> Any:
        ranks = connect_all()
        ranks.from_first("connected", rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ranks.to_first("step", rank)

    alive, dead = on_ranks(main, tmp_path / "ranks")
    assert dead == "dead"
    assert alive.startswith("RanksLostError: rank 0 had no answer at 'step'")


def test_ranks_of_another_node_are_heard_and_hear(tmp_path: Path) -> None:
    """One rank of each node passes on the values and the messages of the others."""

    def main(rank: int) -> Any:
        more = {"num_ranks": 4, "host": "127.0.0.1", "node": f"node {rank // 2}"}
        ranks = NodeGroup(dist.FileStore(str(tmp_path / "store"), 4), TIMEOUT, rank=rank, **more)
        heard, values, line = [], ranks.to_all("values", rank), open_line(ranks)
        if rank:
            line.send({"of": rank})
        while len(heard) < (1 if rank else 3) and time.monotonic() < deadline:
            heard += line.receive()
            time.sleep(0.001)
        if not rank:
            line.send({"of": 0})
        line.close()
        return [values, sorted(heard)]

    deadline = time.monotonic() + 20
    told = [[[0, {"of": 0}]]] * 4
    told[0] = [[rank, {"of": rank}] for rank in (1, 2, 3)]
    assert on_ranks(main, tmp_path, num_ranks=4) == [[[0, 1, 2, 3], each] for each in told]


@pytest.mark.parametrize("text", [b'{"rank": 1, "token": "0"}\n{"ask": "stop"}\n', b"[]\n", b"without an end" * 999])
def test_strangers_are_not_heard(text: bytes) -> None:
    """A process that does not know the token of the line between ranks is turned away, and is not a rank."""
    with contextlib.closing(Hub()) as hub, socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(text)
        for _ in range(50):
            assert hub.receive() == []
            time.sleep(0.001)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""

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

from lightning_faulttolerant.trainer.ranks.connection import Hub
from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from tests.ranks import on_ranks


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

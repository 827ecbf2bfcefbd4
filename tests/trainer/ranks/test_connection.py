"""The line between ranks: messages arrive in order, and only the end of a process counts as its death."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.trainer.ranks.connection import Hub, Spoke

Told = list[tuple[int, Any]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Return rank 0's end of the line."""
    made = Hub()
    yield made
    made.close()


def spoke(hub: Hub, rank: int, token: str | None = None) -> Spoke:
    """Connect a rank."""
    return Spoke(rank, ("127.0.0.1", hub.port), hub.token if token is None else token)


def until(receive: Callable[[], Told], number: int, seconds: float = 5.0) -> Told:
    """Return the received messages once there are `number` of them."""
    told: Told = []
    deadline = time.monotonic() + seconds
    while len(told) < number:
        told += receive()
        assert time.monotonic() < deadline, told
        time.sleep(0.001)
    return told


def test_messages_arrive_in_order_at_all(hub: Hub) -> None:
    """A rank's message reaches rank 0 with the rank's number; rank 0's message reaches all others."""
    spokes = [spoke(hub, rank) for rank in (1, 2)]
    for number in range(3):
        spokes[1].send({"number": number})
    assert until(hub.receive, 3) == [(2, {"number": number}) for number in range(3)]
    spokes[0].send({"text": "ä\n" * 1000})
    assert until(hub.receive, 1) == [(1, {"text": "ä\n" * 1000})]
    hub.send({"at": 7})
    hub.send({"at": 8})
    for each in spokes:
        assert until(each.receive, 2) == [(0, {"at": 7}), (0, {"at": 8})]
        each.close()


def test_death_of_a_process_is_known_once(hub: Hub) -> None:
    """A killed rank is reported once, after its last message; a rank that stands still is not."""
    process_id = os.fork()
    if not process_id:
        line = spoke(hub, 1)
        line.send({"alive": 1})
        time.sleep(60)
        os._exit(0)
    try:
        assert until(hub.receive, 1) == [(1, {"alive": 1})]
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(0.2)
        assert hub.receive() == []
    finally:
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    assert until(hub.receive, 1) == [(1, None)]
    assert hub.receive() == []


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"rank": 1, "token": "0"}\n{"ask": "stop"}\n',
        b"[]\n",
        b"[" * 60_000 + b"\n",
        b"a line without an end" * 10,
        b"",
    ],
)
def test_strangers_are_not_heard(text: bytes, hub: Hub) -> None:
    """A process that does not know the token is turned away, and is not a rank."""
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(text)
        if not text:
            stranger.shutdown(socket.SHUT_WR)
        for _ in range(50):
            assert hub.receive() == []
            time.sleep(0.001)
        stranger.settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""


def test_rank_that_cannot_reach_rank_0_says_why() -> None:
    """The error for a closed port names the address and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RanksLostError, match=rf"rank 1 can't reach port {port} of rank 0's machine, 127.0.0.1: .*all"):
        Spoke(1, ("127.0.0.1", port), "token")

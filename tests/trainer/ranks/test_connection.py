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
from lightning_faulttolerant.trainer.ranks import connection as line_module
from lightning_faulttolerant.trainer.ranks.connection import Hub, Relay, Spoke

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


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_a_message_that_nobody_acknowledges_ends_the_connection(hub: Hub) -> None:
    """While a message is on its way, the kernel sends no probes: without this option it tries for 15 minutes."""
    with contextlib.closing(spoke(hub, 1)) as line:
        connection = line._connection.socket
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_hub_may_listen_for_its_own_machine_only() -> None:
    """Then no other machine can reach it, and the ranks of its machine can."""
    with contextlib.closing(Hub(host="127.0.0.1")) as local:
        assert local._server.getsockname()[0] == "127.0.0.1"
        with contextlib.closing(spoke(local, 1)) as line:
            line.send({"number": 1})
            assert until(local.receive, 1) == [(1, {"number": 1})]


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


def test_many_ranks_connect_at_once(hub: Hub) -> None:
    """None of hundreds of ranks has to wait until rank 0 looks, and one look is enough for all."""
    spokes = [spoke(hub, rank) for rank in range(1, 301)]
    for each in spokes:
        each.send({"hello": 1})
    time.sleep(0.05)
    told = [*hub.receive(), *hub.receive()]
    assert sorted(rank for rank, _ in told) == list(range(1, 301))
    for each in spokes:
        each.close()


def test_all_are_connected_before_anything_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 begins when it knows every rank, so that each hears everything; earlier messages of the ranks are kept."""
    spokes = [spoke(hub, rank) for rank in (1, 2)]
    spokes[0].send({"early": 1})
    hub.wait_for(2)
    hub.send({"stop": 1})
    assert [until(each.receive, 1) for each in spokes] == [[(0, {"stop": 1})]] * 2
    assert until(hub.receive, 1) == [(1, {"early": 1})]
    monkeypatch.setattr(line_module, "_CONNECT_SECONDS", 0.1)
    with pytest.raises(RanksLostError, match="only 2 of 3 ranks have connected"):
        hub.wait_for(3)
    for each in spokes:
        each.close()


def test_leave_is_no_death(hub: Hub) -> None:
    """A rank that takes leave is not reported as dead, on either end."""
    one, other = spoke(hub, 1), spoke(hub, 2)
    one.send({"last": 1})
    one.close()
    one.close()
    other.send({"there": 1})
    assert sorted(until(hub.receive, 2)) == [(1, {"last": 1}), (2, {"there": 1})]
    time.sleep(0.05)
    assert hub.receive() == []
    hub.close()
    time.sleep(0.05)
    assert other.receive() == []
    assert other.receive() == []
    other.close()


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


def test_child_of_a_dead_rank_does_not_keep_it_alive(hub: Hub) -> None:
    """A worker that outlives its rank has closed the connection that it inherited."""
    read, write = os.pipe()
    process_id = os.fork()
    if not process_id:
        line = spoke(hub, 1)
        line.send({"alive": 1})
        child = os.fork()
        if child:
            os.write(write, f"{child}\n".encode())
        time.sleep(60)
        os._exit(0)
    with os.fdopen(read) as pipe:
        child = int(pipe.readline())
    try:
        assert until(hub.receive, 1) == [(1, {"alive": 1})]
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
        assert until(hub.receive, 1) == [(1, None)]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(write)


def test_death_of_rank_0_is_known() -> None:
    """The other ranks learn of the death of rank 0 too."""
    read, write = os.pipe()
    process_id = os.fork()
    if not process_id:
        made = Hub()
        os.write(write, f"{made.port} {made.token}\n".encode())
        while True:
            made.receive()
            time.sleep(0.001)
    with os.fdopen(read) as pipe:
        port, token = pipe.readline().split()
    line = Spoke(1, ("127.0.0.1", int(port)), token)
    line.send({"hello": 1})
    time.sleep(0.1)
    assert line.receive() == []
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    os.close(write)
    assert until(line.receive, 1) == [(0, None)]
    line.close()


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


def test_a_stranger_costs_no_message_of_a_rank(hub: Hub) -> None:
    """What a rank has sent by the same look arrives, whatever a stranger sends."""
    one = spoke(hub, 1)
    hub.wait_for(1)
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        time.sleep(0.05)
        assert hub.receive() == []  # accepts it
        one.send({"limit": 3})
        stranger.sendall(b"[" * 60_000 + b"\n")
        time.sleep(0.05)
        assert until(hub.receive, 1) == [(1, {"limit": 3})]
    one.close()


def test_many_messages_at_once_are_no_death(hub: Hub) -> None:
    """Only one message is limited in length, not all that have arrived since the last look."""
    one = spoke(hub, 1)
    hub.wait_for(1)
    for number in range(3):
        one.send({"number": number, "text": "x" * 60_000})
    told: Told = []
    deadline = time.monotonic() + 5
    while len(told) < 3 and time.monotonic() < deadline:
        told += hub.receive()
        one.receive()  # sends what is left
    assert [message and message["number"] for _, message in told] == [0, 1, 2]
    one.close()


def test_rank_that_cannot_reach_rank_0_says_why() -> None:
    """The error for a closed port names the address and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RanksLostError, match=rf"rank 1 can't reach port {port} of rank 0's machine, 127.0.0.1: .*all"):
        Spoke(1, ("127.0.0.1", port), "token")


@pytest.fixture
def relay(hub: Hub) -> Iterator[tuple[Relay, Spoke]]:
    """Return the line of rank 4, which passes messages on for its node, and that of rank 5 on the same node."""
    own = Hub(hub.token)
    made = Relay(own, spoke(hub, 4)), Spoke(5, ("127.0.0.1", own.port), hub.token, hub_rank=4)
    own.wait_for(1)
    yield made
    for line in made:
        line.close()


def relayed(relay: Relay, receive: Callable[[], Told]) -> Callable[[], Told]:
    """Return what receives while the relay's rank looks, as its thread does."""

    def received() -> Told:
        assert relay.receive() == []
        return receive()

    return received


def test_messages_are_passed_on_for_the_ranks_of_a_node(hub: Hub, relay: tuple[Relay, Spoke]) -> None:
    """Rank 0 hears both ranks of the node under their own numbers, and both hear rank 0."""
    passes_on, other = relay
    passes_on.send({"of": 4})
    assert until(hub.receive, 1) == [(4, {"of": 4})]
    other.send({"of": 5})
    assert until(relayed(passes_on, hub.receive), 1) == [(5, {"of": 5})]
    hub.send({"at": 7})
    assert until(passes_on.receive, 1) == [(0, {"at": 7})]
    assert until(other.receive, 1) == [(0, {"at": 7})]


def test_a_death_on_another_node_is_passed_on(hub: Hub, relay: tuple[Relay, Spoke]) -> None:
    """Rank 0 learns which rank of the node died, not only that the node has lost one; a goodbye is no death."""
    passes_on, other = relay
    third = Spoke(6, ("127.0.0.1", passes_on._hub.port), hub.token, hub_rank=4)
    third.send({"number": 6})
    other.send({"number": 5})
    assert sorted(until(relayed(passes_on, hub.receive), 2)) == [(5, {"number": 5}), (6, {"number": 6})]
    third.close()
    other._connection.socket.shutdown(socket.SHUT_RDWR)
    assert until(relayed(passes_on, hub.receive), 1) == [(5, None)]


def test_the_death_of_rank_0_is_passed_on(hub: Hub, relay: tuple[Relay, Spoke]) -> None:
    """Each rank of the node learns that rank 0 is gone."""
    passes_on, other = relay
    passes_on.send({"number": 4})
    assert until(hub.receive, 1) == [(4, {"number": 4})]
    hub._others[4].socket.shutdown(socket.SHUT_RDWR)
    assert until(passes_on.receive, 1) == [(0, None)]
    assert until(other.receive, 1) == [(0, None)]


def test_the_death_of_the_rank_that_passes_on_is_noticed_on_both_sides(hub: Hub, relay: tuple[Relay, Spoke]) -> None:
    """Rank 0 and the other ranks of the node name it."""
    passes_on, other = relay
    passes_on.send({"number": 4})
    other.send({"number": 5})
    assert len(until(relayed(passes_on, hub.receive), 2)) == 2
    passes_on._spoke._connection.socket.shutdown(socket.SHUT_RDWR)
    passes_on._hub._others[5].socket.shutdown(socket.SHUT_RDWR)
    assert until(hub.receive, 1) == [(4, None)]
    assert until(other.receive, 1) == [(4, None)]

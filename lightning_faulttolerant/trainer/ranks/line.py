"""A connection of each rank to rank 0: what they tell one another at any time, and how the end of a process is noticed.

Nobody waits in it, and nothing is sent while there is nothing to say. A process that has died, of whatever, is known by
its connection, which the kernel closes: one that is slow, stopped, or holds the interpreter's lock is never taken for
dead. Of a machine that is gone the kernel hears no answer to its probes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from typing import Any, Protocol, final

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.trainer.ranks.group import Ranks

Message = dict[str, Any]

_CONNECT_SECONDS = 60.0
# A machine that is gone is noticed after 10 + 4 * 5 seconds.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_MAX_LINE_BYTES = 1 << 16
_BACKLOG = 4096

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A worker that outlives its rank would keep the connection open, and the rank alive for the others.
    for connection in list(_open_sockets):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Line(Protocol):
    """What a rank sees of it. One thread uses it."""

    def send(self, message: Message) -> None:
        """Tell rank 0 something; rank 0 tells all others."""

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return what has come in, each with the rank that has told it; ``None``: that rank's process is gone."""

    def close(self) -> None:
        """Take leave: to be gone from now on means nothing. May be called twice."""


_LEAVES: Message = {"leaves": True}


class _Connection:
    """Messages, one a line, over a socket that never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""
        self._to_send = b""
        self.is_over = False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        _open_sockets.add(connection)

    def send(self, message: Message) -> None:
        self._to_send += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        while self._to_send and not self.is_over:
            try:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
            except BlockingIOError:  # noqa: PERF203 - the loop is for what is left over
                return
            except OSError:  # its end is noticed where it is read
                self._to_send = b""

    def receive(self) -> list[Message]:
        """Return the messages that are there; afterwards `is_over` says whether the other end is gone."""
        self.flush()
        while not self.is_over:
            try:
                more = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            self.is_over = not more or len(self._received) > _MAX_LINE_BYTES
            self._received += more
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.is_over = True
        _open_sockets.discard(self.socket)
        self.socket.close()


@final
class Spoke:
    """The line of a rank that is not rank 0.

    Args:
        rank: This one's.
        address: Host and port of the `Hub`.
        token: Its.

    Raises:
        RanksLostError: If rank 0 can't be reached there.
    """

    def __init__(self, rank: int, address: tuple[str, int], token: str) -> None:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError as error:
            raise RanksLostError(
                f"rank {rank} can't reach port {address[1]} of rank 0's machine, {address[0]}: {error}. Let the ranks"
                " reach all ports of that machine"
            ) from error
        self._connection = _Connection(connection)
        self._connection.send({"rank": rank, "token": token})
        self._has_told = False

    def send(self, message: Message) -> None:
        """Tell rank 0."""
        self._connection.send(message)

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return what rank 0 has told."""
        if self._has_told:
            return []
        told: list[tuple[int, Message | None]] = [(0, message) for message in self._connection.receive()]
        if any(message == _LEAVES for _, message in told):
            self._has_told = True
            return [entry for entry in told if entry[1] != _LEAVES]
        if self._connection.is_over:
            self._has_told = True
            told.append((0, None))
        return told

    def close(self) -> None:
        """Take leave."""
        if not self._connection.is_over:
            self._connection.send(_LEAVES)
        self._has_told = True
        self._connection.close()


@final
class Hub:
    """The line of rank 0, which all others are connected to."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._server = _listen()
        _open_sockets.add(self._server)
        self.port: int = self._server.getsockname()[1]
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._nameless: dict[int, _Connection] = {}
        self._others: dict[int, _Connection] = {}
        self._early: list[tuple[int, Message | None]] = []

    def wait_for(self, num_others: int) -> None:
        """Wait until all others are connected: what is told before would not come to them.

        Raises:
            RanksLostError: If they are not within a minute.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        while len(self._others) < num_others:
            if time.monotonic() > deadline:
                raise RanksLostError(
                    f"only {len(self._others)} of {num_others} ranks have connected to port {self.port} of rank 0"
                    f" within {_CONNECT_SECONDS:g} seconds. Let the ranks reach all ports"
                    " of rank 0's machine"
                )
            self._early = self.receive()  # with what was there before
            time.sleep(0.001)

    def send(self, message: Message) -> None:
        """Tell all others."""
        for connection in self._others.values():
            connection.send(message)

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return what the others have told."""
        told, self._early = self._early, []
        for key, _ in self._selector.select(timeout=0):
            if key.fileobj is self._server:
                self._accept()
            elif key.fd in self._nameless:
                self._learn_name(key.fd, told)
            else:
                self._hear(key.data, told)
        for connection in self._others.values():
            connection.flush()
        return told

    def close(self) -> None:
        """Take leave of all."""
        self.send(_LEAVES)
        for connection in (*self._nameless.values(), *self._others.values()):
            connection.close()
        self._nameless, self._others = {}, {}
        self._selector.close()
        _open_sockets.discard(self._server)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # of which BlockingIOError is one: nobody else is there
            while True:  # thousands may come at once
                connection = _Connection(self._server.accept()[0])
                self._nameless[connection.socket.fileno()] = connection
                self._selector.register(connection.socket, selectors.EVENT_READ)

    def _learn_name(self, fd: int, told: list[tuple[int, Message | None]]) -> None:
        connection = self._nameless[fd]
        try:
            messages = connection.receive()
            is_ours = not messages or hmac.compare_digest(messages[0]["token"], self.token)
        except (ValueError, KeyError, TypeError):
            messages, is_ours = [], False
        if not is_ours or (connection.is_over and not messages):  # somebody else's
            del self._nameless[fd]
            self._selector.unregister(connection.socket)
            connection.close()
        elif messages:
            del self._nameless[fd]
            rank = messages[0]["rank"]
            self._others[rank] = connection
            self._selector.modify(connection.socket, selectors.EVENT_READ, rank)
            self._take(rank, messages[1:], told)

    def _hear(self, rank: int, told: list[tuple[int, Message | None]]) -> None:
        self._take(rank, self._others[rank].receive(), told)

    def _take(self, rank: int, messages: list[Message], told: list[tuple[int, Message | None]]) -> None:
        has_left = _LEAVES in messages
        told += [(rank, message) for message in messages if message != _LEAVES]
        if has_left or self._others[rank].is_over:
            connection = self._others.pop(rank)
            self._selector.unregister(connection.socket)
            connection.close()
            if not has_left:
                told.append((rank, None))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be switched off all the same
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def open_line(ranks: Ranks, host: str) -> Line:
    """Connect the ranks; all of them at the same time.

    Args:
        ranks: Those.
        host: Where rank 0 can be reached by all.
    """
    hub = Hub() if ranks.rank == 0 else None
    told = ranks.from_first("the line", hub and (hub.port, hub.token))
    if hub is None:
        return Spoke(ranks.rank, (host, told[0]), told[1])
    hub.wait_for(ranks.num_ranks - 1)
    return hub

"""A connection of each rank to rank 0, for messages at any time, and to notice when a process ends.

On another node than rank 0's, one rank passes on what the others of its node send and receive.

Nothing waits in it, and nothing is sent while there are no messages. When a process dies, of whatever cause, the kernel
closes its connection. So a process that is slow, stopped, or holds the interpreter's lock is never taken for dead. When
a machine is gone, the kernel gets no answer to its probes.
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

Message = dict[str, Any]

_CONNECT_SECONDS = 60.0
# A machine that is gone is noticed after 10 + 4 * 5 seconds.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# The kernel sends no probes while a message is on its way. A message that nobody acknowledges must end as soon.
_UNACKNOWLEDGED_MILLISECONDS = 30_000
LOOPBACK = "127.0.0.1"
"""Where the ranks of one machine reach each other."""
_MAX_LINE_BYTES = 1 << 17
MAX_NAME_BYTES = 200
"""The first message of a rank is not longer."""
_BACKLOG = 4096

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def watched(connection: socket.socket) -> socket.socket:
    """Prepare a connection to another rank, and return it: it never blocks, and shows when the other end is gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _open_sockets.add(connection)
    return connection


def _close_in_child() -> None:
    # A worker that outlives its rank would keep the connection open, so the other ranks would take the rank for alive.
    for connection in list(_open_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class Line(Protocol):
    """One rank's end of the connection. Only one thread uses it."""

    def send(self, message: Message) -> None:
        """Send a message to rank 0; rank 0 sends to all other ranks."""

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return the received messages, each with the rank that sent it; ``None``: the process of that rank is gone."""

    def close(self) -> None:
        """Say goodbye: the end of this process means nothing from now on. May be called twice."""


_LEAVES: Message = {"leaves": True}
_OF, _MESSAGE = "passed on for", "message"
"""The keys of a message that another rank passes on: the rank that it is of, and its content, `None` if it is gone."""


def _passed_on(rank: int, message: Message | None) -> Message:
    return {_OF: rank, _MESSAGE: message}


def _incoming_from(rank: int, messages: list[Message]) -> list[tuple[int, Message | None]]:
    """Return messages that came from a rank, each with the rank that it is of."""
    return [(message[_OF], message[_MESSAGE]) if _OF in message else (rank, message) for message in messages]


class _Connection:
    """Messages, one per line, over a socket that never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = watched(connection)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
        self._received = b""
        self._to_send = b""
        self.is_over = False

    def send(self, message: Message) -> None:
        self._to_send += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        while self._to_send and not self.is_over:
            try:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
            except BlockingIOError:  # noqa: PERF203 - the loop is for the remaining bytes
                return
            except OSError:  # the reading side notices the end
                self._to_send = b""

    def receive(self) -> list[Message]:
        """Return the available messages; afterwards, `is_over` says whether the other end is gone."""
        self.flush()
        while self._read():
            pass
        return [json.loads(line) for line in self._lines()]

    def receive_name(self) -> list[bytes]:
        """Return the lines of what has arrived, unread: who has sent them is not known yet.

        Raises:
            ValueError: If the first line is too long.
        """
        self._read()
        if len(self._received.split(b"\n", 1)[0]) > MAX_NAME_BYTES:
            raise ValueError(f"its first line has more than {MAX_NAME_BYTES} bytes")
        return self._lines()

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            more = b"" if self.is_over else self.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        self._received += more
        unfinished = len(self._received) - 1 - self._received.rfind(b"\n")
        self.is_over = not more or unfinished > _MAX_LINE_BYTES
        return not self.is_over

    def _lines(self) -> list[bytes]:
        *lines, self._received = self._received.split(b"\n")
        return lines

    def close(self) -> None:
        self.is_over = True
        _open_sockets.discard(self.socket)
        self.socket.close()


@final
class Spoke:
    """The line of a rank that is not rank 0.

    Args:
        rank: The number of this rank.
        address: The host and port of the `Hub`.
        token: The token of the `Hub`.
        hub_rank: The number of the rank with the `Hub`.

    Raises:
        RanksLostError: If that rank can't be reached there.
    """

    def __init__(self, rank: int, address: tuple[str, int], token: str, *, hub_rank: int = 0) -> None:
        self._hub_rank = hub_rank
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError as error:
            raise RanksLostError(
                f"rank {rank} can't reach port {address[1]} of rank {hub_rank}'s machine, {address[0]}: {error}. Allow "
                "the ranks to reach all ports of that machine"
            ) from error
        self._connection = _Connection(connection)
        self._connection.send({"rank": rank, "token": token})
        self._is_over = False

    def send(self, message: Message) -> None:
        """Send a message to rank 0."""
        self._connection.send(message)

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return the messages from rank 0."""
        if self._is_over:
            return []
        messages = self._connection.receive()
        incoming = _incoming_from(0, [message for message in messages if message != _LEAVES])
        self._is_over = _LEAVES in messages or self._connection.is_over
        if self._is_over and _LEAVES not in messages:
            incoming.append((self._hub_rank, None))
        return incoming

    def close(self) -> None:
        """Say goodbye."""
        if not self._connection.is_over:
            self._connection.send(_LEAVES)
        self._is_over = True
        self._connection.close()


@final
class Hub:
    """The line of rank 0, to which ranks connect.

    Args:
        token: What only the ranks of this fit know; by default a new one.
        host: The address at which ranks connect; by default each address of this machine.
    """

    def __init__(self, token: str = "", host: str = "") -> None:
        self.token = token or secrets.token_hex(16)
        self._server = listen(host)
        self.port: int = self._server.getsockname()[1]
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._nameless: dict[int, _Connection] = {}
        self._others: dict[int, _Connection] = {}
        self._early: list[tuple[int, Message | None]] = []

    def wait_for(self, num_others: int) -> None:
        """Wait until ranks are connected: they would miss messages that are sent before.

        Args:
            num_others: How many connect here.

        Raises:
            RanksLostError: If they are not connected within a minute.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        while len(self._others) < num_others:
            if time.monotonic() > deadline:
                raise RanksLostError(
                    f"only {len(self._others)} of {num_others} ranks have connected to port {self.port} of this machine"
                    f" within {_CONNECT_SECONDS:g} seconds. Allow the ranks to reach all ports of rank 0's machine"
                )
            self._early = self.receive()  # includes the earlier ones
            time.sleep(0.001)

    def send(self, message: Message) -> None:
        """Send a message to all other ranks."""
        for connection in self._others.values():
            connection.send(message)

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return the messages from the other ranks."""
        incoming, self._early = self._early, []
        for key, _ in self._selector.select(timeout=0):
            if key.fileobj is self._server:
                self._accept()
            elif key.fd in self._nameless:
                self._learn_name(key.fd, incoming)
            else:
                self._hear(key.data, incoming)
        for connection in self._others.values():
            connection.flush()
        return incoming

    def close(self) -> None:
        """Say goodbye to all."""
        self.send(_LEAVES)
        for connection in (*self._nameless.values(), *self._others.values()):
            connection.close()
        self._nameless, self._others = {}, {}
        self._selector.close()
        _open_sockets.discard(self._server)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # includes BlockingIOError: no more connections are waiting
            while True:  # thousands may come at the same time
                connection = _Connection(self._server.accept()[0])
                self._nameless[connection.socket.fileno()] = connection
                self._selector.register(connection.socket, selectors.EVENT_READ)

    def _learn_name(self, fd: int, incoming: list[tuple[int, Message | None]]) -> None:
        connection, lines, is_ours = self._nameless[fd], [], False
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            lines = connection.receive_name()
            name = json.loads(lines[0]) if lines else {}
            is_ours = not lines or hmac.compare_digest(name["token"], self.token)
        if not is_ours or (connection.is_over and not lines):  # a stranger's connection
            del self._nameless[fd]
            self._selector.unregister(connection.socket)
            connection.close()
        elif lines:
            del self._nameless[fd]
            rank = name["rank"]
            self._others[rank] = connection
            self._selector.modify(connection.socket, selectors.EVENT_READ, rank)
            self._take(rank, [json.loads(line) for line in lines[1:]], incoming)

    def _hear(self, rank: int, incoming: list[tuple[int, Message | None]]) -> None:
        self._take(rank, self._others[rank].receive(), incoming)

    def _take(self, rank: int, messages: list[Message], incoming: list[tuple[int, Message | None]]) -> None:
        has_left = _LEAVES in messages
        incoming += _incoming_from(rank, [message for message in messages if message != _LEAVES])
        if has_left or self._others[rank].is_over:
            connection = self._others.pop(rank)
            self._selector.unregister(connection.socket)
            connection.close()
            if not has_left:
                incoming.append((rank, None))


def listen(host: str = "") -> socket.socket:
    """Return a socket that listens on any port of an address. It does not stay open in a fork.

    Args:
        host: The address; by default each address of this machine.
    """
    server = socket.create_server((host, 0), backlog=_BACKLOG) if host else _create_server()
    _open_sockets.add(server)
    return server


def _create_server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be switched off nevertheless
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


@final
class Relay:
    """The line of a rank that passes on what the other ranks of its node send and receive.

    Args:
        hub: The other ranks of the node are connected to it.
        spoke: It is connected to rank 0.
    """

    def __init__(self, hub: Hub, spoke: Spoke) -> None:
        self._hub = hub
        self._spoke = spoke

    def send(self, message: Message) -> None:
        """Send a message to rank 0."""
        self._spoke.send(message)

    def receive(self) -> list[tuple[int, Message | None]]:
        """Return the messages from rank 0, and pass messages on in both directions."""
        for rank, message in self._hub.receive():
            self._spoke.send(_passed_on(rank, message))
        incoming = self._spoke.receive()
        for rank, message in incoming:
            self._hub.send(_passed_on(rank, message))
        return incoming

    def close(self) -> None:
        """Say goodbye, in both directions."""
        self.receive()
        self._hub.close()
        self._spoke.close()

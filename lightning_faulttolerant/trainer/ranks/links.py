"""Connections between two ranks that carry whole messages of any size, each with a time limit.

An end of the other process, of whatever cause, closes its connection. When a machine is gone, the kernel gets no answer
to its probes. A message is read up to its last byte and no further, so nothing is lost between two of them.
"""

from __future__ import annotations

import hmac
import json
import select
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from typing import final

from lightning_faulttolerant.trainer.ranks.connection import MAX_NAME_BYTES, listen, watched

_LENGTH = struct.Struct("<Q")
_NAMED_WITHIN_SECONDS = 10.0
_CHUNK_BYTES = 1 << 20


@final
class Link:
    """One end of a connection to another rank.

    Args:
        connection: The connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = watched(connection)
        self._header = b""
        self._message = bytearray()
        self._num_received = 0

    def send(self, message: bytes, deadline: float) -> None:
        """Send a message.

        Args:
            message: Any bytes.
            deadline: The last moment, by ``time.monotonic``.

        Raises:
            OSError: If the other end is gone, or does not take the message in time.
        """
        for data in (_LENGTH.pack(len(message)), message):
            left = memoryview(data)
            while left:
                try:
                    left = left[self.socket.send(left[:_CHUNK_BYTES]) :]
                except BlockingIOError:  # noqa: PERF203 - the loop is for the remaining bytes
                    if not _is_ready(self.socket, deadline, select.POLLOUT):
                        raise TimeoutError("it did not take a message in time") from None

    def take(self, *, max_bytes: int | None = None) -> bytes | None:
        """Return a message if it is complete, and ``None`` if more of it has yet to come.

        Args:
            max_bytes: The largest number of bytes that a message may have; ``None`` for any.

        Raises:
            OSError: If the other end is gone, or its message is too long.
        """
        while len(self._header) < _LENGTH.size:
            data = self._read(_LENGTH.size - len(self._header))
            if data is None:
                return None
            self._header += data
            if len(self._header) == _LENGTH.size:
                num_bytes = _LENGTH.unpack(self._header)[0]
                if max_bytes is not None and num_bytes > max_bytes:
                    raise OSError(f"its message has {num_bytes} bytes")
                self._message, self._num_received = bytearray(num_bytes), 0
        view = memoryview(self._message)
        while self._num_received < len(view):
            try:
                num_bytes = self.socket.recv_into(view[self._num_received :])
            except BlockingIOError:
                return None
            if not num_bytes:
                raise ConnectionResetError("its connection is closed")
            self._num_received += num_bytes
        view.release()
        message, self._header, self._message = bytes(self._message), b"", bytearray()
        return message

    def _read(self, num_bytes: int) -> bytes | None:
        try:
            data = self.socket.recv(num_bytes)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("its connection is closed")
        return data

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self.socket.close()


class LostLinkError(OSError):
    """A rank is gone, or has not answered in time.

    Args:
        rank: The number of the rank.
        reason: Why.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank


def receive_from(links: Mapping[int, Link], deadline: float) -> dict[int, bytes]:
    """Receive one message over each link, in any order.

    Args:
        links: The links, by the number of the rank at the other end.
        deadline: The last moment, by ``time.monotonic``.

    Raises:
        LostLinkError: If one of the ranks is gone, or does not answer in time.
    """
    messages: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for rank, link in links.items():
            selector.register(link.socket, selectors.EVENT_READ, rank)
        while len(messages) < len(links):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                silent = min(links.keys() - messages.keys())
                raise LostLinkError(silent, "it did not answer in time")
            for key, _ in ready:
                try:
                    message = links[key.data].take()
                except OSError as error:
                    raise LostLinkError(key.data, str(error)) from error
                if message is not None:
                    messages[key.data] = message
                    selector.unregister(key.fileobj)
    return messages


def _is_ready(connection: socket.socket, deadline: float, event: int) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


def connect_to(address: tuple[str, int], *, rank: int, token: str, deadline: float) -> Link:
    """Connect to the listener of another rank.

    Args:
        address: Its host and port.
        rank: The number of this rank.
        token: What only the ranks of this fit know.
        deadline: The last moment, by ``time.monotonic``.

    Raises:
        OSError: If it can't be reached.
    """
    try:
        link = Link(socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic())))
        link.send(json.dumps({"rank": rank, "token": token}).encode(), deadline)
    except OSError as error:
        host, port = address
        raise OSError(
            f"rank {rank} can't reach port {port} of {host}: {error}. Allow the ranks to reach all ports of each other"
        ) from error
    return link


@final
class Listener:
    """Waits for the connections of other ranks.

    Args:
        token: What only the ranks of this fit know.
        host: The address at which they connect; by default each address of this machine.
    """

    def __init__(self, token: str, host: str = "") -> None:
        self._token = token
        self._server = listen(host)
        self.port: int = self._server.getsockname()[1]

    def accept(self, num_links: int, deadline: float) -> dict[int, Link]:
        """Return the links of other ranks, by their numbers. Connections of strangers are closed.

        Args:
            num_links: How many ranks connect.
            deadline: The last moment, by ``time.monotonic``.

        Raises:
            OSError: If they don't come in time.
        """
        links: dict[int, Link] = {}
        while len(links) < num_links:
            self._server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                link = Link(self._server.accept()[0])
            except TimeoutError:
                raise TimeoutError(f"only {len(links)} of {num_links} ranks have connected") from None
            rank = self._name_of(link)
            if rank is None:
                link.close()
            else:
                links[rank] = link
        return links

    def _name_of(self, link: Link) -> int | None:
        deadline, message = time.monotonic() + _NAMED_WITHIN_SECONDS, None
        try:
            while message is None and _is_ready(link.socket, deadline, select.POLLIN):
                message = link.take(max_bytes=MAX_NAME_BYTES)
            told = json.loads(message or b"{}")
            return int(told["rank"]) if hmac.compare_digest(told["token"], self._token) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        """Stop listening; the links stay."""
        self._server.close()

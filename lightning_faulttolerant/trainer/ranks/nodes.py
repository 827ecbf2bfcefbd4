"""The ranks exchange values by node: each rank with the first of its node, and those with rank 0.

So a rank has a connection to the first rank of its node, that one has one to each rank of the node and one to rank 0,
and rank 0 has one to each node. No other connection exists, however many ranks there are. A connection carries whole
messages of any size, each with a time limit.

When a rank is lost inside an exchange, the rank that notices closes all its connections. So each rank that waits
notices it in turn, at once, however many ranks are in between. An end of the other process, of whatever cause, closes
its connection. When a machine is gone, the kernel gets no answer to its probes. A message is read up to its last byte
and no further, so nothing is lost between two of them.
"""

from __future__ import annotations

import hmac
import json
import os
import pickle
import resource
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from lightning_faulttolerant.errors import RanksLostError, UnsupportedTrainerError
from lightning_faulttolerant.trainer.ranks.connection import LOOPBACK, MAX_NAME_BYTES, listen, watched

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


_KEY = "lightning_faulttolerant/nodes"
_SPARE_DESCRIPTORS = 16  # an autosave, connections to workers


def node_name() -> str:
    """Return a name that exactly those processes share that can reach each other at the loopback address."""
    parts = [socket.gethostname()]
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists():
        parts.append(boot.read_text().strip())
    if network.exists():  # containers on one machine
        parts.append(str(os.stat(network).st_ino))
    return "/".join(parts)


@final
class NodeGroup:
    """All ranks of a fit, which exchange Python objects by node; created by all of them at the same time.

    Args:
        store: A store of ``torch.distributed`` that all ranks share.
        timeout: How long one exchange may wait for the slowest rank.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        host: Where all nodes can reach rank 0.
        node: The name of this rank's node.

    Raises:
        RanksLostError: From each exchange too: if a rank is gone, does not answer in time, or is at another step.
        UnsupportedTrainerError: If this process may not open that many connections.
    """

    def __init__(
        self, store: object, timeout: timedelta, *, rank: int, num_ranks: int, host: str, node: str | None = None
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.host = ""
        """Where this rank reaches the rank that passes its values on."""
        self._timeout = timeout
        self._up: Mapping[int, Link] = {}
        self._down: Mapping[int, Link] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            meeting = _Meeting(store, timeout, rank, num_ranks, deadline)
            self.host, self._up, self._down = meeting.connect(host, node_name() if node is None else node)
        except UnsupportedTrainerError:
            raise
        except (OSError, RuntimeError) as error:  # the store raises RuntimeError
            raise self._silence("the first exchange", error) from error

    @property
    def above(self) -> int:
        """The number of the rank that passes this rank's values on; on rank 0 its own."""
        return next(iter(self._up), self.rank)

    @property
    def below(self) -> list[int]:
        """The numbers of the ranks whose values this rank passes on."""
        return sorted(self._down)

    def label(self, rank: int) -> str:
        """Return a rank's name for messages."""
        return f"rank {rank}"

    def close(self) -> None:
        """Close the connections; each rank does so alone."""
        for link in (*self._up.values(), *self._down.values()):
            link.close()
        self._up, self._down = {}, {}

    def to_all(self, step: str, value: object) -> list[Any]:
        """Send a value to all ranks, and return all values in order."""
        values: list[object] = self.from_first(step, self.to_first(step, value))
        return values

    def to_first(self, step: str, value: object) -> list[Any] | None:
        """Send a value to the first rank; return all values in order on that rank, and ``None`` on the others."""
        deadline = self._deadline(step)
        told = [(self.rank, pickle.dumps((step, value)))]
        try:
            for message in receive_from(self._down, deadline).values():
                told += pickle.loads(message)  # the values in it are bytes here: only rank 0 loads them
            self._send(self._up, pickle.dumps(told), deadline)
        except OSError as error:
            raise self._silence(step, error) from error
        if self.rank > 0:
            return None
        answers = [pickle.loads(message) for _, message in sorted(told, key=lambda item: item[0])]
        if any(place != step for place, _ in answers):
            places = ", ".join(f"rank {rank} is at {place!r}" for rank, (place, _) in enumerate(answers))
            raise self._out_of_step(places)
        return [value for _, value in answers]

    def from_first(self, step: str, value: object) -> Any:
        """Return the first rank's value on every rank."""
        deadline = self._deadline(step)
        message = pickle.dumps((step, value)) if self.rank == 0 else b""
        try:
            for received in receive_from(self._up, deadline).values():
                message = received
            self._send(self._down, message, deadline)
        except OSError as error:
            raise self._silence(step, error) from error
        place, told = pickle.loads(message)
        if place != step:
            raise self._out_of_step(f"rank 0 is at {place!r}, this one at {step!r}")
        return told

    def _deadline(self, step: str) -> float:
        if len(self._up) + len(self._down) == 0:
            raise self._silence(step, OSError("the connections are closed."))
        return time.monotonic() + self._timeout.total_seconds()

    def _send(self, links: Mapping[int, Link], message: bytes, deadline: float) -> None:
        for rank, link in links.items():
            try:
                link.send(message, deadline)
            except OSError as error:  # noqa: PERF203 - the error names the rank
                raise LostLinkError(rank, str(error)) from error

    def _silence(self, step: str, error: Exception) -> RanksLostError:
        self.close()  # so that the ranks at the other ends notice it, too
        reason = str(error).splitlines()[0].removesuffix(".")
        return RanksLostError(
            f"rank {self.rank} had no answer at {step!r}: {reason}. Another rank has died, has failed earlier, or took "
            f"longer than {self._timeout}"
        )

    def _out_of_step(self, places: str) -> RanksLostError:
        self.close()
        return RanksLostError(f"the ranks are out of step: {places}")


class _Meeting:
    """Finds the other ranks of a start in a store, and connects this one.

    Args:
        store: A store that all ranks share.
        timeout: How long to wait in the store.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        deadline: The last moment for everything, by ``time.monotonic``.
    """

    def __init__(self, store: Any, timeout: timedelta, rank: int, num_ranks: int, deadline: float) -> None:
        self._store = store
        self._timeout = timeout
        self._rank = rank
        self._num_ranks = num_ranks
        self._deadline = deadline
        # Each fit in these processes has its own keys. All ranks count alike.
        self._prefix = f"{_KEY}/{store.add(f'{_KEY}/calls/{rank}', 1)}"

    def connect(self, host: str, node: str) -> tuple[str, dict[int, Link], dict[int, Link]]:
        """Connect this rank.

        Returns:
            The host of the rank that passes values on, the link to it, and the links to the ranks whose values this one
            passes on.
        """
        token = secrets.token_hex(16) if self._rank == 0 else ""
        listener = Listener(token) if self._rank == 0 else None
        if listener is not None:
            self._set("first", node, str(listener.port), token)
        first_node, port, token = self._get("first")
        is_with_first = node == first_node
        is_leader = self._rank > 0 and not is_with_first and self._add(f"of/{node}") == 1
        if is_leader:
            listener = Listener(token, LOOPBACK)  # all ranks that connect to it are on its node
            self._set(f"at/{node}", str(self._rank), str(listener.port))
        self._add("leaders", int(is_leader))
        self._add("with first", int(is_with_first))
        if self._add("arrived") == self._num_ranks:
            self._store.set(f"{self._prefix}/all", "1")
        self._store.wait([f"{self._prefix}/all"], self._timeout)
        num_down = self._num_down(node, is_leader=is_leader)
        up: dict[int, Link] = {}
        leader, address = 0, (LOOPBACK if is_with_first else host, int(port))
        try:
            refusal = _too_few_descriptors(num_down + 1, self._num_ranks)
            if self._rank > 0:
                if not is_with_first and not is_leader:
                    told_rank, told_port = self._get(f"at/{node}")
                    leader, address = int(told_rank), (LOOPBACK, int(told_port))
                try:
                    up[leader] = connect_to(address, rank=self._rank, token=token, deadline=self._deadline)
                except OSError:
                    if refusal is None:  # otherwise the rank above refuses for the same reason, most likely
                        raise
            if refusal is not None:  # once connected: so the rank above notices it
                raise UnsupportedTrainerError(refusal)
            return address[0], up, {} if listener is None else listener.accept(num_down, self._deadline)
        except BaseException:
            for link in up.values():
                link.close()
            raise
        finally:
            if listener is not None:
                listener.close()

    def _num_down(self, node: str, *, is_leader: bool) -> int:
        if self._rank == 0:
            return self._add("leaders", 0) + self._add("with first", 0) - 1
        return self._add(f"of/{node}", 0) - 1 if is_leader else 0

    def _add(self, name: str, number: int = 1) -> int:
        return int(self._store.add(f"{self._prefix}/{name}", number))

    def _set(self, name: str, *values: str) -> None:
        self._store.set(f"{self._prefix}/{name}", "\n".join(values))

    def _get(self, name: str) -> list[str]:
        self._store.wait([f"{self._prefix}/{name}"], self._timeout)
        text: str = self._store.get(f"{self._prefix}/{name}").decode()
        return text.split("\n")


def _too_few_descriptors(num_links: int, num_ranks: int) -> str | None:
    """Return why this process may not open its connections, two with each rank next to it; ``None`` if it may."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")
    num_open = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    needed = num_open + 2 * num_links + _SPARE_DESCRIPTORS
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    return (
        f"This process may have {limit} files and connections open, has {num_open}, and {num_ranks} ranks that save"
        f" together need {needed}. They could not be connected. Start each rank after"
        f" `ulimit -n {max(needed, 65536)}`, or leave FaultTolerance out."
    )

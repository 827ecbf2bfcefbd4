"""Ranks agree on one boundary, however far apart they are, exchange values in order, and never wait for a lost one."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.trainer.ranks.agreement import SAVE, STOP, Chair, Member
from lightning_faulttolerant.trainer.ranks.connection import Hub
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup
from lightning_faulttolerant.trainer.ranks.strategies import connect_all, open_line
from tests.ranks import TIMEOUT, on_ranks

NUM_RANKS = 3


class Ranks:
    """Threads as ranks; one thread speaks for all of them, and `deliver` determines the order of messages."""

    def __init__(self) -> None:
        self.members = [Member() for _ in range(NUM_RANKS)]
        self.chair = Chair(NUM_RANKS)
        self._is_over = threading.Event()

    def deliver(self) -> None:
        """Send and receive the messages of every rank once."""
        for rank, member in enumerate(self.members):
            member.tick()
            while member.outbox:
                self.chair.hear(rank, member.outbox.popleft())
            while self.chair.outbox:
                message = self.chair.outbox.popleft()
                for each in self.members:
                    each.hear(message)

    def _speak(self) -> None:
        while not self._is_over.is_set():
            self.deliver()
            time.sleep(0.0005)

    def boundaries(self) -> Iterator[int]:
        """Number the boundaries of a rank, without an end: a slow rank may ask late."""
        return itertools.takewhile(lambda _: not self._is_over.is_set(), itertools.count())

    def run(self, main: Callable[[int, Member], Any]) -> None:
        """Run `main` for each rank in its own thread."""
        with ThreadPoolExecutor(NUM_RANKS + 1) as pool:
            speaker = pool.submit(self._speak)
            ended = [pool.submit(main, rank, member) for rank, member in enumerate(self.members)]
            try:
                for each in ended:
                    each.result()
            finally:
                self._is_over.set()
            speaker.result()


@settings(max_examples=20, deadline=None)
@given(
    saves=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    delays=st.lists(st.integers(0, 2), min_size=NUM_RANKS, max_size=NUM_RANKS),
    stop=st.integers(10, 60),
)
def test_all_save_at_the_same_boundaries(saves: list[int], delays: list[int], stop: int) -> None:
    """Rank 0 requests saves, another rank a stop: all ranks do each at one boundary, however they drift.

    No rank gets further ahead than the slowest one can catch up with: the end of a window would hold it.
    """
    ranks = Ranks()
    places = [0] * NUM_RANKS
    done: dict[int, list[tuple[int, str]]] = {rank: [] for rank in range(NUM_RANKS)}

    def main(rank: int, member: Member) -> None:
        for boundary in ranks.boundaries():
            places[rank] = boundary
            while boundary > min(places) + 200:
                time.sleep(0.0002)
            if rank == 0 and boundary in saves:
                member.want_save({"batch": boundary, "num_batches": 0, "length": 1})
            if rank == 2 and boundary == stop:
                member.want_stop("143 0 SIGTERM")
            wish = member.at_boundary()
            if wish is not None:
                done[rank].append((boundary, wish))
            if wish == STOP:
                return
            time.sleep(0.0002 * delays[rank])

    ranks.run(main)
    assert done[0] == done[1] == done[2]
    assert [wish for _, wish in done[0]].count(STOP) == 1
    assert all(wish == SAVE for _, wish in done[0][:-1])


def test_rank_that_has_passed_the_appointed_boundary_does_not_stop_elsewhere() -> None:
    """An appointment that a broken promise made possible is an error, not a save at another place."""
    member = Member()
    for _ in range(5):
        member.at_boundary()
    member.hear({"at": 2, "wish": SAVE})
    with pytest.raises(RanksLostError, match="the ranks agreed to save at boundary 2, but this rank is already at 5"):
        member.at_boundary()


# Validation runs.


def validate(member: Member, num_batches: int, seconds: float) -> bool:
    """Run a validation run of a rank as Lightning does; return whether it was stopped inside."""
    member.begin_run()
    for _ in range(num_batches):
        if member.at_validation_batch():
            return True
        time.sleep(seconds)
    member.end_batches()
    return False


@settings(max_examples=40, deadline=None)
@given(
    num_batches=st.lists(st.integers(1, 40), min_size=NUM_RANKS, max_size=NUM_RANKS),
    delays=st.lists(st.integers(1, 4), min_size=NUM_RANKS, max_size=NUM_RANKS),
    asked=st.integers(0, 2),
    at=st.integers(0, 10),
    meets=st.booleans(),
)
def test_validation_run_is_stopped_by_all_or_by_none(
    num_batches: list[int], delays: list[int], asked: int, at: int, meets: bool
) -> None:
    """However many batches each rank has, all stop in the run, or all finish it and stop at the boundary after it."""
    ranks = Ranks()
    found: dict[int, bool | int] = {}
    collective = threading.Barrier(NUM_RANKS, timeout=60)

    def main(rank: int, member: Member) -> None:
        if rank == asked:
            threading.Timer(0.001 * at, member.want_stop, ["143 0 SIGTERM"]).start()
        for boundary in ranks.boundaries():
            if member.at_boundary() is not None:
                found[rank] = boundary
                return
            if validate(member, num_batches[rank], 0.0005 * delays[rank]):
                found[rank] = True
                return
            if meets:
                collective.wait()  # the metrics of the run are reduced

    ranks.run(main)
    assert len(found) == NUM_RANKS
    assert len(set(found.values())) == 1
    assert {isinstance(each, bool) for each in found.values()} in ({True}, {False})


# Values and messages


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

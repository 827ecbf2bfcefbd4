"""Ranks exchange values and messages: in order, and a lost rank is an error on the others, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.state.tensors import TensorMarks, gradients_state, load_gradients
from lightning_faulttolerant.trainer.ranks.connection import Hub, Spoke
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup
from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from tests.ranks import on_ranks
from tests.trainer.ranks.light_ranks import run_light


def test_first_learns_from_all_and_tells_all(tmp_path: Path) -> None:
    """Rank 0 gets every value in the ranks' order, and its own value reaches all ranks."""

    def main(rank: int) -> Any:
        ranks = connect_all()
        told = ranks.to_first("values", {"rank": rank, "size": rank * 1000 * "x"})
        numbers = None if told is None else [value["rank"] for value in told]
        answer = [ranks.rank, ranks.num_ranks, numbers, ranks.from_first("value", f"of {rank}")]
        ranks.close()
        return answer

    expected = [[0, 3, [0, 1, 2], "of 0"], [1, 3, None, "of 0"], [2, 3, None, "of 0"]]
    assert on_ranks(main, tmp_path / "ranks", num_ranks=3) == expected


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


@pytest.mark.parametrize(("method", "dead"), [("to_first", (4, 5)), ("to_all", (0,))], ids=["node", "first"])
def test_dead_ranks_end_an_exchange_by_node(tmp_path: Path, method: str, dead: tuple[int, ...]) -> None:
    """If a node or rank 0 dies inside an exchange, every rank raises in this one or the next, in seconds."""

    def main(rank: int) -> Any:
        store, timeout = dist.FileStore(str(tmp_path / "store"), 6), timedelta(seconds=60)
        ranks = NodeGroup(store, timeout, rank=rank, num_ranks=6, host="127.0.0.1", node=f"node {rank // 2}")
        assert ranks.to_all("connected", rank) == list(range(6))
        if rank in dead:
            os.kill(os.getpid(), signal.SIGKILL)
        getattr(ranks, method)("step", os.urandom(300_000))
        ranks.to_all("next", rank)
        return "not noticed"

    for rank, answer in enumerate(run_light(main, tmp_path, num_ranks=6)):
        expected = "dead" if rank in dead else f"RanksLostError: rank {rank} had no answer at '"
        assert answer.startswith(expected), answer


# The line between ranks: messages that nobody waits for.

Told = list[tuple[int, Any]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Return rank 0's end of the line."""
    made = Hub()
    yield made
    made.close()


def spoke(hub: Hub, rank: int) -> Spoke:
    """Connect a rank."""
    return Spoke(rank, ("127.0.0.1", hub.port), hub.token)


def until(receive: Callable[[], Told], number: int) -> Told:
    """Return the received messages once there are `number` of them; pytest's timeout ends a test without them."""
    told: Told = []
    while len(told) < number:
        told += receive()
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
    """A killed rank is reported once, after its last message; one that stands still or takes leave is not."""
    leaves = spoke(hub, 2)
    leaves.send({"alive": 2})
    assert until(hub.receive, 1) == [(2, {"alive": 2})]
    leaves.close()
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
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""


def test_rank_that_cannot_reach_rank_0_says_why() -> None:
    """The error for a closed port names the address and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RanksLostError, match=rf"rank 1 can't reach port {port} of rank 0's machine, 127.0.0.1: .*all"):
        Spoke(1, ("127.0.0.1", port), "token")


# Sharded tensors.


def _shards(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)]))
    module.bias = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    marks = TensorMarks([module.weight])
    unmoved = [marks.unmoved([module.weight])]
    if rank == 1:
        module.weight.to_local().data[0, 0] += 1  # type: ignore[operator]
    unmoved.append(marks.unmoved([module.weight]))
    module.weight.grad = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    module.bias.grad = DTensor.from_local(torch.full((2,), float(rank + 1)), mesh, [Partial()])
    state = gradients_state(module)
    module.weight.grad = module.bias.grad = None
    load_gradients(module, state)
    weight: Any = module.weight.grad
    bias: Any = module.bias.grad
    placements = [repr(weight.placements), repr(bias.placements)]
    return [unmoved, torch.equal(weight.to_local(), torch.ones(1, 3)), bias.to_local().tolist(), placements]


def test_gradients_in_shards_come_back_as_they_were(tmp_path: Path) -> None:
    """Each rank sees changes of its own part; a gradient that is a pending sum comes back unsummed."""
    placements = ["(Shard(dim=0),)", "(Partial(sum),)"]
    assert on_ranks(_shards, tmp_path) == [
        [[True, True], True, [1.0, 1.0], placements],
        [[True, False], True, [2.0, 2.0], placements],
    ]

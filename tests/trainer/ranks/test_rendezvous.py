"""The ranks of one start agree on a part of torchrun's store, and Lightning creates its process group there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed as dist

from lightning_faulttolerant.trainer.ranks.strategies import agree_on_prefix
from tests.runs import fit_net
from tests.scripts import protected

UNDER_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
SECONDS = timedelta(seconds=20)


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of an agent's store."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Set what torchrun sets for one rank."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    for name, value in {**ranks, **place, **UNDER_TORCHRUN}.items():
        monkeypatch.setenv(name, value)


def agreed(port: int, num_ranks: int) -> set[str]:
    """Return the prefixes on which ranks agree that start together, each with its own connection."""

    def of(rank: int) -> str:
        store = dist.TCPStore("localhost", port, is_master=False, timeout=SECONDS)
        return agree_on_prefix(store, rank=rank, num_ranks=num_ranks, timeout=SECONDS)

    with ThreadPoolExecutor(num_ranks) as ranks:
        return set(ranks.map(of, range(num_ranks)))


def test_ranks_agree_and_leave_out_the_dead(port: int) -> None:
    """All ranks of a start have one prefix, none has it twice, and a rank that died while it waited is no obstacle."""
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError):  # it waits for a rank 0 that never comes
        agree_on_prefix(store, rank=1, num_ranks=3, timeout=SECONDS)
    [first] = agreed(port, 3)
    [second] = agreed(port, 3)
    [alone] = agreed(port, 1)
    assert len({first, second, alone}) == 3


class Asked(Exception):  # noqa: N818 - it tells what a process group was to be created from
    """Ends the creation of a process group."""


@pytest.fixture
def stops_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch raise the arguments of a process group, instead of creating it."""

    def create(*positional: Any, **arguments: Any) -> None:
        raise Asked(positional, arguments)

    monkeypatch.setattr(dist, "init_process_group", create)


@pytest.mark.usefixtures("under_torchrun", "stops_there")
def test_fit_waits_for_the_ranks_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the callback, a rank creates no process group before it has an answer from the rank 0 of its start."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    strategy = DDPStrategy(timeout=timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):
        fit_net([protected()], tmp_path, devices=2, strategy=strategy)
    with pytest.raises(Asked):
        fit_net([], tmp_path, devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=0.2)))

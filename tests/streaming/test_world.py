from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_faulttolerant import StreamingDataset
from lightning_faulttolerant.streaming.world import World, current_world
from tests.ranks import on_ranks
from tests.streaming.shards import numbers, write_numbers

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
LIGHTNING = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
CASES = {
    "alone": ({}, World()),
    "torchrun": (TORCHRUN, World(rank=5, num_ranks=8, ranks_per_node=4)),
    "Lightning's launcher": (LIGHTNING, World(rank=1, num_ranks=2, ranks_per_node=2)),
    "its second node, told the size of a node": (
        {**LIGHTNING, "WORLD_SIZE": "4", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        World(rank=3, num_ranks=4, ranks_per_node=2),
    ),
    "srun": (SLURM, World(rank=3, num_ranks=4, ranks_per_node=2)),
    "a batch script of SLURM, not by srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
        World(),
    ),
}


def test_the_rank_is_what_the_launcher_says() -> None:
    """The environment of each launcher gives this rank; `replication` ranks are one reader, on its node."""
    for case, (environment, expected) in CASES.items():
        assert current_world(environment) == expected, case
    for rank in range(8):
        world = World(rank=rank, num_ranks=8, ranks_per_node=4).replicated(2)
        assert world == World(rank=rank // 2, num_ranks=4, ranks_per_node=2)


def _read(directory: str, rank: int) -> list[Any]:
    dataset = StreamingDataset(directory, shuffle=True)
    samples = numbers(dataset)
    state = dataset.state_dict(len(samples) * dist.get_world_size(), from_beginning=True)
    return [len(dataset), samples, state, numbers(StreamingDataset(directory, shuffle=True, replication=2))]


def test_the_ranks_of_a_process_group_share_an_epoch(tmp_path: Path) -> None:
    """Each rank reads its part, all samples are read, the state is the same; with replication, they read the same."""
    directory = write_numbers(tmp_path / "data", 101)
    answers = on_ranks(functools.partial(_read, directory), tmp_path / "ranks")
    (len_0, samples_0, state_0, same_0), (len_1, samples_1, state_1, same_1) = answers
    assert len_0 == len_1 == len(samples_0) == len(samples_1) == 51
    assert set(samples_0) | set(samples_1) == set(range(101)) == set(same_0)
    assert (state_0, same_0) == (state_1, same_1)
    assert (state_0["epoch"], state_0["sample_in_epoch"], len(same_0)) == (1, 0, 101)


def test_the_rank_is_asked_for_when_an_iteration_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set created before the launcher has set anything still reads its part."""
    dataset = StreamingDataset(write_numbers(tmp_path / "data", 40))
    for name, value in LIGHTNING.items():
        monkeypatch.setenv(name, value)
    assert len(dataset) == 20
    assert numbers(dataset) == list(range(1, 40, 2))

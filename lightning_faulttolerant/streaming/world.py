"""The reader: this process among all ranks, and this worker among those of its rank.

It is determined when an iteration begins, never in a constructor: a data set is often created before the process group.
This module creates no process group and touches no device.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lightning_faulttolerant.errors import StreamingError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of one reader.

    Args:
        rank: The rank of this process among those that get different data, from 0.
        num_ranks: The number of those ranks.
        ranks_per_node: The number of them that share a machine and its cache.
        worker: The worker of this rank, from 0.
        num_workers: The workers of each rank, at least 1: a process without workers counts as its own worker.
    """

    rank: int = 0
    num_ranks: int = 1
    ranks_per_node: int = 1
    worker: int = 0
    num_workers: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.num_ranks and 0 <= self.worker < self.num_workers):
            raise StreamingError(f"This reader is not possible: {self}. Set RANK and WORLD_SIZE as a launcher does.")
        if self.ranks_per_node < 1 or self.num_ranks % self.ranks_per_node:
            raise StreamingError(
                f"{self.num_ranks} ranks can't be divided into {self.ranks_per_node} per node. Set LOCAL_WORLD_SIZE "
                "to the number of ranks on a node, equal on all nodes, or unset it."
            )

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self.num_ranks // self.ranks_per_node

    @property
    def readers_per_node(self) -> int:
        """The number of processes of a machine that read, each its own part."""
        return self.ranks_per_node * self.num_workers

    def replicated(self, replication: int) -> World:
        """Return the world in which each run of `replication` ranks gets the same data.

        Raises:
            ValueError: If the number of ranks is not a multiple of it.
        """
        if self.num_ranks % replication:
            raise ValueError(
                f"replication={replication} does not divide the {self.num_ranks} ranks. Some ranks would get other "
                "samples than the rest of their group."
            )
        per_node = self.ranks_per_node // replication if self.ranks_per_node % replication == 0 else 1
        num_ranks = self.num_ranks // replication
        return replace(self, rank=self.rank // replication, num_ranks=num_ranks, ranks_per_node=per_node)

    def in_this_worker(self) -> World:
        """Return this world with the current data-loading worker, if this process is one."""
        info = get_worker_info()
        if info is None:
            return replace(self, worker=0, num_workers=1)
        return replace(self, worker=info.id, num_workers=info.num_workers)


def current_world(environment: Mapping[str, str] | None = None) -> World:
    """Return the rank of this process, without its workers.

    The process group comes first, if one exists. Then comes the environment as set by torchrun, Lightning's own
    launcher, and SLURM. Without any of them, this process is alone.

    Args:
        environment: ``os.environ`` by default.

    Raises:
        StreamingError: If there are several ranks and the rank of this process is unknown.
    """
    env = os.environ if environment is None else environment
    if dist.is_available() and dist.is_initialized():
        num_ranks = dist.get_world_size()
        return World(rank=dist.get_rank(), num_ranks=num_ranks, ranks_per_node=_ranks_per_node(env, num_ranks))
    if "WORLD_SIZE" in env:
        num_ranks = int(env["WORLD_SIZE"])
        return World(rank=_rank(env, num_ranks), num_ranks=num_ranks, ranks_per_node=_ranks_per_node(env, num_ranks))
    if _is_slurm_task(env):
        num_ranks = int(env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"]))
        rank = int(env["SLURM_PROCID"])
        return World(rank=rank, num_ranks=num_ranks, ranks_per_node=_ranks_per_node(env, num_ranks))
    return World()


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedWorld:
    """The world that a main process found, for a worker that it starts again and that might find another one.

    Args:
        process_id: The id of the main process.
        world: The world of that process.
    """

    process_id: int
    world: World

    @classmethod
    def of_this_process(cls) -> HandedWorld | None:
        """Return the world of this process, if it can be determined here."""
        try:
            return cls(process_id=os.getpid(), world=current_world())
        except StreamingError:
            return None

    @property
    def is_for_this_worker(self) -> bool:
        """Whether this process is a data-loading worker of the main process."""
        parent = multiprocessing.parent_process()
        return get_worker_info() is not None and parent is not None and parent.pid == self.process_id


def _rank(env: Mapping[str, str], num_ranks: int) -> int:
    if "RANK" in env:
        return int(env["RANK"])
    node = int(env.get("NODE_RANK", env.get("GROUP_RANK", "0")))
    if "LOCAL_RANK" in env and (node == 0 or "LOCAL_WORLD_SIZE" in env):
        return node * int(env.get("LOCAL_WORLD_SIZE", "0")) + int(env["LOCAL_RANK"])
    if num_ranks == 1:
        return 0
    raise StreamingError(
        f"WORLD_SIZE is {num_ranks}, but this process can't know its rank: RANK is not set, and neither is "
        f"{('LOCAL_WORLD_SIZE' if 'LOCAL_RANK' in env else 'LOCAL_RANK')}. Processes that take the same rank would "
        "read the same samples. Create the process group before the first iteration, or set RANK."
    )


def _ranks_per_node(env: Mapping[str, str], num_ranks: int) -> int:
    # All ranks must find the same number, so only values that all of them get count. If nothing is known, one node is
    # assumed. This changes which rank gets which sample, but not the samples of a step.
    if "LOCAL_WORLD_SIZE" in env:
        per_node = int(env["LOCAL_WORLD_SIZE"])
    elif "SLURM_PROCID" in env and num_ranks == int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "0"))):
        per_node = num_ranks // int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")))
    else:
        return num_ranks
    return per_node if per_node and num_ranks % per_node == 0 else num_ranks


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    # A script that sbatch or salloc runs directly, without srun, has SLURM_NTASKS too, but is alone.
    if "SLURM_PROCID" not in env or not any(name in env for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")):
        return False
    return any(name in env for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))

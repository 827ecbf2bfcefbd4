"""The ranks of a fit, which save, stop, and resume together."""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.distributed_c10d import _get_default_store

from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.trainer.ranks.compat import cluster_environment
from lightning_faulttolerant.trainer.ranks.line import Hub, Line, Relay, Spoke
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup

# All ranks wait for a save on rank 0, for as long as torch waits for a collective.
_TIMEOUT = timedelta(minutes=30)


def connect(trainer: Trainer) -> Ranks:
    """Connect the ranks of a fit when its process group exists; all of them at the same time."""
    if trainer.world_size == 1:
        return Alone()
    environment = cluster_environment(trainer)
    return connect_all("127.0.0.1" if environment is None else environment.main_address)


def connect_all(host: str = "127.0.0.1") -> NodeGroup:
    """Connect all ranks of the default process group.

    Args:
        host: The host at which all nodes can reach rank 0.
    """
    # The store in which the default group has met, so the ranks of an earlier start are not in it (`rendezvous`).
    store = _get_default_store()
    return NodeGroup(store, _TIMEOUT, rank=dist.get_rank(), num_ranks=dist.get_world_size(), host=host)


def open_line(ranks: NodeGroup) -> Line:
    """Open the line between ranks, with the connections that they have for exchanges; all of them at the same time."""
    token: str = ranks.from_first("the line", secrets.token_hex(16))
    hub = Hub(token) if ranks.rank == 0 or ranks.below else None
    ports = ranks.to_all("the ports of the line", hub and hub.port)
    if hub is not None:
        hub.wait_for(len(ranks.below))
        if ranks.rank == 0:
            return hub
    spoke = Spoke(ranks.rank, (ranks.host, ports[ranks.above]), token, hub_rank=ranks.above)
    return spoke if hub is None else Relay(hub, spoke)

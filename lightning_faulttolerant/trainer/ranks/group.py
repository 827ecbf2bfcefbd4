"""The ranks of a fit, which save, stop, and resume together."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Alone, RankGroup, Ranks
from lightning_faulttolerant.errors import UnsupportedTrainerError

# All ranks wait for a save on rank 0, for as long as torch waits for a collective.
_TIMEOUT = timedelta(minutes=30)
_SPARE_DESCRIPTORS = 16  # a listener, an autosave, connections to workers


def check_descriptors(num_ranks: int) -> None:
    """Check that this process may open as many connections as this number of ranks takes.

    gloo connects each rank with every other one. If it can't, it ends the process without a message from Python. Rank 0
    has one more connection for each rank.

    Raises:
        UnsupportedTrainerError: If the process may not open that many.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")
    num_open = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    needed = num_open + 2 * num_ranks + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UnsupportedTrainerError(
            f"This process may have {limit} files and connections open, has {num_open}, and {num_ranks} ranks that save"
            f" together need {needed}. They could not be connected. Start each rank after"
            f" `ulimit -n {max(needed, 65536)}`, or leave FaultTolerance out."
        )


def connect(trainer: Trainer) -> Ranks:
    """Connect the ranks of a fit when its process group exists; all of them at the same time."""
    return Alone() if trainer.world_size == 1 else connect_all()


def connect_all() -> RankGroup:
    """Connect all ranks of the default process group."""
    check_descriptors(dist.get_world_size())
    return RankGroup(range(dist.get_world_size()), _TIMEOUT)

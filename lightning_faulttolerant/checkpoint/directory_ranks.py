"""Finds the ranks that share a series of directories."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_faulttolerant.checkpoint.ranks import Alone, RankGroup, Ranks

_MESSAGE = (
    "The ranks could not agree on a checkpoint: {}. Nothing was committed by this step. Look for the first error of the"
    " other ranks. All of them must call the methods of a saver in the same order; a rank that can't finish its part of"
    " a checkpoint should call abort(), then the others needn't wait."
)


def find_ranks(strategy: str, group: Any, timeout: timedelta) -> tuple[Ranks, int]:
    """Return the ranks that participate.

    Args:
        strategy: ``"sync_any"``, ``"sync_all"``, ``"async"`` or ``"mono"``.
        group: A ``torch.distributed`` group; None for the default group.
        timeout: How long one step may wait for the slowest rank.

    Returns:
        The ranks, and this one's number for the name of an ``"async"`` series.

    Raises:
        ValueError: If there are several processes and no process group, or this rank is not in the group.
        CheckpointError: If the other ranks do not answer.
    """
    is_grouped = dist.is_available() and dist.is_initialized()
    if group is not None and (not is_grouped or dist.get_rank(group) < 0):
        raise ValueError("This process is not in the process group that was given. Make the saver on its ranks only.")
    if strategy == "mono":
        return Alone(), 0
    if strategy == "async":
        return Alone(), dist.get_rank(group) if is_grouped else _number_from_environment("RANK", 0)
    if is_grouped:
        return _joined(group, timeout), 0
    num_ranks = _number_from_environment("WORLD_SIZE", 1)
    if num_ranks > 1:
        raise ValueError(
            f'WORLD_SIZE is {num_ranks} and there is no process group: with strategy="{strategy}" each rank would take '
            "itself for the only one, and write over the others. Call torch.distributed.init_process_group before the "
            'saver is made, or pass strategy="async" (each rank its own directories).'
        )
    return Alone(), 0


def _joined(group: Any, timeout: timedelta) -> Ranks:
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return RankGroup(ranks, timeout, message=_MESSAGE) if len(ranks) > 1 else Alone()


def _number_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default

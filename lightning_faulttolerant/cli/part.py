"""Read our part of a described checkpoint, which may hold anything: what is not as it should be counts as not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "lightning_faulttolerant"


def mapping(value: Any, *names: str) -> Mapping[Any, Any]:
    """Return the mapping at a place in nested mappings, an empty one where there is none.

    Args:
        value: Where to begin.
        names: Keys on the way.
    """
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def own_mapping(rank: Any, *names: str) -> Mapping[Any, Any]:
    """Return what another rank than the first holds at a place, without what is as in rank 0's (`state.differences`).

    Args:
        rank: The state of that rank.
        names: Keys on the way.
    """
    for number, name in enumerate(names):
        rank = mapping(rank, "own").get(name)
        if isinstance(rank, list):  # the whole is its own
            return mapping(rank[0] if rank else None, *names[number + 1 :])
    own = mapping(rank, "own")
    return {key: value[0] for key, value in own.items() if isinstance(value, list) and value}


def whole_number(value: Any) -> int | None:
    """Return an integer of usual size, None for anything else.

    Args:
        value: Anything.
    """
    return value if type(value) is int and abs(value) < 1 << 63 else None


def part_of(content: Any) -> Mapping[Any, Any] | None:
    """Return our part of a checkpoint, None where it has none.

    Args:
        content: The described checkpoint.
    """
    part = content.get(KEY) if isinstance(content, Mapping) else None
    return part if isinstance(part, Mapping) else None


def step_of(content: Any) -> int | None:
    """Return how many optimizer steps were done.

    Args:
        content: The described checkpoint.
    """
    step = whole_number(mapping(part_of(content), "position").get("global_step"))
    return whole_number(mapping(content).get("global_step")) if step is None else step


def epoch_of(content: Any) -> int | None:
    """Return the epoch that the run was in, from 0.

    Args:
        content: The described checkpoint.
    """
    epoch = whole_number(mapping(part_of(content), "position").get("epoch"))
    return whole_number(mapping(content).get("epoch")) if epoch is None else epoch


def batch_of(content: Any) -> int | None:
    """Return how many batches of the epoch were consumed; without our part, how many Lightning has counted as done.

    Args:
        content: The described checkpoint.
    """
    batch = whole_number(mapping(part_of(content), "position").get("batch"))
    if batch is not None:
        return batch
    progress = mapping(content, "loops", "fit_loop", "epoch_loop.batch_progress", "current")
    return whole_number(progress.get("completed"))


def world_size_of(content: Any) -> int | None:
    """Return how many ranks the run had, None where our part does not say.

    Args:
        content: The described checkpoint.
    """
    return whole_number(mapping(part_of(content)).get("world_size"))

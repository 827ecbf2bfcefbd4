"""Read our part of a described checkpoint. It may hold anything: values of the wrong form count as missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "lightning_faulttolerant"


def mapping(value: object, *names: str) -> Mapping[Any, Any]:
    """Return the mapping at a place in nested mappings, or an empty one.

    Args:
        value: The outermost mapping.
        names: Keys on the way to the place.
    """
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def own_mapping(rank: object, *names: str) -> Mapping[object, object]:
    """Return what a rank other than rank 0 holds at a place, without values equal to rank 0's (`state.differences`).

    Args:
        rank: The state of that rank.
        names: Keys on the way to the place.
    """
    for number, name in enumerate(names):
        rank = mapping(rank, "own").get(name)
        if isinstance(rank, list):  # everything here is the rank's own
            return mapping(rank[0] if rank else None, *names[number + 1 :])
    own = mapping(rank, "own")
    return {key: value[0] for key, value in own.items() if isinstance(value, list) and value}


def whole_number(value: object) -> int | None:
    """Return an integer of ordinary size, or None.

    Args:
        value: Anything.
    """
    return value if type(value) is int and abs(value) < 1 << 63 else None


def part_of(content: object) -> Mapping[object, object] | None:
    """Return our part of a checkpoint, or None if it has none.

    Args:
        content: The described checkpoint.
    """
    part = content.get(KEY) if isinstance(content, Mapping) else None
    return part if isinstance(part, Mapping) else None


def step_of(content: object) -> int | None:
    """Return the number of optimizer steps.

    Args:
        content: The described checkpoint.
    """
    step = whole_number(mapping(part_of(content), "position").get("global_step"))
    return whole_number(mapping(content).get("global_step")) if step is None else step


def epoch_of(content: object) -> int | None:
    """Return the epoch of the run, from 0.

    Args:
        content: The described checkpoint.
    """
    epoch = whole_number(mapping(part_of(content), "position").get("epoch"))
    return whole_number(mapping(content).get("epoch")) if epoch is None else epoch


def batch_of(content: object) -> int | None:
    """Return the number of consumed batches in the epoch; without our part, Lightning's count of finished batches.

    Args:
        content: The described checkpoint.
    """
    batch = whole_number(mapping(part_of(content), "position").get("batch"))
    if batch is not None:
        return batch
    progress = mapping(content, "loops", "fit_loop", "epoch_loop.batch_progress", "current")
    return whole_number(progress.get("completed"))


def world_size_of(content: object) -> int | None:
    """Return the number of ranks of the run; None if our part does not contain it.

    Args:
        content: The described checkpoint.
    """
    return whole_number(mapping(part_of(content)).get("world_size"))

"""Logged values of several ranks, merged into those of another number of ranks by each value's reduction.

Each rank gets its part of the total. A value that is synced remains the value of all ranks together. For a value that
each rank has on its own, a mean keeps its weights and a sum its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

States = Sequence[Mapping[str, Any]]


def merged_results(states: States, *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of one rank's logged values, in the form of `results_state`.

    Args:
        states: The states of all ranks that saved.
        rank: The number of the new rank.
        num_ranks: The number of new ranks.
    """
    first = states[0]
    collections = {
        name: _merged_collection([state["collections"][name] for state in states], rank=rank, num_ranks=num_ranks)
        for name in first["collections"]
    }
    return {"collections": collections, "connector": first["connector"]}


def _merged_collection(collections: States, *, rank: int, num_ranks: int) -> dict[str, Any]:
    keys = dict.fromkeys(key for collection in collections for key in collection)
    items = {}
    for key in keys:
        own = [collection[key] for collection in collections if key in collection]
        if own[0]["meta"]["sync"]["rank_zero_only"] and len(own) < len(collections):
            if rank == 0:
                items[key] = own[0]
        else:
            items[key] = _merged_item(own, rank=rank, num_ranks=num_ranks)
    return items


def _merged_item(items: States, *, rank: int, num_ranks: int) -> dict[str, Any]:
    first = items[0]
    meta = {**first["meta"], "sync": {**first["meta"]["sync"], "adopts": True}}
    count = max(item["cache"]["update_count"] for item in items)
    cache = {**first["cache"], "update_count": count}
    if not meta["is_tensor"] or not meta["fields"]["on_epoch"] or meta["sync"]["rank_zero_only"]:
        return {**first, "meta": meta, "cache": cache}
    sums = {
        name: _merged([item["sums"][name] for item in items], meta["reduce_fx"], rank, num_ranks)
        for name in first["sums"]
    }
    return {"meta": meta, "cache": cache, "sums": sums}


def _merged(values: Sequence[Tensor], reduction: str, rank: int, num_ranks: int) -> Tensor:
    stacked = torch.stack(list(values))
    if reduction in ("min", "max"):
        return stacked.amin(0) if reduction == "min" else stacked.amax(0)
    total = stacked.sum(0)
    if num_ranks == 1:
        return total
    if reduction == "sum" and len(values) == 1:
        # A single rank's value does not tell whether it is synced. This is right if it is, and if nothing more comes.
        return total if rank == 0 else torch.zeros_like(total)
    if not total.is_floating_point():
        # Lightning truncates the mean of an integer over ranks to an integer: here it need not be one.
        total = total.double() if total.device.type != "mps" else total.float()
    return total / num_ranks

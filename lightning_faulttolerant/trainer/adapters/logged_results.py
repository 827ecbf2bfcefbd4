"""Values that were logged in the epoch so far, as a state: sums, means, extremes, and logged metrics.

For a different number of ranks, they are merged by each value's reduction, and each rank gets its part of the total. A
value that is synced remains the value of all ranks together. For a value that each rank has on its own, a mean keeps
its weights and a sum its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.state.metrics import named_metrics
from lightning_faulttolerant.state.tensors import plain_copy
from lightning_faulttolerant.trainer.adapters import compat

_SUMS = ("value", "cumulated_batch_size")


def results_state(trainer: Trainer) -> dict[str, object]:
    """Return a copy of all values that were logged and not yet passed to the loggers, and of those passed last."""
    collections = {
        name: {key: _item_state(item) for key, item in collection.items()}
        for name, collection in compat.result_collections(trainer).items()
    }
    return {"collections": collections, "connector": compat.logger_connector_state(trainer)}


def load_results(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """Restore the logged values; return the keys with a metric that the module does not have anymore."""
    missing = []
    for name, collection in compat.result_collections(trainer).items():
        collection.clear()
        for key, item_state in state["collections"][name].items():
            item = _make_item(trainer, item_state)
            if item is None:
                missing.append(key)
            else:
                collection[key] = item
    compat.load_logger_connector(trainer, state["connector"])
    return missing


def _item_state(item: Any) -> dict[str, object]:
    sums = {name: getattr(item, name, None) for name in _SUMS}
    return {
        "meta": compat.metadata_state(item),
        "cache": compat.result_cache(item),
        "sums": {name: plain_copy(value) for name, value in sums.items() if isinstance(value, torch.Tensor)},
    }


def _make_item(trainer: Trainer, state: Mapping[str, Any]) -> object:
    item = compat.make_result(trainer, state["meta"])
    device = trainer.strategy.root_device
    if item.is_tensor:
        for name, value in state["sums"].items():
            setattr(item, name, value.detach().clone().to(device))
            compat.reset_to_kind_of(item, name, value)
    else:
        metric = named_metrics(trainer.lightning_module).get(item.meta.metric_attribute or "")
        if metric is None:
            return None
        item.value = metric
    compat.load_result_cache(item, state["cache"])
    return item


States = Sequence[Mapping[str, Any]]


def merged_results(states: States, *, rank: int, num_ranks: int) -> dict[str, object]:
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


def _merged_collection(collections: States, *, rank: int, num_ranks: int) -> dict[str, object]:
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


def _merged_item(items: States, *, rank: int, num_ranks: int) -> dict[str, object]:
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


def _merged(values: Sequence[torch.Tensor], reduction: str, rank: int, num_ranks: int) -> torch.Tensor:
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

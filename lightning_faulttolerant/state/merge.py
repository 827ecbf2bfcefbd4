"""Merge the states of several ranks into those of any number of ranks, so that their total stays the same.

A sum goes to the first rank and nothing to the others. An extreme is the same on all, and so is a mean. Lists go to the
first rank in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_faulttolerant.state.metrics import named_metrics

States = Sequence[Mapping[str, Any]]


def merged_gradients(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients for each of any number of ranks: the mean, which DDP uses when it steps.

    A gradient in shards stays that of the first rank.
    """
    names = {name for state in states for name in state}
    return {name: _merged_gradient([s[name] for s in states if name in s], len(states)) for name in sorted(names)}


def _merged_gradient(gradients: Sequence[Any], num_ranks: int) -> Any:
    first = gradients[0]
    return sum(gradients[1:], first) / num_ranks if isinstance(first, Tensor) else first


def merged_metrics(states: States, module: nn.Module, *, rank: int, num_ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Return the state of one rank's metrics, as `metrics_state` does, and a line for each that can't be merged.

    Args:
        states: The states of all ranks that saved.
        module: The metrics' module; the metrics define how each of their states is reduced.
        rank: The new rank.
        num_ranks: The number of new ranks.
    """
    first = states[0]
    metrics, lost = {}, []
    found = named_metrics(module)
    for name, state in first["metrics"].items():
        own = [other["metrics"][name] for other in states if name in other["metrics"]]
        if name in found and len(own) == len(states):
            metrics[name], lines = _merged_metric(own, found[name], rank=rank)
            lost += [f"metric {name}: {line}" for line in lines]
        else:
            metrics[name] = state
            lost.append(f"metric {name}: not every rank has it")
    lost += [
        f"metrics {name}: the ranks have found different {part}"
        for part in ("collections", "trackers")
        for name in first[part]
        if any(other[part].get(name) != first[part][name] for other in states)
    ]
    return {**first, "metrics": metrics}, lost


def _merged_metric(states: States, metric: Metric, *, rank: int) -> tuple[dict[str, Any], list[str]]:
    first = states[0]
    values, lost = {}, []
    # A state's reduction, even a missing one, says how its values are gathered; this is torchmetrics' own list of them.
    reductions: Any = metric._reductions
    for name in first["values"]:
        merge = _MERGES.get(reductions.get(name)) or _merge_unknown
        own = [state["values"][name] for state in states]
        values[name], line = merge(own, metric._defaults.get(name), rank)
        lost += [f"{name} {line}"] if line else []
    for name, value in first["attributes"].items():
        if any(not _equal(value, state["attributes"].get(name)) for state in states):
            lost.append(f"{name} is a plain attribute with different values on the ranks")
    return {**first, "values": values, "update_count": max(state["update_count"] for state in states)}, lost


Merge = Callable[[Sequence[Any], Any, int], tuple[Any, str]]


def _merge_sum(values: Sequence[Any], default: object, rank: int) -> tuple[object, str]:
    total = torch.stack(list(values)).sum(0)
    return (total if rank == 0 else torch.zeros_like(total)), ""


def _merge_mean(values: Sequence[Any], default: object, rank: int) -> tuple[object, str]:
    stacked = torch.stack(list(values))
    return (stacked if stacked.is_floating_point() else stacked.float()).mean(0), ""


def _merge_max(values: Sequence[Any], default: object, rank: int) -> tuple[object, str]:
    return torch.stack(list(values)).amax(0), ""


def _merge_min(values: Sequence[Any], default: object, rank: int) -> tuple[object, str]:
    return torch.stack(list(values)).amin(0), ""


def _merge_cat(values: Sequence[Any], default: object, rank: int) -> tuple[object, str]:
    if isinstance(values[0], list):
        return ([item for value in values for item in value] if rank == 0 else []), ""
    joined = torch.cat(list(values))
    return (joined if rank == 0 else joined[:0]), ""


def _merge_unknown(values: Sequence[object], default: object, rank: int) -> tuple[Any, str]:
    if all(_equal(values[0], value) for value in values) and _equal(values[0], default):
        return values[0], ""
    return values[min(rank, len(values) - 1)], "has its own reduction, which can't be applied to some ranks only"


def _merge_none(values: Sequence[object], default: object, rank: int) -> tuple[object, str]:
    if isinstance(values[0], list):
        return _merge_cat(values, default, rank)
    return _merge_unknown(values, default, rank)


_MERGES: dict[Callable[..., Any] | None, Merge] = {
    dim_zero_sum: _merge_sum,
    dim_zero_mean: _merge_mean,
    dim_zero_max: _merge_max,
    dim_zero_min: _merge_min,
    dim_zero_cat: _merge_cat,
    None: _merge_none,
}


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b.to(a.device))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)

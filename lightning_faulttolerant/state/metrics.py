"""Every ``torchmetrics.Metric`` of a module, persistent or not, as one state; also the groups and trackers of them.

The states of several ranks, and their gradients, can be merged into those of any number of ranks, so that their total
stays the same. A sum goes to the first rank and nothing to the others. An extreme is the same on all, and so is a mean.
Lists go to the first rank in the order of the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MetricTracker

from lightning_faulttolerant.state.tensors import plain_copy, with_tensors

_OF_EVERY_METRIC = vars(SumMetric()).keys()
_OF_EVERY_MODULE = vars(torch.nn.Module()).keys()
_KINDS = frozenset({Metric, MetricCollection, MetricTracker})
_MAX_ITEMS = 1_000


def named_metrics(module: torch.nn.Module) -> dict[str, Metric]:
    """Return each metric in `module` by its path, including metrics in plain lists and dicts of its modules."""
    return _of_kind(Metric, _children(module))


def _of_kind(kind: type[object], children: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    return {name: child for name, child in children.items() if kind in type(child).__mro__}


def _is_kept(value: object) -> bool:
    """Return whether `value` is a metric, or groups or tracks metrics.

    `isinstance` takes a millisecond for each new class: `Metric` is an ABC, which checks its subclasses.
    """
    return not _KINDS.isdisjoint(type(value).__mro__)


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    children = dict(module.named_modules())
    seen = set(map(id, children.values()))
    for name, held in [found for prefix, child in children.items() for found in _in_containers(prefix, child)]:
        for path, inner in held.named_modules(prefix=name):
            if id(inner) not in seen:  # a list of modules that are also attributes
                seen.add(id(inner))
                children[path] = inner
    return children


def _in_containers(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that torch doesn't know as a part of `module`, by path."""
    if type(module).__module__.startswith("torch."):  # most modules of a model; they hold no metrics
        return
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            path = f"{prefix}.{name}" if prefix else name
            yield from ((f"{path}{key}", held) for key, held in _items(value))


def _items(value: object) -> Iterator[tuple[str, torch.nn.Module]]:
    with contextlib.suppress(Exception):  # any class may raise anything: what can't be read is left alone
        if isinstance(value, (dict, list, tuple)) and len(value) <= _MAX_ITEMS:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from [(f"[{key!r}]", item) for key, item in items if _is_kept(item)]


def metrics_of(holder: object) -> dict[str, torch.nn.Module]:
    """Return the metrics, collections and trackers that any object holds as attributes, or in lists and dicts there."""
    held: list[tuple[str, torch.nn.Module]] = [(n, value) for n, value in vars(holder).items() if _is_kept(value)]
    held += [(f"{name}{key}", item) for name, value in vars(holder).items() for key, item in _items(value)]
    return dict(held)


def with_metrics_state(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return all metrics, collections, and trackers that `metrics_state` covers."""
    return [child for child in _children(module).values() if _is_kept(child)]


def metrics_state(module: torch.nn.Module) -> dict[str, dict[str, object]]:
    """Return a copy of the state of each metric, collection and tracker, by path."""
    children = _children(module)
    metrics = {name: metric_state(metric) for name, metric in _of_kind(Metric, children).items()}
    if not metrics:
        return {"metrics": {}, "collections": {}, "trackers": {}}
    return {
        "metrics": metrics,
        "collections": {name: _groups_state(found) for name, found in _of_kind(MetricCollection, children).items()},
        "trackers": {name: tracker.n_steps for name, tracker in _of_kind(MetricTracker, children).items()},
    }


def load_metrics(module: torch.nn.Module, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore the state of each metric; return the paths of states without a metric."""
    grow_trackers(module, state)
    children = _children(module)
    metrics, collections = _of_kind(Metric, children), _of_kind(MetricCollection, children)
    missing = sorted(state["metrics"].keys() - metrics.keys())
    for name in state["metrics"].keys() & metrics.keys():
        missing += [f"{name}.{value}" for value in load_metric(metrics[name], state["metrics"][name])]
    for name in state["collections"].keys() & collections.keys():
        _load_groups(collections[name], state["collections"][name])
    return missing


def grow_trackers(module: torch.nn.Module, state: Mapping[str, Mapping[str, object]]) -> None:
    """Give each MetricTracker a metric for each step that it had; does nothing the second time."""
    trackers = _of_kind(MetricTracker, _children(module))
    for name in state["trackers"].keys() & trackers.keys():
        while trackers[name].n_steps < state["trackers"][name]:
            trackers[name].increment()


def metric_state(metric: Metric) -> dict[str, object]:
    """Return a copy of one metric's state."""
    values = {name: with_tensors(value, plain_copy) for name, value in metric.metric_state.items()}
    return {"values": values, "attributes": _attributes(metric), "update_count": metric.update_count}


def load_metric(metric: Metric, state: Mapping[str, Any]) -> list[str]:
    """Restore one metric from a result of `metric_state`; return the names of the states that it doesn't have."""
    for name, value in {**state["values"], **state["attributes"]}.items():
        setattr(metric, name, with_tensors(value, lambda one: plain_copy(one).to(metric.device)))
    # torchmetrics has no public way to mark a metric as updated; without it `compute` warns and `sync` misjudges.
    metric._update_count = state["update_count"]
    metric._computed = None
    # A metric that creates its states in its first update would create them again, and lose these.
    return sorted(state["values"].keys() - metric.metric_state.keys())


def _groups_state(collection: MetricCollection) -> dict[str, object]:
    # Groups are found in the first update, by states that happen to be equal then. In another run they may differ.
    return {
        "groups": [list(group) for group in collection.compute_groups.values()],
        "checked": collection._groups_checked,
        "copied": collection._state_is_copy,
    }


def _load_groups(collection: MetricCollection, state: Mapping[str, Any]) -> None:
    collection._groups = {index: list(group) for index, group in enumerate(state["groups"])}
    collection._groups_checked = state["checked"]
    collection._state_is_copy = False
    if state["checked"] and not state["copied"]:
        collection._compute_groups_create_state_ref()
    collection._state_is_copy = state["copied"]


def _attributes(metric: Metric) -> dict[str, object]:
    # The wrappers keep the extremes or the window that they have seen in plain attributes rather than in states. Some
    # metrics keep an image or a map there.
    is_wrapper = any(kind.__module__.startswith("torchmetrics.wrappers") for kind in type(metric).__mro__)
    kinds = (torch.Tensor, int, float, bool) if is_wrapper else (torch.Tensor,)
    states = metric.metric_state
    return {
        name: with_tensors(value, plain_copy)
        for name, value in vars(metric).items()
        if isinstance(value, kinds) and name not in states and name not in _OF_EVERY_METRIC
    }


States = Sequence[Mapping[str, Any]]


def merged_gradients(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the gradients for each of any number of ranks: the mean, which DDP uses when it steps.

    A gradient in shards stays that of the first rank.
    """
    names = {name for state in states for name in state}
    return {name: _merged_gradient([s[name] for s in states if name in s], len(states)) for name in sorted(names)}


def _merged_gradient(gradients: Sequence[Any], num_ranks: int) -> Any:
    first = gradients[0]
    return sum(gradients[1:], first) / num_ranks if isinstance(first, torch.Tensor) else first


def merged_metrics(states: States, module: torch.nn.Module, *, rank: int) -> tuple[dict[str, object], list[str]]:
    """Return the state of one rank's metrics, as `metrics_state` does, and a line for each that can't be merged.

    Args:
        states: The states of all ranks that saved.
        module: The metrics' module; the metrics define how each of their states is reduced.
        rank: The new rank.
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


def _merged_metric(states: States, metric: Metric, *, rank: int) -> tuple[dict[str, object], list[str]]:
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


def _merge_cat(values: Sequence[Any], default: object, rank: int) -> tuple[object, str]:
    if isinstance(values[0], list):
        return ([item for value in values for item in value] if rank == 0 else []), ""
    joined = torch.cat(list(values))
    return (joined if rank == 0 else joined[:0]), ""


def _merge_unknown(values: Sequence[object], default: object, rank: int) -> tuple[object, str]:
    if all(_equal(values[0], value) for value in values) and _equal(values[0], default):
        return values[0], ""
    return values[min(rank, len(values) - 1)], "has its own reduction, which can't be applied to some ranks only"


def _merge_none(values: Sequence[object], default: object, rank: int) -> tuple[object, str]:
    if isinstance(values[0], list):
        return _merge_cat(values, default, rank)
    return _merge_unknown(values, default, rank)


_MERGES: dict[Callable[..., object] | None, Merge] = {
    dim_zero_sum: _merge_sum,
    dim_zero_mean: _merge_mean,
    dim_zero_max: lambda values, default, rank: (torch.stack(list(values)).amax(0), ""),
    dim_zero_min: lambda values, default, rank: (torch.stack(list(values)).amin(0), ""),
    dim_zero_cat: _merge_cat,
    None: _merge_none,
}


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b.to(a.device))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)

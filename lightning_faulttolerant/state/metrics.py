"""Every ``torchmetrics.Metric`` of a module, persistent or not, as one state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, SumMetric


def named_metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """Yield each metric in `module` with its path."""
    return ((name, child) for name, child in module.named_modules() if isinstance(child, Metric))


def metrics_state(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a copy of the state of each metric by its path: its state tensors and how often it was updated."""
    return {name: metric_state(metric) for name, metric in named_metrics(module)}


def load_metrics(module: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put each metric back to its state; return the paths of `state` that have no metric."""
    metrics = dict(named_metrics(module))
    for name in state.keys() & metrics.keys():
        load_metric(metrics[name], state[name])
    return sorted(state.keys() - metrics.keys())


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a copy of one metric's state."""
    values = {name: _copy(value) for name, value in metric.metric_state.items()}
    return {"values": values, "attributes": _wrapper_attributes(metric), "update_count": metric.update_count}


def load_metric(metric: Metric, state: Mapping[str, Any]) -> None:
    """Put one metric back to a state of `metric_state`."""
    for name, value in state["values"].items():
        setattr(metric, name, _copy(value, device=metric.device))
    for name, value in state["attributes"].items():
        setattr(metric, name, _copy(value, device=metric.device))
    # torchmetrics has no public way to say that a metric was updated; without it `compute` warns and `sync` misjudges.
    metric._update_count = state["update_count"]
    metric._computed = None


def _wrapper_attributes(metric: Metric) -> dict[str, Any]:
    # The wrappers keep the extremes or the window that they have seen in plain attributes rather than in states.
    if not any(kind.__module__.startswith("torchmetrics.wrappers") for kind in type(metric).__mro__):
        return {}
    known = vars(SumMetric()).keys() | metric.metric_state.keys()
    return {
        name: _copy(value)
        for name, value in vars(metric).items()
        if name not in known and isinstance(value, (Tensor, int, float, bool))
    }


def _copy(value: Any, device: Any = None) -> Any:
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy if device is None else copy.to(device)
    if isinstance(value, list):
        return [_copy(item, device) for item in value]
    return value

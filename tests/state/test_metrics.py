"""Metrics go on in the middle of an epoch as if nothing had happened."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from lightning_faulttolerant.state.metrics import load_metrics, metrics_state, named_metrics


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.values = CatMetric()
        self.nested = nn.ModuleDict({"max": MaxMetric()})
        self.collection = MetricCollection(
            [MulticlassAccuracy(3), MulticlassPrecision(3), MulticlassF1Score(3, average="micro")]
        )


def update(module: Module, seed: int) -> None:
    """Update every metric with values that `seed` gives."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(6, generator=generator)
    module.mean.update(values)
    module.values.update(values)
    module.nested["max"].update(values)
    scores, labels = torch.rand(6, 3, generator=generator), torch.randint(3, (6,), generator=generator)
    module.collection.update(scores, labels)


def results(module: Module) -> dict[str, Any]:
    """Return what every metric computes."""
    single = {name: metric.compute().tolist() for name, metric in named_metrics(module) if "." not in name}
    return {**single, **{name: value.item() for name, value in module.collection.compute().items()}}


def safe(state: Any) -> Any:
    """Return `state` as it comes out of a checkpoint that was loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(one: Any, other: Any) -> None:
    """Hold two states against each other, bit by bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("computes", [False, True])
def test_metrics_go_on(cut: int, computes: bool) -> None:
    """After any number of updates, computed in between or not, a fresh module goes on to the same results."""
    uninterrupted = Module()
    for seed in range(cut):
        update(uninterrupted, seed)
        if computes:
            results(uninterrupted)
    state = safe(metrics_state(uninterrupted))
    resumed = Module()
    assert load_metrics(resumed, state) == []
    assert_equal(metrics_state(resumed), state)
    for seed in range(cut, 5):
        update(uninterrupted, seed)
        update(resumed, seed)
    assert results(resumed) == results(uninterrupted)


def test_metrics_that_were_used_already_are_set_back() -> None:
    """Loaded into metrics that have gone on, and have computed, the state is the saved one, and so is the result."""
    module = Module()
    update(module, 0)
    expected, state = results(module), metrics_state(module)
    update(module, 1)
    results(module)
    load_metrics(module, state)
    assert_equal(metrics_state(module), state)
    assert results(module) == expected
    update(module, 2)
    reference = Module()
    update(reference, 0)
    update(reference, 2)
    assert results(module) == results(reference)


def test_state_is_a_copy() -> None:
    """Updates after the reading, or after the loading, don't reach the state."""
    module = Module()
    update(module, 0)
    state = metrics_state(module)
    copy = safe(state)
    update(module, 1)
    load_metrics(module, state)
    update(module, 2)
    assert_equal(state, copy)


def test_reading_the_state_computes_nothing() -> None:
    """A metric that was never updated is read without the warning that computing it would give."""
    module = Module()
    assert all(entry["update_count"] == 0 for entry in metrics_state(module).values())
    assert module.mean._computed is None


def test_every_metric_is_found_by_its_path() -> None:
    """Metrics in containers and collections are found, the persistent and the others."""
    module = Module()
    module.mean.persistent(True)
    names = [name for name, metric in named_metrics(module) if isinstance(metric, Metric)]
    assert names[:3] == ["mean", "values", "nested.max"]
    assert len(names) == 6


def test_metric_that_is_gone_is_named() -> None:
    """A state without a metric is returned by its path; the others are loaded."""
    module = Module()
    update(module, 0)
    state = metrics_state(module)
    fresh = Module()
    del fresh.mean
    assert load_metrics(fresh, state) == ["mean"]
    assert fresh.values.compute().tolist() == module.values.compute().tolist()


def test_running_sums_in_other_dtypes_come_back() -> None:
    """A metric in double precision goes on in double precision."""
    saved = nn.ModuleDict({"mean": MeanMetric().set_dtype(torch.float64)})
    saved["mean"].update(torch.tensor(0.1, dtype=torch.float64))
    fresh = nn.ModuleDict({"mean": MeanMetric().set_dtype(torch.float64)})
    load_metrics(fresh, metrics_state(saved))
    assert fresh["mean"].compute().dtype == torch.float64
    assert fresh["mean"].compute().item() == saved["mean"].compute().item()

"""Metrics continue in the middle of an epoch as if nothing had happened."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import MetricTracker

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
    """Update every metric with values that depend on `seed`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(6, generator=generator)
    module.mean.update(values)
    module.values.update(values)
    module.nested["max"].update(values)
    scores, labels = torch.rand(6, 3, generator=generator), torch.randint(3, (6,), generator=generator)
    module.collection.update(scores, labels)


def results(module: Module) -> dict[str, Any]:
    """Return the result of every metric."""
    single = {name: metric.compute().tolist() for name, metric in named_metrics(module).items() if "." not in name}
    return {**single, **{name: value.item() for name, value in module.collection.compute().items()}}


def safe(state: Any) -> Any:
    """Return `state` as it comes out of a checkpoint that was loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(one: Any, other: Any) -> None:
    """Compare two states bit by bit."""
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
def test_metrics_continue(cut: int, computes: bool) -> None:
    """After any number of updates, computed in between or not, a fresh module continues to the same results."""
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
    """Loaded into metrics that have continued and computed, the state is the saved one, and so is the result."""
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
    """Updates after reading or loading don't reach the state."""
    module = Module()
    update(module, 0)
    state = metrics_state(module)
    copy = safe(state)
    update(module, 1)
    load_metrics(module, state)
    update(module, 2)
    assert_equal(state, copy)


def test_reading_the_state_computes_nothing() -> None:
    """A metric that was never updated is read without the warning that a computation would cause."""
    module = Module()
    assert all(entry["update_count"] == 0 for entry in metrics_state(module)["metrics"].values())
    assert module.mean._computed is None


def test_every_metric_is_found_by_its_path() -> None:
    """Metrics in containers and collections are found, both persistent and not."""
    module = Module()
    module.mean.persistent(True)
    names = list(named_metrics(module))
    assert names[:3] == ["mean", "values", "nested.max"]
    assert len(names) == 6


def test_metric_that_is_gone_is_named() -> None:
    """If a metric is missing, its state is returned by its path, and the others are loaded."""
    module = Module()
    update(module, 0)
    state = metrics_state(module)
    fresh = Module()
    del fresh.mean
    assert load_metrics(fresh, state) == ["mean"]
    assert fresh.values.compute().tolist() == module.values.compute().tolist()


def test_running_sums_in_other_dtypes_come_back() -> None:
    """A metric in double precision continues in double precision."""
    saved = nn.ModuleDict({"mean": MeanMetric().set_dtype(torch.float64)})
    saved["mean"].update(torch.tensor(0.1, dtype=torch.float64))
    fresh = nn.ModuleDict({"mean": MeanMetric().set_dtype(torch.float64)})
    load_metrics(fresh, metrics_state(saved))
    assert fresh["mean"].compute().dtype == torch.float64
    assert fresh["mean"].compute().item() == saved["mean"].compute().item()


def test_groups_are_those_of_the_first_update() -> None:
    """Metrics that were merged into a group because their states were equal stay merged, and the others separate."""

    def make() -> nn.ModuleDict:
        names = {"low": BinaryAccuracy(0.4), "high": BinaryAccuracy(0.6), "f1": BinaryF1Score(0.4)}
        return nn.ModuleDict({"collection": MetricCollection(names)})

    saved, fresh = make(), make()
    # In this batch both thresholds have the same result: from here on torchmetrics takes the two for one.
    saved["collection"].update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert load_metrics(fresh, safe(metrics_state(saved))) == []
    assert fresh["collection"].compute_groups == saved["collection"].compute_groups == {0: ["f1", "high", "low"]}
    for module in (saved, fresh):
        module["collection"].update(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
    assert fresh["collection"].compute() == saved["collection"].compute()
    assert_equal(metrics_state(fresh), metrics_state(saved))


@pytest.mark.parametrize("reads", [False, True])
def test_list_states_of_a_group_are_shared_again(reads: bool) -> None:
    """Metrics of a group continue to share their lists, or to have copies if the collection was read."""

    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"c": MetricCollection([BinaryAUROC(), BinaryAveragePrecision()])})

    saved, fresh = make(), make()
    saved["c"].update(torch.tensor([0.1, 0.9, 0.4]), torch.tensor([0, 1, 1]))
    if reads:
        list(saved["c"].items())
    load_metrics(fresh, safe(metrics_state(saved)))
    for module in (saved, fresh):
        first, second = module["c"]._modules.values()
        assert (first.preds is second.preds) == (not reads)
        module["c"].update(torch.tensor([0.2, 0.3]), torch.tensor([1, 0]))
    assert fresh["c"].compute() == saved["c"].compute()


def test_tracker_grows_to_its_steps() -> None:
    """A MetricTracker has a metric for each of its steps again, and continues to the next step."""

    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"tracker": MetricTracker(MeanMetric(), maximize=True)})

    saved, fresh = make(), make()
    for value in (1.0, 3.0):
        saved["tracker"].increment()
        saved["tracker"].update(value)
    assert load_metrics(fresh, safe(metrics_state(saved))) == []
    for module in (saved, fresh):
        module["tracker"].increment()
        module["tracker"].update(2.0)
        assert module["tracker"].compute_all().tolist() == [1.0, 3.0, 2.0]


class LateStates(Metric):
    """Creates its states when it sees its first batch."""

    is_ready = False

    def update(self, values: Tensor) -> None:
        if not self.is_ready:
            self.add_state("total", torch.zeros(values.shape[1:]), dist_reduce_fx="sum")
            self.is_ready = True
        self.total = self.total + values.sum(0)

    def compute(self) -> Tensor:
        return self.total


def test_states_that_a_fresh_metric_does_not_have_are_named() -> None:
    """A metric that will create its states again, and lose the restored ones, is named."""
    saved, fresh = nn.ModuleDict({"late": LateStates()}), nn.ModuleDict({"late": LateStates()})
    saved["late"].update(torch.ones(2, 3))
    assert load_metrics(fresh, safe(metrics_state(saved))) == ["late.total"]


class WithMap(Metric):
    """Sums a map in an attribute that is not a state, as torchmetrics' own metric for images does."""

    map: Tensor | None = None

    def update(self, values: Tensor) -> None:
        self.map = values if self.map is None else self.map + values

    def compute(self) -> Tensor:
        assert self.map is not None
        return self.map


def test_tensors_in_attributes_come_back() -> None:
    """A tensor that a metric keeps without declaring it as a state continues."""
    saved, fresh = nn.ModuleDict({"map": WithMap()}), nn.ModuleDict({"map": WithMap()})
    saved["map"].update(torch.tensor([1.0, 2.0]))
    assert load_metrics(fresh, safe(metrics_state(saved))) == []
    fresh["map"].update(torch.tensor([1.0, 1.0]))
    assert fresh["map"].compute().tolist() == [2.0, 3.0]


class Holds(nn.Module):
    """A part of a module that keeps a metric in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = (MaxMetric(), None)


class Plain(nn.Module):
    """Keeps metrics where torch does not look for parts of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.listed = [self.mean, MeanMetric()]
        self.named = {"values": CatMetric(), "both": MetricCollection([MeanMetric(), MaxMetric()])}
        self.child = Holds()

    def all(self) -> list[Any]:
        """Return each metric."""
        return [*self.listed, *self.named.values(), self.child.pair[0]]


def test_metrics_in_plain_containers() -> None:
    """Metrics in a module's lists, tuples and dicts continue, each once."""
    saved, fresh = Plain(), Plain()
    for number, metric in enumerate(saved.all()):
        metric.update(torch.tensor([1.0, 2.0 + number]))
    state = metrics_state(saved)
    names = ["child.pair[0]", "listed[1]", "mean", "named['both'].MaxMetric", "named['both'].MeanMetric"]
    assert sorted(state["metrics"]) == [*names, "named['values']"]
    assert load_metrics(fresh, safe(state)) == []
    assert [str(m.compute()) for m in fresh.all()] == [str(m.compute()) for m in saved.all()]

"""Metrics in odd places continue or are named, and reach the same values if merged. The laws show the common ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAccuracy, MulticlassF1Score

from lightning_faulttolerant.state.metrics import load_metrics, merged_gradients, merged_metrics, metrics_state
from tests.state.objects.round_trips import through_a_file


def test_metric_that_is_gone_is_named() -> None:
    """If a metric is missing, its state is returned by its path, and the others are loaded, in their precision."""
    double = {"kept": MeanMetric().set_dtype(torch.float64)}
    saved, fresh = nn.ModuleDict({"gone": MeanMetric(), **double}), nn.ModuleDict(copy.deepcopy(double))
    saved["kept"].update(torch.tensor(0.1, dtype=torch.float64))
    assert load_metrics(fresh, metrics_state(saved)) == ["gone"]
    assert (fresh["kept"].compute().dtype, fresh["kept"].compute()) == (torch.float64, saved["kept"].compute())


@pytest.mark.parametrize("reads", [False, True])
def test_list_states_of_a_group_are_shared_again(reads: bool) -> None:
    """Metrics of a group continue to share their lists, or to have copies if the collection was read."""

    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"c": MetricCollection([BinaryAUROC(), BinaryAveragePrecision()])})

    saved, fresh = make(), make()
    saved["c"].update(torch.tensor([0.1, 0.9, 0.4]), torch.tensor([0, 1, 1]))
    if reads:
        list(saved["c"].items())
    load_metrics(fresh, through_a_file(metrics_state(saved)))
    for module in (saved, fresh):
        first, second = module["c"]._modules.values()
        assert (first.preds is second.preds) == (not reads)
        module["c"].update(torch.tensor([0.2, 0.3]), torch.tensor([1, 0]))
    assert fresh["c"].compute() == saved["c"].compute()


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
    assert load_metrics(fresh, through_a_file(metrics_state(saved))) == ["late.total"]


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
    assert load_metrics(fresh, through_a_file(metrics_state(saved))) == []
    fresh["map"].update(torch.tensor([1.0, 1.0]))
    assert fresh["map"].compute().tolist() == [2.0, 3.0]


class Plain(nn.Module): ...


def holder() -> Any:
    """Return a module that keeps metrics where torch does not look for its parts."""
    module: Any = Plain()
    module.child = Plain()
    module.mean = MeanMetric()
    module.listed = [module.mean, MeanMetric()]
    module.named = {"values": CatMetric(), "both": MetricCollection([MeanMetric(), MaxMetric()])}
    module.child.pair = (MaxMetric(), None)
    return module


def test_metrics_in_plain_containers() -> None:
    """Metrics in a module's lists, tuples and dicts continue, each once."""
    saved, fresh = holder(), holder()
    found, here = ([*each.listed, *each.named.values(), each.child.pair[0]] for each in (saved, fresh))
    for number, metric in enumerate(found):
        metric.update(torch.tensor([1.0, 2.0 + number]))
    state = metrics_state(saved)
    names = ["child.pair[0]", "listed[1]", "mean", "named['both'].MaxMetric", "named['both'].MeanMetric"]
    assert sorted(state["metrics"]) == [*names, "named['values']"]
    assert load_metrics(fresh, through_a_file(state)) == []
    assert [str(metric.compute()) for metric in here] == [str(metric.compute()) for metric in found]


# Metrics of several ranks, merged


class OfAllRanks(Metric):
    """Has a state for each reduction, and one that is gathered as a list."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("seen", [], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.mean = self.mean + values.mean()
        self.seen.append(values)

    def compute(self) -> Tensor:
        return self.mean


class Custom(Metric):
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda values: values.prod())

    def update(self, values: Tensor) -> None:
        self.product = self.product * values.prod()

    def compute(self) -> Tensor:
        return self.product


class Module(nn.Module):
    def __init__(self, *metrics: Metric) -> None:
        super().__init__()
        self.metrics = nn.ModuleList(metrics)


def synced(metrics: list[Any]) -> dict[str, Any]:
    """Return the states that all ranks have after a sync, as torchmetrics reduces them."""
    found = {}
    for name, reduce in metrics[0]._reductions.items():
        own = [getattr(metric, name) for metric in metrics]
        if isinstance(own[0], list):
            items = [item for values in own for item in values]
            found[name] = torch.cat(items) if items else items
        else:
            found[name] = reduce(torch.stack(own))
    return found


def update(module: Module, seed: int) -> None:
    """Update every metric with values that depend on `seed`."""
    values = torch.rand(8, generator=torch.Generator().manual_seed(seed))
    for metric in module.metrics:
        if isinstance(metric, BinaryAUROC):
            metric.update(values, (values * 10).long() % 2)
        elif isinstance(metric, (MulticlassAccuracy, MulticlassF1Score, MetricCollection)):
            metric.update((values * 3).long(), (values * 7).long() % 3)
        elif isinstance(metric, PearsonCorrCoef):
            metric.update(values, values.flip(0))
        else:
            metric.update(values)


KINDS: dict[str, Callable[[], Metric]] = {
    "mean": MeanMetric,
    "sum": SumMetric,
    "max": MaxMetric,
    "min": MinMetric,
    "cat": CatMetric,
    "accuracy": lambda: MulticlassAccuracy(3),
    "AUROC": BinaryAUROC,
    "mean and list": OfAllRanks,
}


@pytest.mark.parametrize("way", [(2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_synced_metric_is_that_of_all_ranks(kind: str, way: tuple[int, int]) -> None:
    """Whatever the reductions, the new ranks together have the state that the old ones had together."""
    before = [Module(KINDS[kind]()) for _ in range(way[0])]
    for rank, module in enumerate(before):
        update(module, rank)
        update(module, 10 + rank)
    states = [metrics_state(module) for module in before]
    after = [Module(KINDS[kind]()) for _ in range(way[1])]
    for rank, module in enumerate(after):
        state, lost = merged_metrics(states, module, rank=rank)
        assert lost == []
        assert load_metrics(module, state) == []
        assert module.metrics[0].update_count == 2
    found, expected = synced([m.metrics[0] for m in after]), synced([m.metrics[0] for m in before])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(("make", "name"), [(Custom, "product"), (PearsonCorrCoef, "corr_xy")])
def test_a_custom_reduction_is_named(make: Callable[[], Metric], name: str) -> None:
    """A state that only all the old ranks together could reduce is named, unless nothing was counted yet."""
    before = [Module(make()) for _ in range(2)]
    assert merged_metrics([metrics_state(m) for m in before], Module(make()), rank=0)[1] == []
    for rank, module in enumerate(before):
        update(module, rank)
    _, lost = merged_metrics([metrics_state(m) for m in before], Module(make()), rank=0)
    assert any(line.startswith(f"metric metrics.0: {name} has its own reduction") for line in lost)


def test_groups_that_differ_are_named() -> None:
    """Metrics of a collection that share states on only one rank can't be merged."""
    before = [Module(MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])) for _ in range(2)]  # type: ignore[arg-type]
    update(before[0], 0)
    _, lost = merged_metrics([metrics_state(m) for m in before], before[0], rank=0)
    assert "metrics metrics.0: the ranks have found different collections" in lost


def test_gradients_are_the_mean() -> None:
    """A gradient is the mean over all ranks; a rank without one counts as zero."""
    merged = merged_gradients([{"a": torch.ones(2), "b": torch.ones(1)}, {"a": 3 * torch.ones(2)}])
    assert {name: value.tolist() for name, value in merged.items()} == {"a": [2.0, 2.0], "b": [0.5]}

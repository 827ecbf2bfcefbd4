"""Metrics whose states are shared, late, or in odd places continue or are named. The laws show the common ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from lightning_faulttolerant.state.metrics import load_metrics, metrics_state
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


class Plain(nn.Module):
    """A user's module."""


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

"""Logged values move to a different number of ranks: means keep their weights, and nothing is counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_faulttolerant.trainer.adapters.logged_results import merged_results


def item(kind: str, value: float, weight: int | None = None, *, rank_zero_only: bool = False) -> dict[str, Any]:
    """Return the state of a logged value."""
    sums = {"value": torch.tensor(value)} | ({} if weight is None else {"cumulated_batch_size": torch.tensor(weight)})
    sync = {"should": True, "rank_zero_only": rank_zero_only, "adopts": False}
    meta = {"fields": {"on_epoch": True}, "reduce_fx": kind, "sync": sync, "is_tensor": True}
    return {"meta": meta, "cache": {"forward": None, "has_reset": False, "update_count": 3}, "sums": sums}


def merged(*ranks: dict[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    """Return the values of each new rank by key."""
    states = [{"collections": {"train": own, "validation": {}}, "connector": {"of": r}} for r, own in enumerate(ranks)]
    found = [merged_results(states, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert all(state["connector"] == {"of": 0} for state in found)
    return [state["collections"]["train"] for state in found]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_mean_keeps_its_weights(num_ranks: int) -> None:
    """The parts of the ranks add up to all values and all weights, and each has the mean of all."""
    found = merged({"a": item("mean", 6.0, 3)}, {"a": item("mean", 1.0, 4)}, num_ranks=num_ranks)
    values = [own["a"]["sums"]["value"].item() for own in found]
    weights = [own["a"]["sums"]["cumulated_batch_size"].item() for own in found]
    assert sum(values) == pytest.approx(7.0)
    assert sum(weights) == pytest.approx(7.0)
    assert values[0] / weights[0] == pytest.approx(1.0)


def test_a_sum_and_extremes() -> None:
    """A sum is split among the ranks; each rank gets the minimum and the maximum."""
    ranks = [{"sum": item("sum", v), "max": item("max", v), "min": item("min", v)} for v in (2.0, 5.0, -1.0)]
    found = merged(*ranks, num_ranks=2)
    assert sum(own["sum"]["sums"]["value"].item() for own in found) == 6.0
    assert [own["max"]["sums"]["value"].item() for own in found] == [5.0, 5.0]
    assert [own["min"]["sums"]["value"].item() for own in found] == [-1.0, -1.0]


def test_what_rank_zero_alone_logs_stays_its_own() -> None:
    """A value that only rank 0 logs is not merged, and no other rank gets it."""
    found = merged({"own": item("mean", 6.0, 3, rank_zero_only=True)}, {}, num_ranks=2)
    assert found[0]["own"]["sums"]["value"].item() == 6.0
    assert found[1] == {}


def test_a_value_that_some_logged_is_on_all() -> None:
    """A key that one rank has not logged yet exists on every new rank: its sync is a collective."""
    found = merged({}, {"late": item("sum", 4.0)}, {}, num_ranks=2)
    assert all("late" in own for own in found)

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_faulttolerant import FaultToleranceError, MetricsTracker, NotExactError
from tests.ranks import on_ranks


def test_the_documented_loop_runs() -> None:
    """Every call can be chained, local is of the step, agg of the epoch, and reports are kept."""
    metrics = MetricsTracker()
    for epoch in range(2):
        for step in range(3):
            metrics.update({"images_seen": 4, "loss": torch.tensor(0.5)}).reduce()
            assert dict(metrics.local) == {"images_seen": 4.0, "loss": 0.5}
            assert metrics.agg["images_seen"] == 4 * (step + 1)
            metrics.reset_local()
        assert len(metrics.end_epoch().epoch_reports) == epoch + 1
        assert dict(metrics.agg) == {}
    assert [report["loss"] for report in metrics.epoch_reports] == [1.5, 1.5]


@pytest.mark.parametrize(("reduce_op", "expected"), [("sum", 9.0), ("mean", 3.0), ("min", 2.0), ("max", 4.0)])
def test_values_are_reduced_by_the_chosen_operation(reduce_op: str, expected: float) -> None:
    """Values are reduced over calls of update, and over calls of reduce."""
    metrics = MetricsTracker(reduce_op)
    metrics.update({"x": 3}).update({"x": 2}).reduce().reset_local().update({"x": 4})
    assert metrics.reduce().agg["x"] == expected


def test_each_name_may_have_its_own_operation() -> None:
    """Names without an operation are summed."""
    metrics = MetricsTracker({"best": "max"})
    metrics.update({"best": 3, "n": 3}).update({"best": 2, "n": 2})
    assert dict(metrics.local) == {"best": 3.0, "n": 5.0}


def test_a_value_that_is_no_number_is_refused() -> None:
    """A refused call adds nothing."""
    metrics = MetricsTracker()
    with pytest.raises(TypeError, match="one number with a name"):
        metrics.update({"a": 1, "b": torch.zeros(2)})
    assert dict(metrics.local) == {}
    with pytest.raises(ValueError, match="product"):
        MetricsTracker("product")
    with pytest.raises(ValueError, match="int64"):
        MetricsTracker(dtype=torch.int64)


def test_what_is_read_can_not_be_written_to_by_mistake() -> None:
    """A write to local would be lost, so it fails."""
    with pytest.raises(TypeError):
        MetricsTracker().local["x"] = 1.0  # type: ignore[index]


def _cases(rank: int) -> Any:
    found: dict[str, Any] = {}
    metrics = MetricsTracker()
    metrics.update({"loss": 1, "n": 100} if rank == 0 else {"n": 100, "loss": 1}).reduce()
    found["order"] = dict(metrics.local)
    metrics.reduce()
    found["twice"] = [dict(metrics.local), dict(metrics.agg)]
    metrics.reset_local().update({f"only {rank}": rank + 1}).reduce()
    found["sets"] = dict(metrics.local)
    state = metrics.state_dict()
    if rank == 0:  # one rank does not know the names that all had agreed on
        metrics = MetricsTracker().load_state_dict(state)
    metrics.reset_local()
    found["after load"] = dict((metrics.update({"loss": 4}) if rank == 1 else metrics).reduce().local)
    second = MetricsTracker()
    found["empty"] = dict(second.reduce().local)
    if rank == 1:
        second.update({"late": 5})
    found["late"] = dict(second.reduce().local)
    found["sorted"] = list(MetricsTracker().update(dict.fromkeys("hgfedcba", rank)).reduce().local)
    found["large"] = MetricsTracker().update({"n": 2**24 + rank}).reduce().agg["n"]
    ops = MetricsTracker({"m": "mean", "lo": "min", "hi": "max"})
    for value in (1, 2, 3) if rank == 0 else (10,):
        ops.update({"m": value, "lo": value, "hi": value})
    found["ops"] = dict(ops.reduce().agg)
    try:
        MetricsTracker("sum" if rank else "max").update({"x": 1}).reduce()
    except FaultToleranceError as error:
        found["differ"] = str(error)
    pending = MetricsTracker().update({"x": 1})
    states: list[Any] = [None, None]
    dist.all_gather_object(states, pending.state_dict())
    found["own"] = dict(MetricsTracker().load_state_dict(states[rank]).reduce().agg)
    try:
        MetricsTracker().load_state_dict(states[1 - rank])
    except NotExactError as error:
        found["other"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of two ranks, which run once for all cases."""
    found = on_ranks(_cases, tmp_path_factory.mktemp("ranks"))
    assert all(isinstance(of, dict) for of in found), found
    return found


def test_fault_it_needs_cuda(ranks: list[Any]) -> None:
    """Two ranks on CPUs, with gloo, reduce and agree."""
    assert ranks[0]["order"] == ranks[1]["order"]


def test_fault_metrics_are_mixed_by_the_order_of_their_names(ranks: list[Any]) -> None:
    """Ranks that name the metrics in another order still get the right sum for each."""
    assert ranks[0]["order"] == {"loss": 2.0, "n": 200.0}
    assert ranks[0]["sorted"] == ranks[1]["sorted"] == list("abcdefgh")


def test_fault_a_second_reduce_multiplies_by_the_ranks(ranks: list[Any]) -> None:
    """A value that was reduced is not reduced again."""
    assert ranks[0]["twice"] == ranks[1]["twice"] == [{"loss": 2.0, "n": 200.0}] * 2


def test_fault_ranks_with_other_names_do_not_fit_together(ranks: list[Any]) -> None:
    """A metric that only one rank has keeps that rank's value, also if it is late, or after one rank loaded a state."""
    for found in ranks:
        assert found["sets"] == {"only 0": 1.0, "only 1": 2.0}
        assert found["late"] == {"late": 5.0}
        assert found["after load"] == {"loss": 4.0}


def test_fault_reducing_nothing_fails(ranks: list[Any]) -> None:
    """Without metrics, all ranks continue without any, and so does a single process."""
    assert ranks[0]["empty"] == ranks[1]["empty"] == {}
    assert dict(MetricsTracker().reduce().agg) == {}


def test_fault_float32_loses_counts(ranks: list[Any]) -> None:
    """Counts beyond 2**24 are exact."""
    assert ranks[0]["large"] == 2**25 + 1


def test_operations_are_over_all_values_of_all_ranks(ranks: list[Any]) -> None:
    """A mean weighs values, not ranks."""
    assert ranks[0]["ops"] == ranks[1]["ops"] == {"m": 4.0, "lo": 1.0, "hi": 10.0}


def test_ranks_that_reduce_otherwise_are_told_so(ranks: list[Any]) -> None:
    """All ranks get the error, so none waits."""
    assert all("by 'max' and by 'sum'" in found["differ"] for found in ranks)


def test_values_that_were_not_reduced_are_one_ranks(ranks: list[Any]) -> None:
    """Values that were not reduced are restored on the rank that had them, and refused by another."""
    for rank, found in enumerate(ranks):
        assert found["own"] == {"x": 2.0}
        assert f"values of rank {1 - rank} of 2" in found["other"]


@pytest.mark.parametrize(
    ("backend", "expected"), [("nccl", "cuda:3"), ("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("undefined", "cpu")]
)
def test_numbers_are_exchanged_where_the_group_can(
    backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are exchanged on the GPU if the group supports nothing else, and always on a device that is given."""
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert torch.device(MetricsTracker()._device_of_exchange()) == torch.device(expected)
    assert MetricsTracker(device="meta")._device_of_exchange() == "meta"


def test_fault_the_state_is_refused_by_a_safe_load_and_aliases_the_tracker() -> None:
    """The state loads with weights_only=True, stays as saved, and is restored completely in the middle of a step."""
    metrics = MetricsTracker({"m": "mean"})
    metrics.update({"m": 1, "n": 2}).end_epoch().update({"m": 3}).reduce().update({"m": 5, "n": 1})
    file = io.BytesIO()
    torch.save(metrics.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kept = metrics.state_dict()
    metrics.update({"m": 100}).reduce().end_epoch()
    assert kept == state
    again = MetricsTracker({"m": "mean"}).load_state_dict(state)
    assert again.state_dict() == state
    assert dict(again.reduce().agg) == {"m": 4.0, "n": 1.0}
    state["epoch_reports"].clear()
    assert len(again.epoch_reports) == 1


def test_the_originals_state_continues_here() -> None:
    """The original's sums are taken, a tracker that does not sum says so, and anything but a state is refused."""
    state = {"epoch_reports": [{"loss": 1.0}], "agg": {"loss": 2.0}}
    metrics = MetricsTracker().load_state_dict(state).update({"loss": 1}).reduce()
    assert metrics.end_epoch().epoch_reports == [{"loss": 1.0}, {"loss": 3.0}]
    with pytest.raises(NotExactError, match="reduced by 'sum', but this tracker has reduce_op='mean'"):
        MetricsTracker("mean").load_state_dict(state)
    for bad in ({}, {"agg": {}}, {**state, "version": 9}):
        with pytest.raises(ValueError, match="not a state"):
            MetricsTracker().load_state_dict(bad)


def test_values_of_another_rank_are_left_out_if_asked(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """With strict=False this is logged."""
    state = {**MetricsTracker().update({"x": 1}).state_dict(), "rank": 1, "num_ranks": 2}
    with pytest.raises(NotExactError, match="values of rank 1 of 2"):
        MetricsTracker().load_state_dict(state)
    assert dict(MetricsTracker().load_state_dict(state, strict=False).local) == {}
    assert "values of rank 1 of 2" in caplog.text

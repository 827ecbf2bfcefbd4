"""With three ranks, the order in which DDP sums gradients continues, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_faulttolerant.testing import KillAt, NotTheSame
from lightning_faulttolerant.testing.exactness import Runs
from lightning_faulttolerant.trainer.ranks.strategies import Buckets
from tests.rank_runs import SECONDS, assert_ranks_continue, for_ranks, rank_fit
from tests.runs import Cut, Net

pytestmark = for_ranks
FIRST_BATCH = Cut(kill=1, every=1, continues_at=(0, 1))
SECOND_BATCH = Cut(kill=2, every=1, continues_at=(0, 2))
LATER = Cut(kill=12, every=11, continues_at=(1, 3))


class Crossed(Net):
    """Its layers produce their gradients in another order than that of their creation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 if i == 3 else 17, 17) for i in range(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for i in (3, 0, 5, 1, 4, 2):
            batch = self.layers[i](batch).tanh()
        return batch.square().mean()

    def validation_step(self, *_: Any) -> None:
        return

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def assert_sums_continue(cut: Cut, *, ddp: dict[str, Any] | None = None, **arguments: Any) -> None:
    """Check that three ranks with DDP's options `ddp` obey the law."""
    arguments = {"module": Crossed, "limit_val_batches": 0, "strategy": DDPStrategy(**(ddp or {})), **arguments}
    assert_ranks_continue(cut, num_ranks=3, **arguments)


@pytest.mark.parametrize(
    "cut", [FIRST_BATCH, pytest.param(LATER, marks=pytest.mark.slow)], ids=["after-the-first-batch", "later"]
)
def test_three_ranks_sum_in_the_same_order(cut: Cut) -> None:
    """Gradients are summed in the uninterrupted run's order, even before DDP has rebuilt its buckets."""
    assert_sums_continue(cut)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ddp",
    [
        {"bucket_cap_mb": 0.003},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=lambda ddp: next(iter(ddp)),
)
def test_options_of_ddp(ddp: dict[str, Any]) -> None:
    """The same holds with several buckets, gradients as bucket views, a static graph, and unused parameters."""
    assert_sums_continue(SECOND_BATCH, ddp=ddp)


@pytest.mark.slow
@pytest.mark.parametrize("view", [False, True])
def test_inside_a_window(view: bool) -> None:
    """The same holds inside an accumulation window, whose gradients are put back into the buckets."""
    assert_sums_continue(
        Cut(kill=5, every=1, continues_at=(0, 3)),
        ddp={"gradient_as_bucket_view": view},
        accumulate_grad_batches=3,
    )


@pytest.mark.slow
def test_other_order_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DDP's first layout after a restart, the last bits differ: three ranks need the order."""
    monkeypatch.setattr(Buckets, "load_state_dict", lambda self, state: [])
    with pytest.raises(NotTheSame, match="the interrupted run"):
        assert_sums_continue(SECOND_BATCH)


@pytest.mark.slow
def test_lost_order_is_reported(tmp_path: Path) -> None:
    """DDP with a static graph does not reveal the order after the first batch: the report says so."""
    fit = rank_fit(
        3, module=Crossed, limit_val_batches=0, strategy=DDPStrategy(static_graph=True), max_steps=4, max_epochs=-1
    )
    runs = Runs(fit, tmp_path, {"every_n_train_steps": 1}, SECONDS, num_ranks=3)
    assert runs.start("run", [KillAt(1)], seed=1, with_callback=True).exit_code < 0
    resumed = runs.start("run", [], seed=2, with_callback=True)
    assert resumed.exit_code == 0, resumed.output
    assert "may differ in the last bits: with static_graph=True" in resumed.output


class Compressed(DDPStrategy):
    """Has a communication hook with state, as PowerSGD's; Lightning supports such hooks only on a GPU."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook({"num": 0}, counting_hook)


def counting_hook(state, bucket):  # DDP rejects annotations that are strings
    """Scale a gradient by the number of calls."""
    state["num"] += 1
    bucket.buffer().div_(state["num"])
    return allreduce_hook(None, bucket)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_hook_with_a_state_is_reported(strict: bool, tmp_path: Path) -> None:
    """A communication hook's state is in no checkpoint: a resume is refused, or reported as not exact."""
    fit = rank_fit(2, module=Crossed, limit_val_batches=0, strategy=Compressed(), max_steps=4, max_epochs=-1)
    runs = Runs(fit, tmp_path, {"every_n_train_steps": 1, "strict": strict}, SECONDS, num_ranks=2)
    assert runs.start("run", [KillAt(2)], seed=1, with_callback=True).exit_code < 0
    resumed = runs.start("run", [], seed=2, with_callback=True)
    assert resumed.exit_code == (1 if strict else 0), resumed.output
    assert "communication hook counting_hook keeps a state" in resumed.output
    assert ("NOT EXACTLY" in resumed.output) is not strict

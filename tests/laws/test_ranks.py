"""The law on several ranks: each resumes with its own state, whichever is killed or asked to stop, in any strategy."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchmetrics import MaxMetric, MeanMetric

from tests.laws.cuts import Cut
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Start, Training, assert_continues, whole_run

# Lightning's and torch's advice: these laws are about values that differ from rank to rank, and about old strategies.
pytestmark = [
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning"),
]
TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Apart(Net):
    """Logs in all ways and keeps metrics and lists. The higher its rank, the more random numbers it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.largest, self.validated = MeanMetric(), MaxMetric(), MeanMetric()
        self.outputs: list[float] = []
        self.num_steps = 0
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(self.global_rank):
            random.gauss(0, 1), np.random.randn(), torch.randn(3)
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss), self.largest.update(loss)
        self.outputs.append(loss.item())
        self.num_steps += 2 - min(self.global_rank, 1)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("of_first", loss, on_step=True, on_epoch=True, rank_zero_only=True)
        self.log("steps", float(self.num_steps))
        self.log("last", self.last)
        factor = 1 + 0.01 * torch.randn(()) + 0.01 * self.num_steps + 0.1 * self.last
        self.last = loss.detach()  # DDP's forward passes don't synchronize it
        return loss * factor

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("largest", self.largest.compute())
        self.log("listed", sum(self.outputs))
        self.largest.reset(), self.outputs.clear()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        super().validation_step(batch, batch_idx)
        loss = self.loss(batch + 0.1 * torch.randn(()))
        self.validated.update(loss)
        self.log("validated", self.validated)
        self.log("synced_val_loss", loss, sync_dist=True)
        return loss


class Manual(Apart):
    """Uses manual optimization: DDP sends buffers only before the first batch, so each rank's batch norm differs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Slowly(Callback):
    """Is slow, so that the ranks agree on a stop within the next batches."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.03)

    def on_validation_batch_start(self, *_: Any) -> None:
        time.sleep(0.03)


class Crossed(Net):
    """Its layers produce their gradients in another order than that of their creation; without noise in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 if i == 3 else 17, 17) for i in range(6))

    def loss(self, batch: Tensor) -> Tensor:
        for i in (3, 0, 5, 1, 4, 2):
            batch = self.layers[i](batch).tanh()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InShards(Apart):
    """Shards each layer and then all together (FSDP2)."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.layers[0], self.layers[1], self.layers[3], self.layers):
            fully_shard(layer, mesh=mesh)


class LeavesOut(Apart):
    """Has a teacher that its ``state_dict`` lacks, and half of a weight in it; a hook drops weights and states."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        found.update({name: one.detach() / 2 for name, one in found.items() if name.endswith("layers.3.weight")})
        return {name: value for name, value in found.items() if not name.startswith("teacher.")}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if "layers.0" not in name}
        checkpoint["optimizer_states"] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for weight in self.teacher.parameters():
            weight.data.mul_(0.9)
        return super().training_step(batch, batch_idx) + self.teacher(torch.rand(4, 4)).square().mean()


class InShardsLeavesOut(LeavesOut, InShards):
    """The same in shards of FSDP2."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.teacher, mesh=self.device_mesh["data_parallel"])


def fsdp2(*, is_directory: bool = True) -> ModelParallelStrategy:
    """Return the strategy of `InShards`."""
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=is_directory)


KILLS = [
    Cut(at=(0, 2), rank=1),
    Cut(at=(0, 5), hook="validation"),
    Cut(at=(1, 0), hook="step", rank=0),
    Cut(at=(1, 2), by=TERM, rank=1),
]
"""One rank is killed, then both at once, then the other one; then one is asked to stop."""
FEW = [Cut(at=(0, 1), rank=0), Cut(at=(1, 2), by=TERM, rank=1)]
OF_DDP = [Cut(at=(0, 1), rank=2), Cut(at=(0, 2)), Cut(at=(1, 3), rank=0, every=4)]


def batches(num_ranks: int = 2, num_workers: int = 0) -> Row:
    """Return a row with 6 batches a rank and epoch, and validation runs of 4."""
    return Row(
        name=f"{num_workers} workers",
        train=rows_of(24 * num_ranks, num_workers=num_workers),
        validation=rows_of(16 * num_ranks, shuffle=False),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows on ranks, and how they are cut."""

    rows: tuple[Row, ...]
    cuts: list[Cut]
    num_ranks: int = 2


def strategy(name: str, module: type[Net], given: Any, **arguments: Any) -> Row:
    """Return a row with a strategy."""
    return Row(name=name, module=module, trainer={"strategy": given, **arguments})


APART = Row(name="apart", module=Apart)
WINDOW = Row(name="window", trainer={"accumulate_grad_batches": 3}, repeats=3)
CASES = {
    "two ranks with workers": Case(rows=(APART, batches(num_workers=2)), cuts=KILLS),
    "buffers of each rank": Case(rows=(Row(name="manual", module=Manual), batches()), cuts=FEW),
    "order of sums": Case(
        rows=(strategy("crossed", Crossed, DDPStrategy(), limit_val_batches=0), batches(3)), cuts=OF_DDP, num_ranks=3
    ),
    "fsdp2": Case(rows=(strategy("shards", InShardsLeavesOut, fsdp2()), batches()), cuts=[KILLS[0], KILLS[3]]),
}


def ranks_continue(group: Group, cuts: list[Cut], root: Path, num_ranks: int = 2) -> None:
    """Check the law on several ranks."""
    whole = whole_run(group, root, num_ranks=num_ranks)
    training = Training(group=group, root=root / "cut", num_ranks=num_ranks, more=lambda: [Slowly()])
    assert_continues(whole, training, cuts)


@pytest.mark.parametrize("name", CASES)
def test_ranks_continue(name: str, tmp_path: Path) -> None:
    """Killed one by one or together, or stopped by a signal to one, ranks continue each with its own state."""
    case = CASES[name]
    ranks_continue(Group(rows=case.rows), case.cuts, tmp_path, case.num_ranks)


RARELY = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}


def test_stop_of_one_rank(tmp_path: Path) -> None:
    """Whichever rank gets the signal, all save at one boundary and end with its code; no batch runs twice."""
    validation = replace(batches(), validation=rows_of(160, shuffle=False))
    group = Group(rows=(APART, validation, replace(WINDOW, repeats=0), Row(name="rarely", options=RARELY)))
    whole = whole_run(group, tmp_path, num_ranks=2)
    training = Training(group=group, root=tmp_path / "cut", num_ranks=2, more=lambda: [Slowly()])
    cut = Cut(at=(0, 2), by=TERM, rank=1)
    assert_continues(whole, training, [cut])
    assert training.starts[0].codes == [cut.exit_code] * 2
    for kind in ("batch", "evaluated"):
        assert count(kind, *training.starts) == sum(event["kind"] == kind for event in whole[0])


def count(kind: str, *starts: Start) -> int:
    """Return how many events of a kind rank 0 has had."""
    return sum(event["kind"] == kind for start in starts for event in start.events[0])

"""The law on several ranks: each resumes with its own state, whichever is killed or asked to stop, in any strategy."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_faulttolerant.testing import leave_out_part
from tests.faulty_files import FullDisk
from tests.laws.cuts import Cut
from tests.laws.data_sets import HoldingDataset, NoisyDataset
from tests.laws.events import different_names
from tests.laws.ranks import FOR_RANKS, Apart, InShards, Slowly, batches, fsdp2, rank_here
from tests.laws.rows import Group, Net, Row, all_rows, rows_of
from tests.laws.runs import Start, Training, assert_continues, whole_run
from tests.messages import plain

pytestmark = FOR_RANKS
TERM, KILL = signal.SIGTERM, signal.SIGKILL


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


class OwnRows(NoisyDataset):
    """Has more rows on rank 1, and others."""

    def __init__(self) -> None:
        super().__init__(24 + 8 * rank_here())
        self.rows += rank_here()


class OwnOrder(Sampler[list[int]]):
    """Yields larger batches on rank 1, in an order from Python's generator, from which rank 1 has drawn more."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.length, self.size = len(data), 3 + rank_here()  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.length // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(self.length), self.length)
        return (order[i * self.size : (i + 1) * self.size] for i in range(len(self)))


class Shards(IterableDataset[Tensor]):
    """Every rank and each of its workers reads its own lines."""

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        number, num_workers = (info.id, info.num_workers) if info else (0, 1)
        for line in range(rank_here() * num_workers + number, 64, 2 * num_workers):
            yield torch.full((4,), float(line)) / 64 + 0.1 * torch.randn(4)


class HoldingByRank(HoldingDataset):
    """Draws from its own generators; the higher the rank, the more."""

    def __getitem__(self, index: int) -> Tensor:
        for _ in range(rank_here()):
            self.python.gauss(0, 1), self.numpy.normal(), self.legacy.randn(), torch.randn(1, generator=self.torch)
        return super().__getitem__(index)


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


class TwoOptimizers(InShards):
    """Has an optimizer that takes its first step in the fifth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 if self.current_epoch == 0 and batch_idx < 4 else 2]:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters(), lr=0.01) for layer in (self.layers[0], self.layers[3])]


class Split(Net):
    """Splits its linear layers over the ranks. All ranks have the same batches and draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


class Fsdp1(FSDPStrategy):
    """FSDP1 on the CPU. Torch runs it there if it gets the device; Lightning does not pass one."""

    def _setup_model(self, model: nn.Module) -> Any:
        return FullyShardedDataParallel(
            module=model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )


KILLS = [
    Cut(at=(0, 2), rank=1),
    Cut(at=(0, 5), hook="validation"),
    Cut(at=(1, 0), hook="step", rank=0),
    Cut(at=(1, 2), by=TERM, rank=1),
]
"""One rank is killed, then both at once, then the other one; then one is asked to stop."""
IN_VALIDATION = Cut(at=(0, 5), hook="validation", by=TERM, rank=1)
FEW = [Cut(at=(0, 1), rank=0), Cut(at=(1, 2), by=TERM, rank=1)]
OF_DDP = [Cut(at=(0, 1), rank=2), Cut(at=(0, 2)), Cut(at=(1, 3), rank=0, every=4)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows on ranks, and how they are cut."""

    rows: tuple[Row, ...]
    cuts: list[Cut]
    num_ranks: int = 2
    is_quick: bool = False


def strategy(name: str, module: type[Net], given: Any, **arguments: Any) -> Row:
    """Return a row with a strategy."""
    return Row(name=name, module=module, trainer={"strategy": given, **arguments})


def same_rows(*, shuffle: bool = True) -> DataLoader[Any]:
    """Return a loader without noise: ranks that share a model get the same batches."""
    return DataLoader(NoisyDataset(24).rows, batch_size=4, shuffle=shuffle)


APART = Row(name="apart", module=Apart)
WINDOW = Row(name="window", trainer={"accumulate_grad_batches": 3}, repeats=3)
CASES = {
    "two ranks with workers": Case(rows=(APART, batches(num_workers=2)), cuts=KILLS, is_quick=True),
    "a window": Case(
        rows=(APART, batches(), WINDOW, Row(name="stops", callbacks=lambda: EarlyStopping("val_loss", patience=5))),
        cuts=KILLS,
    ),
    "buffers of each rank": Case(rows=(Row(name="manual", module=Manual), batches()), cuts=FEW, is_quick=True),
    "three ranks": Case(
        rows=(APART, batches(3)), cuts=[Cut(at=(0, 2), rank=2), Cut(at=(1, 1)), KILLS[-1]], num_ranks=3
    ),
    "own data": Case(
        rows=(
            APART,
            Row(
                name="own",
                train=lambda: DataLoader(OwnRows(), batch_sampler=OwnOrder(OwnRows()), num_workers=2),
                validation=lambda: DataLoader(OwnRows(), batch_size=4),
                trainer={"use_distributed_sampler": False, "limit_train_batches": 8, "limit_val_batches": 2},
            ),
        ),
        cuts=KILLS,
    ),
    "streams": Case(
        rows=(
            APART,
            Row(
                name="own",
                train=lambda: DataLoader(Shards(), batch_size=4, num_workers=2),
                validation=lambda: DataLoader(Shards(), batch_size=4),
                trainer={"limit_train_batches": 6, "limit_val_batches": 2},
            ),
        ),
        cuts=KILLS,
    ),
    **{
        f"order of sums, {name}": Case(
            rows=(strategy("crossed", Crossed, DDPStrategy(**options), limit_val_batches=0), batches(3), *more),
            cuts=OF_DDP,
            num_ranks=3,
            is_quick=not options and not more,
        )
        for name, options, more in (
            ("plain", {}, ()),
            ("small buckets", {"bucket_cap_mb": 0.003}, ()),
            ("unused parameters", {"find_unused_parameters": True}, ()),
            ("window", {}, (WINDOW,)),
            ("views in a window", {"gradient_as_bucket_view": True}, (WINDOW,)),
        )
    },
    "fsdp2": Case(
        rows=(strategy("shards", InShardsLeavesOut, fsdp2()), batches()), cuts=[KILLS[0], KILLS[3]], is_quick=True
    ),
    "fsdp2 in a window": Case(
        rows=(strategy("shards", InShards, fsdp2(), val_check_interval=2), batches(num_workers=2), WINDOW),
        cuts=[IN_VALIDATION, *KILLS],
    ),
    "fsdp2 in one file": Case(
        rows=(strategy("shards", InShardsLeavesOut, fsdp2(is_directory=False)), batches()), cuts=KILLS
    ),
    "two optimizers in shards": Case(
        rows=(strategy("shards", TwoOptimizers, fsdp2(), val_check_interval=3), batches()), cuts=KILLS
    ),
    "tensor parallel": Case(
        rows=(
            strategy("split", Split, ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)),
            Row(name="same", train=same_rows, validation=lambda: same_rows(shuffle=False)),
        ),
        cuts=FEW,
    ),
    "fsdp1": Case(
        rows=(strategy("fsdp1", LeavesOut, Fsdp1(state_dict_type="sharded")), batches()),
        cuts=[KILLS[0], IN_VALIDATION, KILLS[3]],
    ),
}


def ranks_continue(group: Group, cuts: list[Cut], root: Path, num_ranks: int = 2) -> None:
    """Check the law on several ranks."""
    whole = whole_run(group, root, num_ranks=num_ranks)
    training = Training(group=group, root=root / "cut", num_ranks=num_ranks, more=lambda: [Slowly()])
    assert_continues(whole, training, cuts)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.is_quick else pytest.mark.slow) for name, case in CASES.items()]
)
def test_ranks_continue(name: str, tmp_path: Path) -> None:
    """Killed one by one or together, or stopped by a signal to one, ranks continue each with its own state."""
    case = CASES[name]
    ranks_continue(Group(rows=case.rows), case.cuts, tmp_path, case.num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_continue_from_a_bucket(kind: str, tmp_path: Path, s3: str) -> None:
    """Autosaves below a URL are objects, or sets of objects, from which each rank continues."""
    rows = (strategy("shards", InShards, fsdp2()) if kind == "fsdp2" else APART, batches())
    whole = whole_run(Group(rows=rows), tmp_path, num_ranks=2)
    group = Group(rows=(*rows, Row(name="store", options={"dirpath": s3})))
    assert_continues(whole, Training(group=group, root=tmp_path / "cut", num_ranks=2), KILLS[:1])


ROWS = (
    ("PersistentTracker", "WrappedByWarmup", "KeyedByParameter", "Meters", "Tree"),
    ("drawn rates", "Hyperparameters", "Uncopied", "two of one class", "ChangesTrainer"),
)


@pytest.mark.parametrize("names", ROWS, ids="+".join)
def test_rows_on_two_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    """Features of other laws continue on two ranks."""
    group = Group(rows=(*(all_rows()[name] for name in names), batches()))
    ranks_continue(group, [Cut(at=(0, 1), rank=1), Cut(at=(1, 0), hook="step", rank=0)], tmp_path)


RARELY = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}
STOPS = {
    "another rank": Cut(at=(0, 2), by=TERM, rank=1),
    "rank 0": Cut(at=(1, 0), by=signal.SIGINT, rank=0),
    "all": Cut(at=(0, 2), by=TERM),
    "in validation": Cut(at=(0, 0), by=TERM, hook="validation", rank=1),
    "in validation, rank 0": Cut(at=(0, 0), by=TERM, hook="validation", rank=0),
    "at the end of an epoch": Cut(at=(0, 0), by=TERM, hook="epoch end", rank=1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "another rank" else pytest.mark.slow) for name in STOPS]
)
def test_stop_of_one_rank(name: str, tmp_path: Path) -> None:
    """Whichever rank gets the signal, all save at one boundary and end with its code; no batch runs twice."""
    validation = replace(batches(), validation=rows_of(160, shuffle=False))
    group = Group(rows=(APART, validation, replace(WINDOW, repeats=0), Row(name="rarely", options=RARELY)))
    whole = whole_run(group, tmp_path, num_ranks=2)
    training = Training(group=group, root=tmp_path / "cut", num_ranks=2, more=lambda: [Slowly()])
    cut = STOPS[name]
    assert_continues(whole, training, [cut])
    assert training.starts[0].codes == [cut.exit_code] * 2
    for kind in ("batch", "evaluated"):
        assert count(kind, *training.starts) == sum(event["kind"] == kind for event in whole[0])


def count(kind: str, *starts: Start) -> int:
    """Return how many events of a kind rank 0 has had."""
    return sum(event["kind"] == kind for start in starts for event in start.events[0])


CONTROLS = ("rng", "objects", "metrics", "loaders", "results", "held", "buffers")


@pytest.mark.slow
@pytest.mark.parametrize("part", CONTROLS)
def test_ranks_without_a_part(part: str, tmp_path: Path) -> None:
    """A negative control: without a part of the state, at least one rank's run is another one."""
    holding = Row(name="holding", train=lambda: DataLoader(HoldingByRank(48), batch_size=4, shuffle=True))
    group = Group(rows=(APART, holding, WINDOW))
    whole = whole_run(group, tmp_path, num_ranks=2)
    training = Training(group=group, root=tmp_path / "cut", num_ranks=2)
    training.start(Cut(at=(0, 4)))
    for path in (tmp_path / "cut").rglob("autosave-*.ckpt"):
        leave_out_part(path, part)
    rest = training.start(strict=False)
    assert any(different_names(one, other) for one, other in zip(whole, rest.events, strict=True)), rest.output


class Drifts(Net):
    """Changes a weight on one rank only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[0].weight.data[0, 0] += 0.01 * self.global_rank
        return super().training_step(batch, batch_idx)


class PartlyInShards(Net):
    """Forgets to shard its last layer, so its gradients are not averaged."""

    def configure_model(self) -> None:
        fully_shard(self.layers[0], mesh=self.device_mesh["data_parallel"])


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


@dataclass(frozen=True, kw_only=True)
class Told:
    """A resume of two or three ranks that is refused, or that says what it can't promise."""

    row: Row
    code: int = 1
    num_ranks: int = 2
    strict: bool = True


TOLD = {
    "weights that drift apart": Told(row=Row(name="drifts", module=Drifts)),
    "replicas in part": Told(row=strategy("partly", PartlyInShards, fsdp2(), limit_val_batches=0)),
    "a hook with a state": Told(row=strategy("hook", Crossed, Compressed())),
    "a hook with a state, not strict": Told(row=strategy("hook", Crossed, Compressed()), strict=False, code=0),
    "a static graph": Told(row=strategy("static", Crossed, DDPStrategy(static_graph=True)), num_ranks=3, code=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_what_ranks_are_told(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Weights that differ and states of hooks are refused or told; nothing is exact silently."""
    case = TOLD[name]
    training = Training(
        group=Group(rows=(case.row, batches(case.num_ranks), Row(name="end", trainer={"max_epochs": 1}))),
        root=tmp_path / "run",
        num_ranks=case.num_ranks,
    )
    training.start(Cut(at=(0, 1)), run_id="run")
    start = training.start(strict=case.strict, run_id="run")
    assert start.codes == [case.code] * case.num_ranks, start.output
    text = plain((tmp_path / "run" / "start-1-rank-0.txt").read_text(), DIR=tmp_path)
    lines = [line for line in text.splitlines() if re.search("^[a-z_.]+NotExactError: |EXACT|last bits", line)]
    assert "\n".join(dict.fromkeys(lines)) == snapshot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "disk", "cut", "options"),
    [
        ((APART,), (2, 5, 0), Cut(at=(1, 3), rank=1), {}),
        ((APART,), (2, 5, 0), Cut(at=(1, 3), rank=1), {"async_save": True}),
        ((strategy("shards", InShards, fsdp2()),), (2, 5, 1), Cut(at=(1, 3), rank=0), {}),
        ((APART,), (3, 1_000, 0), Cut(at=(1, 0), rank=1, by=TERM), {}),
    ],
    ids=["rank 0", "in the background", "shard of rank 1", "at a stop"],
)
def test_full_disk_of_one_rank(
    rows: tuple[Row, ...], disk: tuple[int, int, int], cut: Cut, options: dict[str, Any], tmp_path: Path
) -> None:
    """If one rank can't write for a while, all learn of it, none hangs, and all resume exactly afterwards."""
    group = Group(rows=(*rows, batches()))
    whole = whole_run(group, tmp_path, num_ranks=2)
    full = [FullDisk(disk[0], disk[1], rank=disk[2])]
    training = Training(group=group, root=tmp_path / "cut", num_ranks=2, more=lambda: full)
    start = training.start(cut, **options)
    assert start.codes == [74, 74] if cut.by == TERM else start.codes[cut.rank or 0] == -KILL, start.output
    training.more = list
    rest = training.finished()
    for one, part in zip(whole, rest.events, strict=True):
        assert one[-len(part) :] == part, rest.output
    first = next(event for event in rest.events[0] if event["kind"] == "batch")
    assert first["batch"] >= (2 if cut.by == TERM else 0)
    assert first["epoch"] == (0 if cut.by == TERM else 1)

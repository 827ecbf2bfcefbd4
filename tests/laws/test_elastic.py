"""The law of other numbers of ranks: each sample comes once, and what an epoch logs is of all of its samples."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics import CatMetric, MeanMetric

from lightning_faulttolerant import InterruptibleDistributedSampler
from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset
from tests.laws.events import write
from tests.laws.ranks import FOR_RANKS, fsdp2
from tests.laws.rows import Group, Net, Row
from tests.laws.runs import Training
from tests.messages import plain

pytestmark = [
    *FOR_RANKS,
    pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices"),
]
TERM, KILL = signal.SIGTERM, signal.SIGKILL
PER_SAMPLE = {"worker_rng": "per_sample"}
ELASTIC = {"elastic": True}


class Samples(NoisyDataset):
    """A sample is its index and its row, with noise."""

    def __init__(self, length: int = 26) -> None:
        super().__init__(length)

    def __getitem__(self, index: int) -> Any:
        return index, self.rows[index] + torch.rand(4)


class Indexed(Net):
    """Logs the samples' indices in every way, so that what an epoch logs follows from the samples that it had."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.mean, self.all = MeanMetric(), CatMetric()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index = batch[0].float()
        shared = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": len(index)}
        for kind in ("mean", "sum", "max", "min"):
            self.log(kind, getattr(index, kind)(), reduce_fx=kind, **shared)
        self.mean.update(index), self.all.update(index)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return self.loss(batch[1])

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("all", self.all.compute().sum())
        self.all.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", batch[0].float().mean(), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        index = torch.as_tensor(batch[0]).reshape(-1)
        return {"index": index, "row": batch[1].reshape(-1, 4)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class IndexedInShards(Indexed):
    def configure_model(self) -> None:
        for layer in (self.layers[0], self.layers[2], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Book(Callback):
    """Writes the samples that each rank has trained on, and the weights at the end."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, trainer: Trainer, kind: str, **content: Any) -> None:
        write(Path(f"book-{self.number}-{trainer.global_rank}.jsonl").absolute(), kind, **content)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        samples = list(zip(batch[0].tolist(), batch[1].tolist(), strict=True))
        self.write(trainer, "samples", epoch=trainer.current_epoch, batch=batch_idx, samples=samples)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        wholes = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in module.parameters()]
        weights = torch.cat([one.detach().reshape(-1) for one in wholes])
        self.write(trainer, "weights", weights=weights.tolist())


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One start: its number of ranks, its cut, and arguments of the loader, of the Trainer, and of the callback."""

    num_ranks: int
    cut: Cut | None = None
    size: int = 2
    loader: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: PER_SAMPLE)
    module: type[Net] = Indexed
    data: Callable[[], Dataset[Any]] = Samples
    sampler: Callable[[], Any] | None = None
    code: int = 0

    def group(self) -> Group:
        arguments = {"shuffle": self.sampler is None, "batch_size": self.size, **self.loader}
        sampler = self.sampler or (lambda: None)
        row = Row(
            name="samples",
            module=self.module,
            train=lambda: DataLoader(self.data(), **{"sampler": sampler(), **arguments}),
            validation=lambda: DataLoader(Samples(8), batch_size=2),
            trainer={"num_sanity_val_steps": 0, **self.trainer},
            options=self.options,
        )
        return Group(rows=(row,))


def at(epoch: int, batch: int, **more: Any) -> Cut:
    """Return a cut of all ranks."""
    return Cut(at=(epoch, batch), **more)


def run(root: Path, *legs: Leg, seed: int = 7) -> Training:
    """Run the starts one after the other, as restarts of one command."""
    training = Training(group=legs[0].group(), root=root, before=lambda: os.environ.update(PL_GLOBAL_SEED=str(seed)))
    for number, leg in enumerate(legs):
        training.group, training.num_ranks = leg.group(), leg.num_ranks
        training.more = lambda number=number: [Book(number)]  # type: ignore[misc]
        start = training.start(leg.cut)
        code = leg.cut.exit_code if leg.cut else leg.code
        assert {*start.codes} - {-TERM} == {code}, start.output  # when one rank has failed, the others are ended
    return training


def booked(root: Path, number: int) -> list[list[dict[str, Any]]]:
    """Return what the ranks of a start have written."""
    paths = sorted(root.glob(f"book-{number}-*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def samples(root: Path, epoch: int, number: int) -> list[tuple[int, list[float]]]:
    """Return the samples of an epoch in a start, with their noise, in the order of all ranks."""
    ranks = [
        [e["samples"] for e in rank if e["kind"] == "samples" and e["epoch"] == epoch] for rank in booked(root, number)
    ]
    batches = zip(*ranks, strict=True)
    return [tuple(sample) for batch in batches for row in zip(*batch, strict=True) for sample in row]


def weights(root: Path, number: int) -> Tensor:
    """Return the weights at the end of a start."""
    return torch.tensor(booked(root, number)[0][-1]["weights"])


OWN = Leg(num_ranks=2, options={**ELASTIC, **PER_SAMPLE}, sampler=lambda: InterruptibleDistributedSampler(26))
WAYS = {
    "2 to 1": [Leg(num_ranks=2, cut=at(0, 3)), Leg(num_ranks=1)],
    "1 to 2": [Leg(num_ranks=1, loader={"num_workers": 2}, cut=at(0, 3)), Leg(num_ranks=2, loader={"num_workers": 3})],
    "2 to 1, sampler of this package": [replace(OWN, cut=at(0, 3)), replace(OWN, num_ranks=1)],
    "2 to 3 to 1": [Leg(num_ranks=2, cut=at(1, 1)), Leg(num_ranks=3, cut=at(1, 2)), Leg(num_ranks=1)],
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (not way.startswith("2 to 1"))) for way in WAYS]
)
def test_every_sample_once_in_order(way: str, tmp_path: Path) -> None:
    """However the numbers of ranks and workers change, each sample comes once, with the same augmentation."""
    legs = WAYS[way]
    run(tmp_path / "whole", replace(legs[0], cut=None))
    training = run(tmp_path / "cut", *legs)
    assert legs[0].cut is not None
    epoch = legs[0].cut.at[0]
    found = [sample for number in range(len(legs)) for sample in samples(tmp_path / "cut", epoch, number)]
    whole = samples(tmp_path / "whole", epoch, 0)
    assert found[:26] == whole[:26]
    assert len(found) - 26 < max(leg.num_ranks for leg in legs)  # padding
    indices = torch.tensor([float(index) for index, _ in found])
    logs = (event for event in training.starts[-1].events[0] if event["kind"] == "log" and "sum" in event["names"])
    shown = next(logs)["values"]
    for kind in ("mean", "sum", "max", "min"):
        assert float.fromhex(shown[kind]) == pytest.approx(getattr(indices, kind)().item(), rel=1e-6), kind
    assert float.fromhex(shown["metric"]) == pytest.approx(indices.mean().item(), rel=1e-6)
    assert float.fromhex(shown["all"]) == pytest.approx(indices.sum().item(), rel=1e-6)
    batches = [e["batch"] for e in booked(tmp_path / "cut", len(legs) - 1)[0] if e.get("epoch") == epoch]
    assert batches[-1] == -(-26 // (2 * legs[-1].num_ranks)) - 1  # counted as if these ranks had run the whole epoch
    if epoch == 0:
        assert sorted({index for index, _ in samples(tmp_path / "cut", 1, len(legs) - 1)}) == list(range(26))


@pytest.mark.slow
def test_equal_global_batches_take_the_same_steps(tmp_path: Path) -> None:
    """With as many samples in each step as before, the samples and the weights are those of the whole run."""
    ways = [(2, at(0, 2)), (1, at(0, 4)), (2, None)]
    legs = [
        Leg(
            num_ranks=num_ranks, cut=cut, size=4 // num_ranks, data=lambda: Samples(24), module=IndexedInShards,
            trainer={"max_epochs": 1, **in_shards(num_ranks)},
        )
        for num_ranks, cut in ways
    ]  # fmt: skip
    run(tmp_path / "whole", replace(legs[0], cut=None))
    run(tmp_path / "cut", *legs)
    found = [sample for number in range(3) for sample in samples(tmp_path / "cut", 0, number)]
    assert found == samples(tmp_path / "whole", 0, 0)
    torch.testing.assert_close(weights(tmp_path / "cut", 2), weights(tmp_path / "whole", 0), rtol=1e-4, atol=1e-6)


TWO = Leg(num_ranks=2, cut=at(0, 3))
IN_VALIDATION = at(0, 0, hook="validation", by=TERM)


def in_shards(num_ranks: int, *, accumulate: int = 1) -> dict[str, Any]:
    """Return arguments of the Trainer for FSDP2."""
    return {"strategy": fsdp2(num_ranks), "accumulate_grad_batches": accumulate, "limit_val_batches": 0}


WEIGHTED = {"shuffle": None, "sampler": WeightedRandomSampler([1.0] * 26, 26)}
UNEQUAL: dict[str, list[Leg]] = {
    "random states": [replace(TWO, options={}), Leg(num_ranks=1, options={}, code=1)],
    "random states, elastic": [replace(TWO, options=ELASTIC), Leg(num_ranks=1, options=ELASTIC)],
    "a window that does not fit": [
        Leg(num_ranks=1, cut=at(0, 2, by=TERM), trainer={"accumulate_grad_batches": 2}),
        Leg(num_ranks=2, trainer={"accumulate_grad_batches": 2}, code=1),
    ],
    "too few are left": [
        Leg(num_ranks=1, cut=at(0, 12), loader={"drop_last": True}),
        Leg(num_ranks=2, loader={"drop_last": True}, code=1),
    ],
    "in validation": [Leg(num_ranks=1, cut=IN_VALIDATION, options={}), Leg(num_ranks=2, options={}, code=1)],
    "shards in a window": [
        Leg(num_ranks=2, cut=at(0, 2, by=TERM), module=IndexedInShards, trainer=in_shards(2, accumulate=8)),
        Leg(num_ranks=1, module=IndexedInShards, trainer=in_shards(1, accumulate=8), code=1),
    ],
    "a sampler of the user's": [
        replace(TWO, loader=WEIGHTED, trainer={"use_distributed_sampler": False}),
        Leg(num_ranks=1, loader=WEIGHTED, trainer={"use_distributed_sampler": False}, code=1),
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEQUAL)
def test_what_can_not_continue_with_other_ranks(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What other ranks or workers can't continue is refused; if the user allows it, the report says what is lost."""
    legs = UNEQUAL[name]
    run(tmp_path, *legs)
    text = plain((tmp_path / "start-1-rank-0.txt").read_text(), DIR=tmp_path)
    lines = [line for line in text.splitlines() if "Error: " in line or "EXACT" in line]
    assert "\n".join(lines) == snapshot
    if not legs[-1].code:
        found = [index for number in range(2) for index, _ in samples(tmp_path, 0, number)]
        assert sorted(found) == list(range(26))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "hook"), [((2, 1), "step"), ((1, 2), "validation"), ((2, 1), "epoch end")], ids=str)
def test_what_an_epoch_still_owes_is_done_once(way: tuple[int, int], hook: str, tmp_path: Path) -> None:
    """From a batch, a validation run, or the end of an epoch, each validation runs once, and each sample comes once."""
    first = Leg(num_ranks=way[0], cut=at(0, 12 // way[0] - 1, hook=hook), trainer={"val_check_interval": 0.5})
    legs = [replace(leg, data=lambda: Samples(24)) for leg in (first, replace(first, num_ranks=way[1], cut=None))]
    training = run(tmp_path, *legs)
    found = [index for number in range(2) for index, _ in samples(tmp_path, 0, number)]
    assert sorted({*found}) == list(range(24))
    ran = [sum(e["kind"] == "evaluation end" for e in start.events[0]) for start in training.starts]
    assert sum(ran) >= 4 >= ran[-1]


class Writes(BasePredictionWriter):
    """Writes the indices that it is given, and those in the predictions, of each batch and at the end."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Any, given: Any, *batch: Any) -> None:
        time.sleep(0.05)  # the ranks have to agree on a stop
        place = {"batch": [batch[2], batch[1]], "start": len(list(Path().glob("start-*-rank-0.jsonl")))}
        self.write(**place, given=given, predicted=prediction["index"].tolist())

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        loaders = predictions if predictions and isinstance(predictions[0], list) else [predictions]
        self.write(given=batch_indices, predicted=[[one["index"].tolist() for one in each] for each in loaders])

    def write(self, **content: Any) -> None:
        write(Path("written.jsonl").absolute(), "batch" if "batch" in content else "end", **content)


def predicts(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Predict, and write what is returned."""
    found = trainer.predict(module, group.data()["val_dataloaders"])
    torch.save(found, f"returned-{trainer.global_rank}.pt")


def predicting(*sizes: int, options: Any = ELASTIC, **loader: Any) -> Group:
    """Return a group that predicts samples of loaders of these sizes, and saves before each batch."""

    def loaders() -> list[DataLoader[Any]]:
        found = [DataLoader(Samples(size), batch_size=2, **loader) for size in sizes]
        return found if len(found) > 1 else found[0]  # type: ignore[return-value]

    options = {"every_n_train_steps": None, "train_time_interval": timedelta(microseconds=1), **options}
    return Group(rows=(Row(name="predicts", module=Indexed, validation=loaders, callbacks=Writes, options=options),))


def predicted(root: Path, group: Group, *ways: tuple[int, Cut | None]) -> Training:
    """Start a predict with these numbers of ranks, and cuts."""
    training = Training(group=group, root=root, stage=predicts)
    for training.num_ranks, cut in ways:
        start = training.start(cut)
        assert (cut.exit_code if cut else 0) in start.codes, start.output
    return training


def in_batch(batch: int, by: int = KILL, loader: int = 0) -> Cut:
    """Return a cut of all ranks in a batch of a predict."""
    return Cut(at=(0, 0), hook="validation", inside=(loader, batch), by=by)


# The sizes of the loaders, the options, and the numbers of ranks with their cuts.
PREDICTS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[tuple[int, Cut | None]]]] = {
    "2 to 1": ((49,), ELASTIC, [(2, in_batch(3)), (1, None)]),
    "2 to 3": ((49,), PER_SAMPLE, [(2, in_batch(3, TERM)), (3, None)]),
    "again and again": ((61,), ELASTIC, [(2, in_batch(3)), (3, in_batch(5)), (3, in_batch(6)), (1, None)]),
    "loaders": ((9, 31, 5), PER_SAMPLE, [(2, in_batch(2, loader=1)), (3, None)]),
    "a finished one": ((21, 9), ELASTIC, [(2, Cut(at=(0, 0), hook="validation end")), (1, None)]),
    "ranks without a batch": ((9,), PER_SAMPLE, [(1, in_batch(4)), (3, in_batch(4)), (2, None)]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "2 to 1" else pytest.mark.slow) for name in PREDICTS]
)
def test_each_sample_is_predicted_once(name: str, tmp_path: Path) -> None:
    """Each sample is predicted, given to writers, and returned once, whoever predicts it; with its own noise."""
    sizes, options, ways = PREDICTS[name]
    predicted(tmp_path, predicting(*sizes, options=options), *ways)
    returned = [torch.load(tmp_path / f"returned-{rank}.pt") for rank in range(ways[-1][0])]
    rows = []
    for loader, size in enumerate(sizes):
        own = [one for rank in returned for one in (rank if len(sizes) == 1 else rank[loader])]
        index, row = (torch.cat([one[name] for one in own]) for name in ("index", "row"))
        assert sorted(index.tolist()) == list(range(size))
        rows.append(row[index.argsort()])
    noise = torch.cat([row - Samples(size).rows for size, row in zip(sizes, rows, strict=True)])
    assert len({tuple(values) for values in noise.tolist()}) == sum(sizes)  # nobody repeats another one's draws
    written = [json.loads(line) for line in (tmp_path / "written.jsonl").read_text().splitlines()]
    assert all(entry["given"] == entry["predicted"] for entry in written)
    if len(sizes) == 1:
        batches = [entry for entry in written if entry["kind"] == "batch"]
        assert sorted(index for entry in batches for index in entry["predicted"]) == list(range(sizes[0]))
        numbers = [{tuple(e["batch"]) for e in batches if e["start"] == number} for number in range(1, len(ways) + 1)]
        assert sum(map(len, numbers)) == len(set().union(*numbers))  # files that are named by batch stay


OVER = {
    "not elastic": predicting(26, options={}),
    "shuffled": predicting(26, shuffle=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "not elastic" else pytest.mark.slow) for name in OVER]
)
def test_predict_that_starts_over(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Where continuing could lose a sample or change a prediction, predict runs from its start, and says so."""
    predicted(tmp_path, OVER[name], (2, in_batch(2)), (1, None))
    text = plain((tmp_path / "start-1-rank-0.txt").read_text(), DIR=tmp_path)
    assert "\n".join(line for line in text.splitlines() if "starts over" in line) == snapshot
    index = torch.cat([one["index"] for one in torch.load(tmp_path / "returned-0.pt")])
    assert sorted(index.tolist()) == list(range(26))

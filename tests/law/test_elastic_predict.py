"""A ``predict`` continues with another number of ranks: each sample is predicted once, and comes back once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.loader.rest import Rest
from tests.groups import run_group
from tests.runs import make_trainer

WAYS = [(2, 1), (1, 2), (2, 3), (3, 2)]
ALWAYS = {"train_time_interval": timedelta(microseconds=1)}
"""An autosave before each batch that all ranks reach."""


class Rows(Dataset[tuple[int, Tensor]]):
    """A sample is its index and its row, with noise if that is wanted."""

    def __init__(self, length: int, *, noise: float = 0.0) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index] + (self.noise * torch.rand(4) if self.noise else 0.0)


class Net(LightningModule):
    """Predicts a value for each row, and returns the index with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        index, row = batch
        return {"index": index, "value": self.layers(row).flatten(), "row": row}


class Kill(Callback):
    """Kills, or stops, its rank at the start of a batch."""

    def __init__(self, batch: int, loader: int = 0, signum: int = signal.SIGKILL) -> None:
        self.at, self.signum = (loader, batch), signum

    def on_predict_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (dataloader_idx, batch_idx) == self.at:
            os.kill(os.getpid(), self.signum)


class Writer(BasePredictionWriter):
    """Writes a line for each call: the numbers and the indices of its batches, and the indices in the predictions."""

    def __init__(self, path: Path, interval: str) -> None:
        super().__init__(interval)  # type: ignore[arg-type]
        self.path = path

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        place = {"rank": trainer.global_rank, "loader": dataloader_idx, "batch": batch_idx}
        self.write(what="batch", **place, given=list(batch_indices), predicted=prediction["index"].tolist())

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        several = predictions if predictions and isinstance(predictions[0], list) else [predictions]
        predicted = [[one["index"].tolist() for one in of_loader] for of_loader in several]
        self.write(what="epoch", rank=trainer.global_rank, given=batch_indices, predicted=predicted)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One start of the command: its number of ranks, and where each of them is killed."""

    num_ranks: int
    kill: Kill | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all starts have in common."""

    sizes: tuple[int, ...] = (26,)
    batch_size: int = 2
    num_workers: int = 0
    noise: float = 0.0
    interval: str = "batch_and_epoch"
    module: Callable[[], LightningModule] = Net
    loader: Callable[..., Any] = DataLoader
    options: dict[str, Any] = field(default_factory=lambda: {"elastic": True})
    arguments: dict[str, Any] = field(default_factory=dict)
    loader_arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What the starts have written, and what the last one has returned on each rank."""

    output: str
    entries: list[list[dict[str, Any]]]
    returned: list[Any]

    def samples(self, loader: int = 0) -> list[int]:
        """Return the indices that writers saw for one loader, batch by batch, over all starts."""
        batches = (e for of_leg in self.entries for e in of_leg if e["what"] == "batch" and e["loader"] == loader)
        return [index for entry in batches for index in entry["predicted"]]


def run(plan: Plan, *legs: Leg, directory: Path) -> Done:
    """Run the starts one after the other."""
    entries, output = [], ""
    for number, leg in enumerate(legs):
        files = [directory / f"written-{number}-{rank}.jsonl" for rank in range(leg.num_ranks)]
        codes, output = run_group(
            lambda rank, leg=leg, files=files: predict(plan, leg, directory, files[rank]),  # type: ignore[misc]
            num_ranks=leg.num_ranks,
            directory=directory,
        )
        signum = 0 if leg.kill is None else leg.kill.signum
        expected = 143 if signum == signal.SIGTERM else -signum
        assert codes == [expected] * leg.num_ranks, f"leg {number}: {codes}\n{output}"
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        entries.append([json.loads(line) for line in lines])
    returned = [torch.load(directory / f"returned-{rank}.pt") for rank in range(legs[-1].num_ranks)]
    return Done(output, entries, returned)


def predict(plan: Plan, leg: Leg, directory: Path, written: Path) -> None:
    """Predict on one rank."""
    usual = {"batch_size": plan.batch_size, "num_workers": plan.num_workers}
    loaders = [plan.loader(Rows(size, noise=plan.noise), **{**usual, **plan.loader_arguments}) for size in plan.sizes]
    callbacks: list[Callback] = [Writer(written, plan.interval), *([] if leg.kill is None else [leg.kill])]
    options = {**ALWAYS, "dirpath": directory / "autosaves", "run_id": "run", **plan.options, **leg.options}
    ranks = {"devices": leg.num_ranks, "strategy": "ddp" if leg.num_ranks > 1 else "auto"}
    trainer = make_trainer([*callbacks, FaultTolerance(**options)], directory, **{**ranks, **plan.arguments})
    found = trainer.predict(plan.module(), loaders if len(loaders) > 1 else loaders[0])
    torch.save(found, directory / f"returned-{trainer.global_rank}.pt")


def returned(done: Done, loader: int, num_loaders: int) -> Iterator[dict[str, Tensor]]:
    """Yield the predictions of a loader that the last start has returned, on all ranks."""
    for of_rank in done.returned:
        yield from of_rank if num_loaders == 1 else of_rank[loader]


def assert_each_sample_once(plan: Plan, done: Done) -> None:
    """Check what writers saw in all starts, and what the last one has returned and given to writers at its end."""
    net = plan.module().eval()
    for loader, size in enumerate(plan.sizes):
        assert sorted(done.samples(loader)) == list(range(size))
        predictions = list(returned(done, loader, len(plan.sizes)))
        index, value, row = (torch.cat([one[name] for one in predictions]) for name in ("index", "value", "row"))
        assert sorted(index.tolist()) == list(range(size))
        if not plan.noise:
            torch.testing.assert_close(row, Rows(size).rows[index], rtol=0, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(value, net.layers(row).flatten())
    numbers = [[(e["loader"], e["batch"]) for e in of_leg if e["what"] == "batch"] for of_leg in done.entries]
    for earlier, later in zip(numbers, numbers[1:], strict=False):
        assert not set(earlier) & set(later)  # files that a writer names by batch are not overwritten
    for entry in (entry for of_leg in done.entries for entry in of_leg):
        assert entry["given"] == entry["predicted"], entry
    at_end = [entry for entry in done.entries[-1] if entry["what"] == "epoch"]
    assert len(at_end) == len(done.returned)
    for loader in range(len(plan.sizes)):
        found = [index for entry in at_end for batch in entry["given"][loader] for index in batch]
        assert sorted(found) == list(range(plan.sizes[loader]))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_another_number_of_ranks(way: tuple[int, int], signum: int, tmp_path: Path) -> None:
    """Each sample is predicted once, whoever predicts it; writers get the indices of their batches."""
    plan = Plan(sizes=(49,))
    done = run(plan, Leg(num_ranks=way[0], kill=Kill(3, signum=signum)), Leg(num_ranks=way[1]), directory=tmp_path)
    assert_each_sample_once(plan, done)
    first = min(entry["batch"] for entry in done.entries[1] if entry["what"] == "batch")
    assert f"Resumed NOT EXACTLY before batch {first} of predict" in done.output, done.output
    assert first == 3 or (signum == signal.SIGTERM and first > 3)  # to agree takes a moment
    assert f"{ranks(way[0])} when it was saved, {ranks(way[1])} now: batches consist of other samples" in done.output


def ranks(number: int) -> str:
    """Return a number of ranks in words."""
    return "one rank" if number == 1 else f"{number} ranks"

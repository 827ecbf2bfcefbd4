"""Runs that are killed and resume with other numbers of ranks, and a ledger of the samples that they consume."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric

from lightning_faulttolerant import FaultTolerance
from tests.groups import run_group

KILLED = 137


class Rows(Dataset[tuple[int, Tensor]]):
    """A sample is its index and its row, with noise."""

    def __init__(self, length: int) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index] + torch.rand(4)


class Net(LightningModule):
    """Logs the samples' indices in every way, so that the expected values of an epoch follow from the ledger."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.metrics = nn.ModuleDict(
            {"mean": MeanMetric(), "sum": SumMetric(), "max": MaxMetric(), "min": MinMetric(), "cat": CatMetric()}
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, row = batch
        index = index.float()
        for kind, reduced in {"mean": index.mean(), "sum": index.sum(), "max": index.max(), "min": index.min()}.items():
            self.log(kind, reduced, on_step=False, on_epoch=True, reduce_fx=kind, sync_dist=True, batch_size=len(index))
        self.log("unsynced", index.mean(), on_step=False, on_epoch=True, batch_size=len(index))
        for metric in self.metrics.values():
            metric.update(index)
        self.log("metric_mean", self.metrics["mean"], on_step=False, on_epoch=True)
        return self.layers(row).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        index = batch[0].float()
        self.log("val", index.mean(), sync_dist=True, batch_size=len(index))

    def on_train_epoch_end(self) -> None:
        self.computed = {}
        for kind, metric in self.metrics.items():
            value = metric.compute()
            self.computed[kind] = sorted(value.reshape(-1).tolist()) if kind == "cat" else value.item()
            if kind != "mean":
                metric.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One run of the command: its number of ranks, its settings, and where it is killed.

    ``kill`` is an epoch and a batch: all ranks die in the step of that batch. ``save`` is an epoch and a batch, too:
    all ranks save their own checkpoint after that step and die, and the next leg starts from it. In place of the batch,
    ``"start"``, ``"validation"``, or ``"end"`` means the epoch's start, its last validation run, or its end.
    """

    num_ranks: int
    batch_size: int = 2
    num_workers: int = 0
    kill: tuple[int, int] | None = None
    save: tuple[int, int | str] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings that all legs share."""

    length: int = 26
    max_epochs: int = 2
    seed: int | None = 7
    shuffle: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    make_module: Callable[[], LightningModule] = Net
    make_dataset: Callable[[int], Any] = Rows
    make_loader: Callable[..., Any] = DataLoader


class Ledger(Callback):
    """Records each consumed batch and the values of each epoch, on each rank."""

    def __init__(self, path: Path, leg: Leg, own: Path) -> None:
        self.path = path
        self.leg = leg
        self.own = own
        self.fault_tolerance: FaultTolerance | None = None

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write(what="start", num_batches=trainer.num_training_batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.fault_tolerance is not None
        if self.fault_tolerance.resume_report is not None:
            report, self.reported = self.fault_tolerance.resume_report, True
            self.write(what="report", not_exact=list(report.not_exact), batch=report.batch, epoch=report.epoch)
            self.fault_tolerance = FaultTolerance()
        if (trainer.current_epoch, batch_idx) == self.leg.kill:
            os._exit(KILLED)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        entry = {"index": batch[0].tolist(), "noise": batch[1].tolist(), "loss": outputs["loss"].item()}
        where = {"epoch": trainer.current_epoch, "batch": batch_idx, "step": trainer.global_step}
        wholes = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in pl_module.parameters()]
        weights = torch.cat([whole.detach().reshape(-1) for whole in wholes])
        self.write(what="batch", **entry, **where, weights=weights.tolist())
        self._save(trainer, batch_idx)

    def _save(self, trainer: Trainer, where: int | str) -> None:
        if (trainer.current_epoch, where) == self.leg.save:
            trainer.save_checkpoint(self.own)
            os._exit(KILLED)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, "end")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, "start")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self.write(what="validation", epoch=trainer.current_epoch, batch=batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write(what="end", step=trainer.global_step)


class Values(Callback):
    """Records an epoch's values once they exist: at the start of the next epoch, and at the end."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, trainer.current_epoch - 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, trainer.current_epoch - 1)

    def _write(self, trainer: Trainer, module: LightningModule, epoch: int) -> None:
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.ledger.write(what="values", epoch=epoch, values=values, computed=getattr(module, "computed", {}))


def fit(plan: Plan, leg: Leg, directory: Path, ledger: Path) -> None:
    """Train one leg on this rank."""
    torch.set_num_threads(1)
    # Lightning warns about a value that is logged without sync_dist, and about loaders without workers.
    warnings.simplefilter("ignore", PossibleUserWarning)
    if plan.seed is None:
        torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    else:
        seed_everything(plan.seed, verbose=False)
    data = plan.make_dataset(plan.length)
    usual = {"batch_size": leg.batch_size, "num_workers": leg.num_workers, "shuffle": plan.shuffle}
    loader = plan.make_loader(data, **{**usual, **leg.loader})
    validation = plan.make_loader(plan.make_dataset(7), batch_size=2)
    options = {"every_n_train_steps": 1, **plan.options, **leg.options}
    own = directory / "own.ckpt"
    written = Ledger(ledger, leg, own)
    written.fault_tolerance = FaultTolerance(**{"dirpath": str(directory / "autosaves"), "run_id": "run", **options})
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": leg.num_ranks,
        "strategy": "ddp" if leg.num_ranks > 1 else "auto",
        "max_epochs": plan.max_epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(directory),
    }
    callbacks = [written, Values(written), written.fault_tolerance]
    trainer = Trainer(callbacks=callbacks, **{**defaults, **plan.arguments, **leg.arguments})
    trainer.fit(plan.make_module(), loader, validation, ckpt_path=str(own) if own.exists() else None)


def run(plan: Plan, *legs: Leg, directory: Path | None = None, error: str = "") -> list[Entries]:
    """Run the legs one after the other, as restarts of one command; return the entries of each.

    With `error`, the last leg has to fail with it on each rank. An uninterrupted run with a seed happens once for all
    tests of the process.
    """
    if len(legs) > 1 or legs[0].kill or legs[0].save or directory or error or plan.seed is None:
        return _run(plan, *legs, directory=directory, error=error)
    key = cloudpickle.dumps((plan, legs[0]))
    if key not in _uninterrupted:
        _uninterrupted[key] = _run(plan, *legs)
    return _uninterrupted[key]


_uninterrupted: dict[bytes, list[Entries]] = {}


def _run(plan: Plan, *legs: Leg, directory: Path | None = None, error: str = "") -> list[Entries]:
    directory = directory or Path(tempfile.mkdtemp())
    done = []
    for number, leg in enumerate(legs):
        ledgers = [directory / f"ledger-{number}-{rank}.jsonl" for rank in range(leg.num_ranks)]
        exit_codes, output = run_group(
            lambda rank, leg=leg, ledgers=ledgers: fit(plan, leg, directory, ledgers[rank]),  # type: ignore[misc]
            num_ranks=leg.num_ranks,
            directory=directory,
        )
        expected = KILLED if leg.kill or leg.save else 0
        if error and number == len(legs) - 1:
            assert exit_codes == [1] * leg.num_ranks, f"{exit_codes}\n{output}"
            assert error in output, output
            return done
        assert exit_codes == [expected] * leg.num_ranks, f"leg {number}: {exit_codes}\n{output}"
        done.append(Entries([[json.loads(line) for line in path.read_text().splitlines()] for path in ledgers]))
    return done


@dataclass(frozen=True)
class Entries:
    """The entries that the ranks of one leg recorded."""

    ranks: list[list[dict[str, Any]]]

    def batches(self, epoch: int) -> list[list[dict[str, Any]]]:
        """Return for each batch of an epoch the entry of each rank."""
        own = [[e for e in rank if e["what"] == "batch" and e["epoch"] == epoch] for rank in self.ranks]
        return [list(entries) for entries in zip(*own, strict=True)]

    def samples(self, epoch: int) -> list[tuple[int, list[float]]]:
        """Return each consumed sample, with its noise, in the order of all ranks."""
        found = []
        for entries in self.batches(epoch):
            shares = [list(zip(entry["index"], entry["noise"], strict=True)) for entry in entries]
            found += [sample for row in zip(*shares, strict=True) for sample in row]
        return found

    def of(self, what: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return a rank's entries of one kind."""
        return [entry for entry in self.ranks[rank] if entry["what"] == what]


def consumed(done: list[Entries], epoch: int) -> list[int]:
    """Return the indices that all legs consumed in an epoch, in order."""
    return [index for entries in done for index, _ in entries.samples(epoch)]

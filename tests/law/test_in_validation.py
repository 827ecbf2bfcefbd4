"""A fit that is stopped inside a validation run continues before the same batch of it. No batch is seen twice."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.progress import _BatchProgress
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import Interruption, NotTheSame, assert_resumes_exactly
from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.adapters.compat import WEIGHT_AVERAGING
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun
from tests.data_sets import NoisyDataset
from tests.kills import StopAtTheStart, StopInValidation
from tests.processes import run
from tests.runs import Net, make_trainer

# Advice of Lightning's: validation that shuffles must continue, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection"),
]


class Judged(Net):
    """Draws in validation; keeps its results in a list, in a metric, and in logged values of steps and epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.outputs: list[float] = []
        self.calls: list[str] = []

    def on_validation_start(self) -> None:
        self.calls.append("start")

    def on_validation_epoch_start(self) -> None:
        self.calls.append("epoch start")

    def on_validation_model_zero_grad(self) -> None:
        self.calls.append("zero grad")
        super().on_validation_model_zero_grad()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = self.layers(batch).square().mean() + torch.rand(())
        self.outputs.append(value.item())
        self.metric.update(value)
        self.log("val_loss", value, on_step=True, on_epoch=True)
        self.log("metric", self.metric)
        progress = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress
        self.log("is_last", float(progress.is_last_batch), on_step=True, on_epoch=False)
        self.log("done", float(progress.total.completed), on_step=True, on_epoch=False)

    def on_validation_epoch_end(self) -> None:
        self.log("listed", sum(self.outputs) / len(self.outputs))
        for name in ("start", "epoch start", "zero grad"):
            self.log(f"num {name}", float(self.calls.count(name)))
        self.outputs.clear()


def loader(num_workers: int = 0, *, size: int = 20, **arguments: Any) -> DataLoader:
    """Return a loader of 5 noisy batches."""
    return DataLoader(NoisyDataset(size), batch_size=4, num_workers=num_workers, **arguments)


def fit_judged(callbacks: list[Callback], directory: Path) -> Trainer:
    """Fit for 2 epochs, each with a validation run of 5 batches."""
    trainer = make_trainer(callbacks, directory)
    trainer.fit(Judged(), loader(shuffle=True), loader())
    return trainer


def assert_continues(
    batch: int,
    *,
    validation: Callable[[], Any] = loader,
    module: Callable[[], LightningModule] = Judged,
    users: Callable[[], list[Callback]] = list,
    logger: bool = False,
    signum: int = signal.SIGTERM,
    **arguments: Any,
) -> Interruption:
    """Check the law for a fit that is stopped in this validation batch."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        own: dict[str, Any] = {"logger": CSVLogger(directory)} if logger else {}
        trainer = make_trainer([*users(), *callbacks], directory, **own, **arguments)
        trainer.fit(module(), loader(shuffle=True), validation())
        return trainer

    options = {"every_n_train_steps": 1, "stop_signals": ("SIGTERM", "SIGINT", "SIGUSR1")}
    [cost] = assert_resumes_exactly(fit, [StopInValidation(batch, signum)], options=options)
    assert cost.num_batches_twice == 0
    return cost


def two_loaders(num_workers: int = 0) -> list[DataLoader]:
    """Return a loader of 5 batches and one of 3."""
    return [loader(num_workers), loader(num_workers, size=12, shuffle=True)]


@pytest.mark.parametrize("batch", [0, 3, 7])
def test_stopped(batch: int) -> None:
    """Logged values, metrics, lists, and the draws of the run are those of the uninterrupted one."""
    cost = assert_continues(batch)
    assert (cost.exit_code, cost.num_validation_batches_twice) == (128 + signal.SIGTERM, 0)


def test_stopped_before_the_first_batch() -> None:
    """Hooks at the start of the run are not called again."""
    [cost] = assert_resumes_exactly(fit_judged, [StopAtTheStart()], options={"every_n_train_steps": 1})
    assert (cost.num_batches_twice, cost.num_validation_batches_twice) == (0, 0)


def test_stopped_in_the_last_batch() -> None:
    """The run ends before the fit stops: there is no boundary after its last batch."""
    assert assert_continues(4).num_validation_batches_twice == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals(signum: int) -> None:
    """Each signal that stops a fit stops it inside a validation run."""
    assert assert_continues(1, signum=signum).num_validation_batches_twice == 0


@pytest.mark.parametrize("batch", [1, 4, 5, 6, 7, 12])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_two_loaders(batch: int, num_workers: int) -> None:
    """Cut in each loader, and between them: each loader's values are stored once."""
    cost = assert_continues(batch, validation=lambda: two_loaders(num_workers))
    assert cost.num_validation_batches_twice == 0


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
def test_workers(batch: int, persistent: bool) -> None:
    """Workers and their random states continue, also those that live from one run to the next."""
    cost = assert_continues(batch, validation=lambda: loader(2, persistent_workers=persistent, shuffle=True))
    assert cost.num_validation_batches_twice == 0


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_limited(batch: int) -> None:
    """Runs of 2 of 5 batches; two of them in an epoch, one inside an accumulation window."""
    arguments = {"limit_val_batches": 2, "val_check_interval": 2, "accumulate_grad_batches": 3}
    assert assert_continues(batch, **arguments).num_validation_batches_twice == 0


def test_callbacks_and_a_logger(tmp_path: Path) -> None:
    """ModelCheckpoint and EarlyStopping receive the values of the whole run."""

    def users() -> list[Callback]:
        best = ModelCheckpoint(monitor="listed", save_top_k=2, filename="{epoch}-{listed:.3f}")
        return [best, EarlyStopping("listed", patience=2)]

    cost = assert_continues(7, users=users, logger=True, enable_checkpointing=True, max_epochs=3)
    assert cost.num_validation_batches_twice == 0


@pytest.mark.parametrize("rich", [False, True])
def test_bars(rich: bool) -> None:
    """The bar of the run is made again, without its hook at the start of the run."""
    users = (lambda: [RichProgressBar()]) if rich else list
    cost = assert_continues(2, users=users, enable_progress_bar=True)
    assert cost.num_validation_batches_twice == 0


def test_killed_after_an_autosave() -> None:
    """Autosaves by time come inside a run, too: a kill repeats only the batches since the last one."""
    options = {"train_time_interval": timedelta(microseconds=1)}
    [cost] = assert_resumes_exactly(fit_judged, [StopInValidation(8, signal.SIGKILL)], options=options)
    assert (cost.exit_code, cost.num_batches_twice, cost.num_validation_batches_twice) == (-signal.SIGKILL, 0, 1)


class Fails(Callback):
    """Raises in a validation batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.seen = -1

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen += not trainer.sanity_checking
        if self.seen == self.batch and not trainer.sanity_checking:
            raise ZeroDivisionError


@pytest.mark.parametrize("batch", [0, 3, 9])
def test_exception(batch: int) -> None:
    """A fit that fails continues before the batch that it failed in."""
    options = {"train_time_interval": timedelta(hours=1), "overhead_budget": 1.0}
    [cost] = assert_resumes_exactly(fit_judged, [Fails(batch)], options=options)
    assert (cost.exit_code, cost.num_batches_twice, cost.num_validation_batches_twice) == (1, 0, 1)


class Unsized(IterableDataset):
    """Has no length, so Lightning fetches a batch ahead. Draws for each row, as validation does for each batch."""

    def __init__(self, num_rows: int = 20) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Tensor]:
        for row in range(self.num_rows):
            yield torch.full((4,), row / self.num_rows) + 0.1 * torch.randn(4)


@pytest.mark.parametrize("kind", ["stop", "kill"])
@pytest.mark.parametrize("batch", [0, 1, 3, 7])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_length(num_workers: int, batch: int, kind: str) -> None:
    """The batch that was fetched ahead is fetched again, under the same random states as before."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory)
        trainer.fit(Judged(), loader(shuffle=True), DataLoader(Unsized(), batch_size=4, num_workers=num_workers))
        return trainer

    signum = signal.SIGTERM if kind == "stop" else signal.SIGKILL
    options = {"train_time_interval": timedelta(microseconds=1)}
    [cost] = assert_resumes_exactly(fit, [StopInValidation(batch, signum)], options=options)
    assert (cost.num_batches_twice, cost.num_validation_batches_twice) == (0, int(kind == "kill"))


def test_repeated_with_another_loader_without_a_length() -> None:
    """Among several loaders, the batch that was fetched ahead may be of the next one: the run is repeated."""
    cost = assert_continues(3, validation=lambda: [loader(), DataLoader(Unsized(), batch_size=4)])
    assert cost.num_validation_batches_twice == 4


class JudgedTogether(Judged):
    """Gets a batch of each loader."""

    def validation_step(self, batch: list[Tensor | None], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(torch.cat([part for part in batch if part is not None]), batch_idx)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loaders_together(mode: str, num_workers: int) -> None:
    """Loaders of 5 and 3 batches: the shorter one is done, or in its second pass."""

    def validation() -> CombinedLoader:
        return CombinedLoader(two_loaders(num_workers), mode)  # type: ignore[arg-type]

    for batch in (1,) if mode == "min_size" else (1, 3):
        cost = assert_continues(batch, validation=validation, module=JudgedTogether)
        assert cost.num_validation_batches_twice == 0


@pytest.mark.skipif(not WEIGHT_AVERAGING, reason="this Lightning has none")
@pytest.mark.parametrize("batch", [1, 7])
def test_averaged_weights(batch: int) -> None:
    """The run judges the averages, before the stop and after it; training continues with its own weights."""

    def users() -> list[Callback]:
        from lightning.pytorch.callbacks import EMAWeightAveraging  # not in the oldest Lightning

        return [EMAWeightAveraging(decay=0.5, update_every_n_steps=1)]

    assert assert_continues(batch, users=users).num_validation_batches_twice == 0


@pytest.mark.parametrize("kind", ["stop", "kill", "exception"])
@pytest.mark.parametrize("second", [0, 1])
def test_ended_again_in_the_same_run(kind: str, second: int) -> None:
    """A run that continues passes boundaries like any other: it stops, saves, and captures."""
    every: dict[str, Any] = {"train_time_interval": timedelta(microseconds=1)}
    rarely: dict[str, Any] = {"train_time_interval": timedelta(hours=1), "overhead_budget": 1.0}
    kinds: dict[str, Any] = {
        "stop": (StopInValidation, {"every_n_train_steps": 1}),
        "kill": (lambda batch: StopInValidation(batch, signal.SIGKILL), every),
        "exception": (Fails, rarely),
    }
    fault, options = kinds[kind]
    costs = assert_resumes_exactly(fit_judged, [fault(1), fault(second)], options=options)
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 5), (0, 5)]
    assert [cost.num_validation_batches_twice for cost in costs] == [int(kind != "stop")] * 2


class Hooked(Judged):
    """Registers a hook for the length of a validation run."""

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.handle = self.layers[0].register_forward_hook(lambda *_: self.calls.append("hook"))

    def on_validation_end(self) -> None:
        self.handle.remove()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("num hook", float(self.calls.count("hook")))


class Switched(Judged):
    """Sets a switch of the process for the length of a validation run."""

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        torch.set_default_dtype(torch.float64)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("dtype", torch.rand(()))
        torch.set_default_dtype(torch.float32)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("draw", torch.rand(()).float())


class Opens(Judged):
    """Opens a file in the first batch of a validation run."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 0:
            self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until the end of the run
        self.file.write(f"{batch_idx}\n")
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.file.seek(0)
        self.log("lines", float(len(self.file.read().split())))
        self.file.close()


@pytest.mark.parametrize("module", [Hooked, Switched, Opens])
def test_what_a_new_process_would_lack_is_done_again(module: type[Judged]) -> None:
    """Where a run has left more than state, it is repeated from its start."""
    assert assert_continues(2, module=module).num_validation_batches_twice == 3


class Salient(Judged):
    """Adds gradients over a validation run."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.enable_grad():
            self.layers(batch).square().mean().backward()
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("norm", sum(each.grad.norm() for each in self.parameters() if each.grad is not None))
        self.zero_grad()


def test_gradients_of_validation_steps() -> None:
    """Gradients that steps of the run have added up continue."""
    cost = assert_continues(2, module=Salient, inference_mode=False)
    assert cost.num_validation_batches_twice == 0


# What a resume would have without a part of the state, and a batch after which that shows.
WITHOUT = {
    "loader": (0, 6),
    "index": (0, 1),
    "fetched": (0, 1),
    "logged": ([], 6),
    "logged_by": (None, 4),
    "training": ({}, 1),
    "first_loop_iter": (None, 1),
    "progress": (_BatchProgress().state_dict(), 1),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: without a part of the state, the run differs."""
    value, batch = WITHOUT[name]
    state_dict = ValidationRun.state_dict
    monkeypatch.setattr(ValidationRun, "state_dict", lambda self: {**state_dict(self), name: value})
    with pytest.raises(NotTheSame):
        assert_continues(batch, validation=two_loaders, val_check_interval=2)


def unsized() -> DataLoader:
    """Return a loader whose batches are fetched ahead."""
    return DataLoader(Unsized(), batch_size=4)


def test_without_the_state_of_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: the batch that was fetched ahead must be fetched under the random states of then."""
    state_dict = ValidationRun.state_dict
    monkeypatch.setattr(ValidationRun, "state_dict", lambda self: {**state_dict(self), "ahead": None})
    with pytest.raises(NotTheSame):
        assert_continues(3, validation=unsized)


def stopped_with_one_rank(directory: Path, **options: Any) -> tuple[int, str]:
    """Stop a fit with one rank in its first validation run, continue it with two, and return what that gave."""

    def main(num_ranks: int, *users: Callback) -> None:
        ranks: dict[str, Any] = {"devices": num_ranks, "strategy": "ddp"} if num_ranks > 1 else {}
        ours = FaultTolerance(directory / "run", run_id="run", **options)
        make_trainer([ours, *users], directory, **ranks).fit(Judged(), loader(), loader())

    stopped = run(lambda: main(1, StopInValidation(2)))
    assert stopped.exit_code == 128 + signal.SIGTERM, stopped.output
    outputs = [directory / f"rank-{rank}.txt" for rank in range(2)]
    code = run_ranks(lambda rank: main(2), outputs=outputs, seed=1, timeout_seconds=60)
    return code, outputs[0].read_text()


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """The position is that of the ranks that saved: the error says what to do."""
    code, told = stopped_with_one_rank(tmp_path)
    assert code == 1
    assert "was saved before batch 3 of the validation run after batch 5 of epoch 0." in told, told
    assert "Start with as many ranks as before" in told


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
@pytest.mark.parametrize("options", [{"elastic": True}, {"worker_rng": "per_sample"}], ids=str)
def test_another_number_of_ranks_repeats_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    """If a different number of ranks may continue the fit, the start of the run is saved, and they repeat it."""
    code, told = stopped_with_one_rank(tmp_path, **options)
    assert code == 0, told
    assert "at the validation run after batch 3 of epoch 0" in told, told  # of the 3 of each rank

"""A ledger changes nothing in a run; the joined ledgers of an interrupted run equal the uninterrupted one's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, path_of_rank
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset, Unsized
from tests.ledgers import compared, joined, read_ledger, writing
from tests.rank_runs import SECONDS, for_ranks, rank_fit
from tests.runs import Cut, Fetches, Net, TwoLoaders, each_cut, each_num_workers, eight_batches, fit_net
from tests.sharded import ShardedNet, fsdp2


def assert_same_ledgers(path: Path) -> list[dict[str, Any]]:
    """Compare the ledger of the uninterrupted run with the joined ones of the others in one file; return it."""
    whole, *interrupted = read_ledger(path).fits
    assert len(interrupted) > 1
    assert all(fit.resumed is not None for fit in interrupted[1:])
    assert compared(whole.events) == joined(interrupted)
    return compared(whole.events)


def assert_joins(
    path: Path,
    *faults: Any,
    train: Callable[[], Any] | None = None,
    module: Callable[[], LightningModule] = Net,
    after: Callable[[], list[Callback]] = list,
    every: int = 1,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Check that a run with a ledger obeys the law, and its joined ledgers equal the uninterrupted one's; return that.

    The law's uninterrupted run has no callback, and equals one with it; so the ledger changes nothing.
    """

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        own = {name: value() if callable(value) else value for name, value in arguments.items()}
        return fit_net([*callbacks, *after()], directory, train=train and train(), module=module(), **own)

    with writing(path):
        assert_resumes_exactly(fit, faults, options={"every_n_train_steps": every})
    return assert_same_ledgers(path)


@each_num_workers
@each_cut
def test_joined_ledgers_are_the_uninterrupted_one(cut: Cut, num_workers: int, tmp_path: Path) -> None:
    """After a kill in any epoch, each batch, each logged value, and the end equal those of the uninterrupted run."""
    lines = assert_joins(
        tmp_path / "ledger.jsonl",
        KillAt(cut.kill),
        train=lambda: DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers),
        every=cut.every,
    )
    batches = [line for line in lines if line["event"] == "batch"]
    assert [(line["epoch"], line["batch"]) for line in batches] == [(e, b) for e in range(2) for b in range(8)]
    for name in ("order", "content", "rng", "loss"):
        assert len({line[name] for line in batches}) == 16, name
    assert [line["event"] for line in lines].count("validated") == 2
    assert lines[-1]["event"] == "end"


FLAVOURS: dict[str, dict[str, Any]] = {
    "fetched-ahead": {"train": lambda: Unsized(NoisyDataset(), batch_size=4, shuffle=True, num_workers=2)},
    "two-loaders": {
        "module": TwoLoaders,
        "train": lambda: {
            "long": DataLoader(NoisyDataset(), batch_size=4, shuffle=True),
            "short": DataLoader(NoisyDataset(12), batch_size=4, shuffle=True),
        },
    },
    "step-fetches": {
        "module": lambda: Fetches(2),
        "train": lambda: DataLoader(NoisyDataset(64), batch_size=4, shuffle=True),
    },
    "accumulated": {"train": eight_batches, "accumulate_grad_batches": 3, "val_check_interval": 4},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_joined_ledgers_of_each_flavour(flavour: str, tmp_path: Path) -> None:
    """The same holds for other kinds of loaders, and for accumulated gradients."""
    lines = assert_joins(tmp_path / "ledger.jsonl", KillAt(3), KillAt(4), **FLAVOURS[flavour])
    assert all(line["order"] for line in lines if line["event"] == "batch")


class LogsAtTheStart(Callback):
    """Logs values directly to a logger at each start of a fit and of an epoch."""

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.loggers[0].log_metrics({"fit": 1.0}, step=0)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.on_fit_start(trainer)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.loggers[0].log_metrics({"epoch": 1.0}, step=trainer.current_epoch)


def test_stopped_in_a_validation_run(tmp_path: Path) -> None:
    """A validation run that is repeated is in the ledger once, and so are a callback's direct log values."""
    lines = assert_joins(
        tmp_path / "ledger.jsonl",
        KillAt(3, signum=signal.SIGTERM, hook="validation"),
        KillAt(7, hook="end"),
        train=eight_batches,
        after=lambda: [LearningRateMonitor("step"), LogsAtTheStart()],
        logger=lambda: CSVLogger(tmp_path / "logs"),
        val_check_interval=4,
    )
    assert [line["event"] for line in lines].count("validated") == 4
    own = [line for line in lines if line.get("logger") == "CSVLogger"]
    assert [line["step"] for line in own if "lr-Adam" in line["metrics"]] == list(range(16))
    assert [line["step"] for line in own if "epoch" in line["metrics"]] == [0, 1]
    assert len(own) == 16 + 2
    assert len([line for line in lines if line["event"] == "log" and not line["logger"]]) == 16 + 4 + 2


class Manual(Net):
    """Steps manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Ask(Callback):
    """Requests a fault in a run, as a drill does."""

    def __init__(self, place: str) -> None:
        self.place = place


@pytest.mark.parametrize(
    ("hook", "module"),
    [
        ("step", Net),
        pytest.param("start", Net, marks=pytest.mark.slow),
        pytest.param("end", Net, marks=pytest.mark.slow),
        pytest.param("step", Manual, marks=pytest.mark.slow),
    ],
)
def test_continues_after_a_fault_of_a_drill(hook: str, module: type[Net], tmp_path: Path) -> None:
    """A run that raises the exception, and is run again without it, equals the uninterrupted one."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        for place in [callback.place for callback in callbacks if isinstance(callback, Ask)]:
            os.environ[FAULT_VARIABLE] = place
        return fit_net(callbacks, directory, module=module())

    path = tmp_path / "ledger.jsonl"
    faults = [Ask(f"1:0:3:{hook}"), Ask(f"1:1:3:{hook}")]
    with writing(path):
        costs = assert_resumes_exactly(fit, faults, options={"every_n_train_steps": 1})
    assert [(cost.exit_code, cost.epoch, cost.batch) for cost in costs] == [(1, 0, 3), (1, 1, 3)]
    assert_same_ledgers(path)


@pytest.mark.slow
@for_ranks[0]
@for_ranks[1]
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_each_rank_has_its_own(is_sharded: bool, tmp_path: Path) -> None:
    """On each rank the joined ledgers equal the uninterrupted one's, and no two ranks train the same samples."""
    path = tmp_path / "ledger.jsonl"
    with writing(path):
        assert_resumes_exactly(
            rank_fit(2, limit_train_batches=4, **{"module": ShardedNet, "strategy": fsdp2()} if is_sharded else {}),
            [KillAt(5, rank=1)],
            options={"every_n_train_steps": 1},
            num_ranks=2,
            timeout_seconds=SECONDS,
        )
    paths = [Path(path_of_rank(str(path), rank)) for rank in range(2)]
    batches = [[line for line in assert_same_ledgers(path) if line["event"] == "batch"] for path in paths]
    for name in ("order", "content", "rng"):
        one, other = ({line[name] for line in lines} for lines in batches)
        assert len(one) == len(other) == 8, name
        assert not one & other, name
    assert [read_ledger(path).fits[0].begun["rank"] for path in paths] == [0, 1]

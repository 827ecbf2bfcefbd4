"""Which samples an epoch had, from the lines of a history and from autosaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli.batch import KnownOrders, in_autosaves, orders_of, places_of, samples_of
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare, RemainingBatches, deal_as_json
from lightning_faulttolerant.records.history import FILE_NAME
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.processes import run
from tests.runs import fit_net

DEAL = RemainingBatches(
    order=GlobalOrder(length=20, shuffles=False), begin=0, end=20, share=RankShare(rank=0, num_ranks=1, batch_size=2)
)
TRAIN = "train/0"


def start(epoch: int = 0, batch: int = 0, *, continues: bool = False) -> dict[str, Any]:
    """Return the line of a start."""
    return {"event": "start", "epoch": epoch, "batch": batch, "continues": continues}


def order(epoch: int, num_batches: int | None = 10) -> dict[str, Any]:
    """Return the line of an epoch's order."""
    return {"event": "order", "epoch": epoch, "loaders": {TRAIN: deal_as_json(DEAL)}, "num_batches": num_batches}


def skipped(epoch: int, batch: int) -> dict[str, Any]:
    """Return the line of a batch that is left out."""
    return {"event": "skipped", "epoch": epoch, "batch": batch}


def known(directory: Path, *lines: dict[str, Any]) -> KnownOrders:
    """Return what a history of these lines tells."""
    (directory / FILE_NAME).write_text("".join(json.dumps({"fit": 1, "time": 1.0, **line}) + "\n" for line in lines))
    return orders_of(str(directory), 1)


def test_a_new_run_of_the_command_forgets_the_earlier_one(tmp_path: Path) -> None:
    """Neither its epochs nor the batches that it has left out are those of the new run."""
    earlier = [start(), order(0), skipped(1, 1), order(1), order(2)]
    found = known(tmp_path, *earlier, start())
    assert (set(found.epochs), found.skipped, found.num_batches) == (set(), set(), {})
    found = known(tmp_path, *earlier, start(), order(0, 7))
    assert (set(found.epochs), found.skipped, found.num_batches) == ({0}, set(), {0: 7})


def test_a_resume_forgets_what_comes_after_its_place(tmp_path: Path) -> None:
    """A process that goes back runs those batches again, and may train those that were left out."""
    skips = [skipped(0, 4), skipped(1, 1), skipped(1, 2), skipped(2, 0)]
    found = known(tmp_path, start(), order(0), order(1), *skips, order(2), start(1, 2, continues=True))
    assert (set(found.epochs), found.skipped, found.num_batches) == ({0, 1}, {(0, 4), (1, 1)}, {0: 10, 1: 10})


@pytest.mark.parametrize("num_batches", [3, None])
def test_an_epoch_ends_before_its_order(num_batches: int | None) -> None:
    """No batch is listed that the epoch does not have; without the number, as in an older history, all are."""
    assert samples_of(DEAL, 2, num_batches) == [[4, 5]]
    assert samples_of(DEAL, 3, num_batches) == (None if num_batches else [[6, 7]])
    assert list(places_of(DEAL, 5, num_batches)) == [(0, 2, 1)]
    assert list(places_of(DEAL, 6, num_batches)) == ([] if num_batches else [(0, 3, 0)])


def test_the_rest_of_an_epoch_with_a_limit_is_kept() -> None:
    """Its batches are limited already, and have later numbers."""
    rest = RemainingBatches(order=DEAL.order, begin=4, end=10, share=DEAL.share)
    assert samples_of(rest, rest.first_batch, 5) == [[4, 5]]


def fit_limited(directory: Path, *faults: Callback, **limits: Any) -> None:
    """Fit epochs of 10 batches, of which the limits allow fewer."""
    own = FaultTolerance(every_n_train_steps=1)
    fit_net([own, *faults], directory, train=DataLoader(NoisyDataset(20), batch_size=2, shuffle=True), **limits)


def directory_of(where: Path) -> str:
    """Return the directory of the only run."""
    [directory] = (where / "fault_tolerance").iterdir()
    return str(directory)


def test_the_history_knows_where_an_epoch_ended(tmp_path: Path) -> None:
    """A limit of batches, and one of steps, end it before its order."""
    ended = run(lambda: fit_limited(tmp_path, limit_train_batches=3, max_epochs=-1, max_steps=5))
    assert ended.exit_code == 0, ended.output
    assert orders_of(directory_of(tmp_path), 1).num_batches == {0: 3, 1: 2}


class Raises(Callback):
    """Ends the fit within its first epoch."""

    def on_train_batch_start(self, trainer: object, pl_module: object, batch: object, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ValueError("planted")


def test_an_epoch_that_an_exception_has_ended_has_its_limit(tmp_path: Path) -> None:
    """It may still continue, up to the limit."""
    ended = run(lambda: fit_limited(tmp_path, Raises(), limit_train_batches=3))
    assert ended.exit_code == 1, ended.output
    assert orders_of(directory_of(tmp_path), 1).num_batches == {0: 3}


def test_an_autosave_knows_the_limit(tmp_path: Path) -> None:
    """The epoch of a run that was killed has no more batches than the limit allows."""
    ended = run(lambda: fit_limited(tmp_path, KillAt(2), limit_train_batches=3))
    assert ended.exit_code < 0, ended.output
    found = in_autosaves(directory_of(tmp_path), 1, 0)
    assert found is not None
    deals, limit = found
    assert (set(deals), limit) == ({TRAIN}, 3)

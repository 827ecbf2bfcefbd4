"""What can't be exact is refused with its reason; with ``strict=False`` it has the right steps, and is reported."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_faulttolerant import FaultTolerance
from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset, Unsized, batch_of
from tests.laws.features.data_libraries import stacked, table
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Start, Training, assert_same, whole_run


class FromTheSystem(Sampler[int]):
    """Shuffles by numbers from the operating system, which can't be restored."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(32), key=lambda _: os.urandom(8)))


class Hidden:
    """Continues a stream whose position is in a C variable."""

    def __init__(self) -> None:
        self.position = zlib.compressobj(level=0)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            self.position.compress(b".")
            yield batch_of(len(self.position.copy().flush()))


def drawn() -> np.random.Generator:
    """Return a generator that is seeded otherwise in each process."""
    return np.random.default_rng(int(torch.randint(1000, ())))


EARLY, LATE = Cut(at=(0, 3)), Cut(at=(1, 5))
out_of_order = rows_of(32, shuffle=False, num_workers=2, in_order=False)
unsized = lambda: Unsized(NoisyDataset(), batch_size=4, in_order=False)  # noqa: E731
from_the_system = lambda: DataLoader(NoisyDataset(), 4, sampler=FromTheSystem(), num_workers=2)  # noqa: E731
unseeded = lambda: DataLoader(table().shuffle(generator=drawn()), 4, collate_fn=stacked)  # noqa: E731
two, three = (rows_of(32, num_workers=number) for number in (2, 3))
slow = pytest.mark.slow
# The loaders of the two starts, and where the first one ends.
LOADERS = [
    pytest.param(Hidden, Hidden, LATE, id="position in C"),
    pytest.param(out_of_order, out_of_order, LATE, id="out of order"),
    pytest.param(unsized, unsized, LATE, id="out of order, without a length", marks=slow),
    pytest.param(unseeded, unseeded, LATE, id="table shuffled without a seed"),
    pytest.param(from_the_system, from_the_system, EARLY, id="from the system, early"),
    pytest.param(two, three, EARLY, id="more workers"),
]


def reports(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Fit, and print the report of the resume."""
    trainer.fit(module, **group.data())
    [ours] = [callback for callback in trainer.callbacks if isinstance(callback, FaultTolerance)]
    print("REPORT", ours.resume_report)


def steps(*starts: Start) -> list[tuple[str, int, int | None]]:
    """Return the trained batches and the validation runs of some starts, in order."""
    kinds = ("trained", "evaluation end")
    events = [event for start in starts for event in start.events[0] if event["kind"] in kinds]
    return [(each["kind"], each["epoch"], each.get("batch")) for each in events]


@pytest.mark.parametrize(("first", "then", "cut"), LOADERS)
def test_loader_that_cannot_be_followed(
    first: Callable[[], Any], then: Callable[[], Any], cut: Cut, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """It is refused; if not strict, consumed batches are skipped, and the report names what is not exact once."""
    limits = Row(
        name="limits", trainer={"val_check_interval": 3, "check_val_every_n_epoch": None},
        warns=(".*number of training batches", "Your `val_dataloader`"),
    )  # fmt: skip
    group, later = (
        Group(rows=(Row(name="loader", train=train, imports=("datasets",)), limits)) for train in (first, then)
    )
    strict = Training(group=group, root=tmp_path / "strict")
    if strict.start(cut).codes == [cut.exit_code]:
        strict.group = later
        strict.start(cut)
    assert strict.starts[-1].codes == [1], strict.starts[-1].output
    assert steps(strict.starts[-1]) == []
    error = re.split(r"\w+Error: ", strict.starts[-1].output)[-1]

    whole = Training(group=group, root=tmp_path / "whole")
    whole.ended(strict=False)
    training = Training(group=group, root=tmp_path / "cut", stage=reports)
    training.ended(cut, strict=False)
    training.group = later
    last = training.ended(strict=False)
    assert steps(*training.starts) == steps(*whole.starts)
    report = last.output.rpartition("REPORT ")[2]
    [reason] = [line for line in report.splitlines() if "NOT EXACT " in line]
    assert "\n".join([strict.told(error), training.told(report.splitlines()[0]), training.told(reason)]) == snapshot


def is_there() -> bool:
    """Return whether the list of this process exists; rank 1 alone loses it, if there are several."""
    return not Path("lost").exists() or os.environ.get("RANK", "1") == "0"


class Counts(Net):
    """Counts its batches in a list, if it has one."""

    def __init__(self) -> None:
        super().__init__()
        if is_there():
            self.counts = [0]

    def loss(self, batch: Tensor) -> Tensor:
        if hasattr(self, "counts"):
            self.counts[0] += 1
        return super().loss(batch)


IN_FIT = [Cut(at=(0, 3)), Cut(at=(0, 5)), Cut(at=(1, 2))]
LONG = Row(name="long", train=rows_of(48))
COUNTS = Row(
    name="counts", module=Counts, warns=("Using `DistributedSampler` with", "It is recommended to use `self.log")
)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=slow)])
def test_what_was_lost_is_told_by_each_later_start(num_ranks: int, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each says since when the run is not exact, once, also if only another rank has lost something."""
    training = Training(group=Group(rows=(COUNTS, LONG)), root=tmp_path, num_ranks=num_ranks)
    training.start(IN_FIT[0])
    (tmp_path / "lost").touch()
    training.start(IN_FIT[1], strict=False)
    training.start(IN_FIT[2])
    training.finished()
    assert training.said("Resumed", "EXACT") == snapshot


class TakesWorkers(Callback):
    """Begins to iterate over the loader of the training in the middle of the first epoch."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            next(iter(trainer.train_dataloader))


@pytest.mark.parametrize("cut", [Cut(at=(0, 4)), Cut(at=(1, 2))], ids=["this epoch", "a later one"])
def test_place_that_is_lost_later_is_no_error(cut: Cut, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A start that has trained continues; only what was saved without the place is refused."""
    persistent = rows_of(24, num_workers=2, persistent_workers=True)
    group = Group(rows=(Row(name="takes workers", train=persistent, callbacks=TakesWorkers),))
    whole, training = whole_run(group, tmp_path / "whole"), Training(group=group, root=tmp_path / "cut")
    training.ended(cut)
    if training.start().codes == [0]:
        assert_same(whole, training.starts[-1], name="the second start")
    assert training.said("Error:", "no position", "Resumed") == snapshot

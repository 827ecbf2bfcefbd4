"""The law for rows that no other row can join, and how many batches some ends repeat."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.foreign import mosaic
from tests.laws.cuts import Cut
from tests.laws.features.any_iterables import ReadsAhead
from tests.laws.features.data_modules import Counts
from tests.laws.features.streams import shards
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Training, assert_continues, whole_run


class Fetches(Net):
    """Takes two batches a step from the iterator itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        fetched = [next(dataloader_iter) for _ in range(2)]
        loss = torch.stack([self.loss(batch) for batch, _, _ in fetched]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss


def test_steps_that_fetch(tmp_path: Path) -> None:
    """The steps of a module that fetches its batches continue."""
    group = Group(rows=(Row(name="fetches", module=Fetches, train=rows_of(48), warns=(".*dataloader_iter",)),))
    [whole] = whole_run(group, tmp_path)
    training = Training(group=group, root=tmp_path / "cut")
    assert training.start(Cut(at=(1, 3))).codes == [-signal.SIGKILL]
    [events] = training.finished().events
    steps, rest = ([event for event in each if event["kind"] == "trained"] for each in (whole, events))
    assert rest == steps[-len(rest) :]  # the other events show the batch before
    assert 0 < len(rest) < 6


def mosaic_stream() -> DataLoader[Any]:
    """Return the original library's loader over a shuffled data set that draws."""
    streaming = mosaic()

    class Rows(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Tensor:
            return torch.full((4,), super().__getitem__(at)["n"] / 16) + torch.randn(4)

    data = shards()
    for file in Path("/dev/shm").glob("*_locals"):  # what a killed start has left in shared memory
        with contextlib.suppress(OSError):
            if data.encode() in file.read_bytes():
                for left in Path("/dev/shm").glob(f"{file.name.removesuffix('locals')}*"):
                    left.unlink(missing_ok=True)
    tempfile.tempdir = tempfile.mkdtemp(dir=os.getcwd())  # the library's lock files are here, for each process
    return streaming.StreamingDataLoader(Rows(local=data, shuffle=True, batch_size=4), batch_size=4)


@pytest.mark.slow
def test_mosaic_stream_continues(tmp_path: Path) -> None:
    """MosaicML Streaming continues."""
    group = Group(rows=(Row(name="mosaic", train=mosaic_stream, warns=(".*",)),))
    whole = whole_run(group, tmp_path)
    assert_continues(whole, Training(group=group, root=tmp_path / "cut"), [Cut(at=(0, 3)), Cut(at=(1, 2))])


ENDS = {
    "stop while a thread reads ahead": (Row(name="ahead", train=ReadsAhead), Cut(at=(1, 2), by=signal.SIGTERM), 0),
    "exception, data module with a state": (
        Row(name="data", data=Counts), Cut(at=(0, 3), hook="backward", by=0, every=2), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_repeats(name: str, tmp_path: Path) -> None:
    """A stop repeats no batch; an exception all since the last autosave, if the data module's state is of now."""
    row, cut, num_batches = ENDS[name]
    group = Group(rows=(row, Row(name="captures", options={"overhead_budget": 1.0})))
    whole = whole_run(group, tmp_path)
    training = Training(group=group, root=tmp_path / "cut")
    assert_continues(whole, training, [cut])
    begun = sum(event["kind"] == "batch" for start in training.starts for event in start.events[0])
    assert begun - sum(event["kind"] == "batch" for event in whole[0]) == num_batches

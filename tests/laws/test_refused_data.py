"""Data that can't be resumed exactly is refused: at the start where it can be seen, else in the start that finds it."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.utils.data import DataLoader

from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset, StatefulStream, Stream, batch_of, secret_count
from tests.laws.features.any_iterables import LooksAtTheData, Queue, ReadsAhead, Wrapper
from tests.laws.features.data_libraries import chunks, stacked, table, tars
from tests.laws.features.data_modules import Counts
from tests.laws.rows import Group, Row
from tests.laws.runs import Training, refusal


def litdata_mixture() -> DataLoader[Any]:
    """A mixture of data sets of LitData."""
    import litdata

    return DataLoader(litdata.CombinedStreamingDataset([litdata.StreamingDataset(chunks()) for _ in range(2)]))


def webdataset(make: Callable[[Any], Any]) -> Callable[[], DataLoader[Any]]:
    """Return what makes a loader of a pipeline."""

    def made() -> DataLoader[Any]:
        import webdataset

        return DataLoader(make(webdataset), batch_size=4)

    return made


class OneStream(LightningDataModule):
    """One stream with a state is in two places, which would both move it."""

    def setup(self, stage: str) -> None:
        self.one = StatefulStream()

    def train_dataloader(self) -> Any:
        return DataLoader(self.one, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.one, batch_size=4)


AT_THE_START: dict[str, dict[str, Any]] = {
    "queue with an iterator": {"train": lambda: DataLoader(Queue(), batch_size=4)},
    "thread that draws": {"train": lambda: ReadsAhead(NoisyDataset(24))},
    "out of order in a wrapper": {"train": lambda: Wrapper(NoisyDataset(24), num_workers=2, in_order=False)},
    "one stream in two places": {"data": OneStream},
    "persistent workers taken": {
        "train": lambda: DataLoader(NoisyDataset(24), 4, num_workers=2, persistent_workers=True),
        "callbacks": LooksAtTheData,
    },
    "litdata mixture": {"train": litdata_mixture},
    "webdataset without a seed": {"train": webdataset(lambda w: w.WebDataset(tars(), shardshuffle=False).shuffle(8))},
    "webdataset resampled": {"train": webdataset(lambda w: w.WebDataset(tars(), resampled=True, shardshuffle=False))},
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_refused_in_the_first_start(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What can be seen in the first start is refused there with what to do; a mended script finds no state of it."""
    start = Training(group=Group(rows=(Row(name=name, **AT_THE_START[name]),)), root=tmp_path).start()
    assert start.codes == [1], start.output
    assert refusal(start.output, tmp_path) == snapshot
    if name != "persistent workers taken":
        assert [path for path in tmp_path.rglob("autosave-*") if "superseded-" not in path.parent.name] == []


class SecretlyCountingStream(Stream):
    """Counts how often it was started, but in no attribute."""

    def __init__(self) -> None:
        super().__init__(24)
        self.count, _ = secret_count()

    def __iter__(self) -> Iterator[Tensor]:
        num_begun = self.count()
        return (torch.full((4,), float(number * num_begun)) for number in self.numbers())


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


class Shifts(Counts):
    """Its first loader depends on its state, which Lightning restores before it requests the loader."""

    def train_dataloader(self) -> Any:
        data = NoisyDataset(24)
        data.rows = data.rows + self.num_used
        return DataLoader(data, batch_size=4, shuffle=True)


LATER: dict[str, dict[str, Any]] = {
    "secret count": {"train": lambda: DataLoader(SecretlyCountingStream(), 4, num_workers=2, persistent_workers=True)},
    "hidden state": {"train": Hidden},
    "table shuffled without a seed": {
        "train": lambda: DataLoader(table().shuffle(generator=drawn()), 4, collate_fn=stacked)
    },
    "shards shuffled without a seed": {
        "train": lambda: DataLoader(
            table().to_iterable_dataset(num_shards=6).shuffle(buffer_size=6, generator=drawn()), 4, collate_fn=stacked
        )
    },
    "loader that depends on a restored state": {"data": Shifts},
}


@pytest.mark.parametrize("name", LATER)
def test_refused_in_the_start_that_finds_it(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A start that would get other batches is refused; if not strict, it continues, and says so."""
    training = Training(group=Group(rows=(Row(name=name, **LATER[name]),)), root=tmp_path)
    assert training.start(Cut(at=(1, 2))).codes == [-signal.SIGKILL]
    start = training.start()
    assert start.codes == [1], start.output
    assert refusal(start.output, tmp_path) == snapshot
    lenient = training.start(strict=False)
    assert lenient.codes == [0], lenient.output
    assert "NOT EXACTLY" in lenient.output

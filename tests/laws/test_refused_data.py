"""Data that can't be resumed exactly is refused: at the start where it can be seen, else in the start that finds it."""

from __future__ import annotations

import itertools
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
from torch.utils.data import DataLoader, IterableDataset

from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset, Quiet, StatefulStream, Stream, batch_of, secret_count
from tests.laws.features.any_iterables import LooksAtTheData, Queue, ReadsAhead, Wrapper
from tests.laws.features.data_libraries import stacked, table, tars
from tests.laws.features.data_modules import Grows
from tests.laws.features.data_with_state import CachesSamples
from tests.laws.features.streams import PassedOn
from tests.laws.rows import Group, Row
from tests.laws.runs import Training
from tests.messages import plain

pytestmark = pytest.mark.filterwarnings("ignore:WebDataset.shardshuffle:UserWarning")


def message(output: str, root: Path) -> str:
    """Return the text of the error that ended a start."""
    return plain(output.rpartition("NotExactError: ")[2], DIR=root)


class Counts(Quiet):
    """Counts what it loads."""

    num_loaded = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_loaded += 1
        return super().__getitem__(index) + self.num_loaded


def litdata_mixture() -> DataLoader[Any]:
    """A mixture of data sets of LitData."""
    import litdata
    from litdata.streaming.cache import Cache

    cache = Cache("chunks", chunk_size=5)
    for n in range(24):
        cache[n] = n
    cache.done(), cache.merge()
    return DataLoader(litdata.CombinedStreamingDataset([litdata.StreamingDataset("chunks") for _ in range(2)]))


def litdata_passed_on() -> DataLoader[Any]:
    """A wrapper of a data set of LitData."""
    litdata_mixture()
    import litdata

    return DataLoader(PassedOn(litdata.StreamingDataset("chunks")))


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
    "thread that counts": {"train": lambda: ReadsAhead(Counts())},
    "thread that draws": {"train": lambda: ReadsAhead(NoisyDataset(24))},
    "out of order in a wrapper": {"train": lambda: Wrapper(NoisyDataset(24), num_workers=2, in_order=False)},
    "one stream in two places": {"data": OneStream},
    "persistent workers taken": {
        "train": lambda: DataLoader(NoisyDataset(24), 4, num_workers=2, persistent_workers=True),
        "callbacks": LooksAtTheData,
    },
    "litdata mixture": {"train": litdata_mixture},
    "litdata passed on": {"train": litdata_passed_on},
    "webdataset without a seed": {"train": webdataset(lambda w: w.WebDataset(tars(), shardshuffle=False).shuffle(8))},
    "webdataset in a pipeline": {
        "train": webdataset(lambda w: w.DataPipeline(w.WebDataset(tars(), shardshuffle=False), w.shuffle(8, initial=2)))
    },
    "webdataset resampled": {"train": webdataset(lambda w: w.WebDataset(tars(), resampled=True))},
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_refused_in_the_first_start(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What can be seen in the first start is refused there, and the message says what to do."""
    start = Training(group=Group(rows=(Row(name=name, **AT_THE_START[name]),)), root=tmp_path).start()
    assert start.codes == [1], start.output
    assert message(start.output, tmp_path) == snapshot


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


class CachesNoise(CachesSamples):
    """Caches samples with their noise, in more bytes than a worker's state may carry."""

    def __getitem__(self, index: int) -> Tensor:
        self.cache = self.cache or [None] * len(self)
        if self.cache[index] is None:
            self.cache[index] = self.rows[index].repeat(1_000) + torch.rand(())
        return self.cache[index][:4]


def drawn() -> np.random.Generator:
    """Return a generator that is seeded otherwise in each process."""
    return np.random.default_rng(int(torch.randint(1000, ())))


class OtherRows(IterableDataset[Tensor]):
    """Yields other rows in each process."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), number) for number in itertools.chain(self.order))

    def __init__(self) -> None:
        self.order = map(float, drawn().permutation(24))


LATER: dict[str, dict[str, Any]] = {
    "secret count": {"train": lambda: DataLoader(SecretlyCountingStream(), batch_size=4)},
    "secret count in workers": {
        "train": lambda: DataLoader(SecretlyCountingStream(), 4, num_workers=2, persistent_workers=True)
    },
    "hidden state": {"train": Hidden},
    "random cache in workers": {
        "train": lambda: DataLoader(CachesNoise(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    },
    "table shuffled without a seed": {
        "train": lambda: DataLoader(table().shuffle(generator=drawn()), 4, collate_fn=stacked)
    },
    "shards shuffled without a seed": {
        "train": lambda: DataLoader(
            table().to_iterable_dataset(num_shards=6).shuffle(buffer_size=6, generator=drawn()), 4, collate_fn=stacked
        )
    },
    "other rows": {"train": lambda: DataLoader(OtherRows(), batch_size=4)},
}


@pytest.mark.parametrize("name", LATER)
def test_refused_in_the_start_that_finds_it(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A start that would get other batches is refused; if not strict, it continues, and the report says so once."""
    training = Training(group=Group(rows=(Row(name=name, **LATER[name]),)), root=tmp_path)
    assert training.start(Cut(at=(1, 2))).codes == [-signal.SIGKILL]
    start = training.start()
    assert start.codes == [1], start.output
    assert message(start.output, tmp_path) == snapshot
    lenient = training.start(strict=False)
    assert lenient.codes == [0], lenient.output
    assert "NOT EXACTLY" in lenient.output


def test_first_loader_that_depends_on_a_restored_state_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Lightning restores the state of a data module before it requests the first loader."""

    class Shifts(Grows):
        def state_dict(self) -> dict[str, Any]:
            return {"num_used": self.num_used}

    training = Training(group=Group(rows=(Row(name="grows", data=Shifts),)), root=tmp_path)
    assert training.start(Cut(at=(0, 3))).codes == [-signal.SIGKILL]
    start = training.start()
    assert start.codes == [1], start.output
    assert message(start.output, tmp_path) == snapshot

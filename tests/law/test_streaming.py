"""The law for this package's streaming data sets: order and augmentations go on, and no sample is read again."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming.format.mds_writer import MDSWriter
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.rank_runs import for_ranks
from tests.runs import LATER_EPOCH, Cut, Net, assert_goes_on, each_cut, each_num_workers, fit_net

pytestmark = [
    *for_ranks,
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
]


@pytest.fixture(scope="module")
def data() -> Iterator[str]:
    """A data set of 32 samples in small shards."""
    with tempfile.TemporaryDirectory() as directory:
        with MDSWriter(out=directory, columns={"n": "int"}, size_limit=128) as writer:
            for n in range(32):
                writer.write({"n": n})
        yield directory


class Augmented(StreamingDataset):
    """Makes rows with noise of its samples."""

    def __getitem__(self, at: Any) -> Tensor:
        n = super().__getitem__(at)["n"]
        return torch.linspace(-1, 1, 4) * (n / 16 - 1) + 0.1 * (random.gauss(0, 1) + float(torch.randn(())))


class Wrapped(IterableDataset[Tensor]):
    """Passes the samples of a streaming data set on, with noise."""

    def __init__(self, inner: StreamingDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Tensor]:
        for row in self.inner:
            yield row + 0.1 * torch.randn(4)


def loader(data: str, **arguments: Any) -> StreamingDataLoader:
    """Return a shuffled loader of 8 batches."""
    dataset = Augmented(data, shuffle=True, batch_size=4, shuffle_block_size=16)
    return StreamingDataLoader(dataset, batch_size=4, **arguments)


@each_num_workers
@each_cut
def test_a_streaming_loader_goes_on(data: str, cut: Cut, num_workers: int) -> None:
    """In its epoch's order, with the augmentations of its workers; its validation loader is in its own epoch again."""
    assert_goes_on(
        cut,
        train=lambda: loader(data, num_workers=num_workers),
        validation=lambda: loader(data, num_workers=num_workers),
        limit_val_batches=2,
    )

"""Iterable data sets, and this package's samplers and streams."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_faulttolerant import (
    InterruptibleDistributedGroupedBatchSampler,
    InterruptibleDistributedSampler,
    InterruptibleSampler,
    ResumableDataLoader,
    StreamingDataLoader,
    StreamingDataset,
)
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from tests.laws.data_sets import NoisyCollate, NoisyDataset, SizedStream, StatefulStream, Stream, UnevenStream, noise
from tests.laws.rows import add_loader, row


def stream(name: str, make: Callable[[], Any], **arguments: Any) -> None:
    """Add a loader of an iterable data set."""
    values = {key: arguments.pop(key) for key in ("trainer", "apart", "alone") if key in arguments}
    train = lambda: DataLoader(make(), **{"batch_size": 4, **arguments})  # noqa: E731 - a row's function
    add_loader(name, train, **{"apart": "ahead", **values})


class SamplerStream(Stream):
    """Follows the protocol of Lightning 1.9: a sampler and its iterator as attributes, and ``__next__``."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = RandomSampler(range(24))

    def __iter__(self) -> SamplerStream:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> Tensor:
        return self.sample(next(self.sampler_iter))


stream("stream", lambda: Stream(24))
stream("sized stream in workers", lambda: SizedStream(32), num_workers=2, collate_fn=NoisyCollate(), apart="")
stream("stream with a state", StatefulStream, apart="")
stream("stream with a state in workers", StatefulStream, num_workers=2, apart="")
stream("workers that run out one after the other", UnevenStream, num_workers=2, persistent_workers=True, alone=True)
stream("protocol of Lightning 1.9", SamplerStream)
stream("stream without batches", lambda: Stream(8), batch_size=None, collate_fn=lambda row: row + torch.randn(4, 4))


# This package's samplers.

NUM_MANY = 10**10


class Many(Dataset[Tensor]):
    """Has too many samples for a permutation in memory; each draws."""

    def __len__(self) -> int:
        return NUM_MANY

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / NUM_MANY) + 0.1 * torch.randn(4)


add_loader(
    "interruptible",
    lambda: DataLoader(NoisyDataset(24), 4, sampler=InterruptibleSampler(range(24), seed=3)),
    takes="epochs told",
)
add_loader(
    "ten billion samples",
    lambda: DataLoader(Many(), 4, sampler=InterruptibleDistributedSampler(NUM_MANY, order="feistel")),
    trainer={"limit_train_batches": 6},
)


@row("train", part="loaders", shows="content", ranks=False)
def grouped() -> DataLoader[Tensor]:
    """Batches of groups continue without calls of ``advance``."""
    sampler = InterruptibleDistributedGroupedBatchSampler(range(24), [i % 4 for i in range(24)], 4, seed=3)
    return DataLoader(NoisyDataset(24), batch_sampler=sampler)


@row("train", part="loaders", shows="content")
def resumable() -> DataLoader[Tensor]:
    """A ResumableDataLoader is followed as any other."""
    return ResumableDataLoader(NoisyDataset(24), batch_size=4, shuffle=True)


# This package's streaming data sets.


class Augmented(StreamingDataset):
    """Returns a row with noise for each sample."""

    def __getitem__(self, at: Any) -> Tensor:
        return torch.linspace(-1, 1, 4) * (super().__getitem__(at)["n"] / 16 - 1) + 0.1 * noise()


def shards() -> str:
    """Return the directory of small shards, which each start writes where the first one did."""
    directory = Path("shards").absolute()
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=".") as written:
            with MDSWriter(out=f"{written}/data", columns={"n": "int"}, size_limit=128) as writer:
                for n in range(24):
                    writer.write({"n": n})
            with contextlib.suppress(OSError):  # another rank was faster
                Path(f"{written}/data").rename(directory)
    return str(directory)


def augmented() -> Augmented:
    """Return a shuffled streaming data set."""
    return Augmented(shards(), shuffle=True, batch_size=4, shuffle_block_size=16)


@row("train", part="loaders", shows="content", apart="counts")
def streaming() -> DataLoader[Any]:
    """Workers that live on read a streaming data set."""
    return StreamingDataLoader(augmented(), batch_size=4, num_workers=2, persistent_workers=True)


@row("train", part="loaders", shows="content")
def streaming_in_another_loader() -> DataLoader[Any]:
    """A loader of torch reads a streaming data set."""
    return DataLoader(augmented(), batch_size=4)


@row("data", part="loaders", shows="content", repeats=2, takes="argument val_check_interval")
class SharedStreaming(LightningDataModule):
    """Training and validation take turns with the epochs of a data set."""

    def setup(self, stage: str) -> None:
        self.shared = augmented()

    def train_dataloader(self) -> Any:
        return StreamingDataLoader(self.shared, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.shared, batch_size=4)

"""Iterable data sets, those of Lightning 1.9's page on fault tolerance, and this package's samplers and streams."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_faulttolerant import (
    InterruptibleDistributedGroupedBatchSampler,
    InterruptibleDistributedSampler,
    InterruptibleSampler,
    ResumableDataLoader,
    StreamingDataLoader,
    StreamingDataset,
)
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from tests.laws.data_sets import (
    NoisyCollate,
    NoisyDataset,
    SizedStream,
    StatefulStream,
    Stream,
    UnevenStream,
    noise,
    of_kind,
)
from tests.laws.rows import add, row


def stream(name: str, make: Callable[[], Any], **arguments: Any) -> None:
    """Add a loader of an iterable data set."""
    values = {key: arguments.pop(key) for key in ("part", "trainer", "options", "only_with") if key in arguments}
    train = lambda: DataLoader(make(), **{"batch_size": 4, **arguments})  # noqa: E731 - a row's function
    add(name, **{"part": "loaders", "shows": "content", "train": train, **values})


class StatefulIterator(Iterator[Tensor]):
    """Has a state, and can't be started again: its samples depend on a number that it drew."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.next, self.shift = numbers, 0, random.random()

    def __next__(self) -> Tensor:
        if self.next >= len(self.numbers):
            raise StopIteration
        self.next += 1
        return torch.full((4,), self.numbers[self.next - 1] + self.shift + noise())

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"next": self.next, "shift": self.shift}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position."""
        self.next, self.shift = state_dict["next"], state_dict["shift"]


class StreamOfStatefulIterators(Stream):
    """Its iterators have a state."""

    def __iter__(self) -> Iterator[Tensor]:
        return StatefulIterator(self.numbers())


class CountingStream(Stream):
    """Its samples depend on how often it was started."""

    num_begun = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.num_begun += 1
        return (torch.full((4,), float(number * self.num_begun)) for number in self.numbers())


stream("stream", lambda: Stream(24))
stream("sized stream in workers", lambda: SizedStream(32), num_workers=2, collate_fn=NoisyCollate())
stream("stream with a state", StatefulStream)
stream("stream with a state in workers", StatefulStream, num_workers=2)
stream("stream of iterators with states", lambda: StreamOfStatefulIterators(24))
stream("workers that run out one after the other", UnevenStream, num_workers=2, persistent_workers=True)
stream("stream without an incomplete batch", lambda: Stream(26), drop_last=True)
stream("stream without batches", lambda: Stream(8), batch_size=None)
stream("counting stream", lambda: CountingStream(24))
stream("6 batches of a stream", lambda: Stream(48), trainer={"limit_train_batches": 6})


# The page of Lightning 1.9, copied verbatim.
# ruff: noqa: UP037 - the page's own code
# fmt: off


class RandomDataset(Dataset):

    def __init__(self, size: int, length: int):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


# does not support fault tolerance training!
class UnsupportedRandomIterableDataset(IterableDataset):

    def __init__(self, size: int, count: int):
        self.count = count
        self.size = size

    def __iter__(self):
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDataset(IterableDataset):

    def __init__(self, size: int, length: int):
        self.data = torch.randn(length, size)
        # expose the sampler as an attribute
        self.sampler = RandomSampler(range(length))

    def __iter__(self) -> "RandomIterableDataset":
        # expose the generator from the sampler as an attribute
        # the ``sampler_iter`` will be wrapped by Lightning to ensure
        # we can capture random seeds and iteration count for fast-forward samplers
        # while restarting.
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> torch.Tensor:
        # call next on the iterator and get the associated data.
        # the logic here can become more complex but the sampler
        # should be the central piece for fetching the next sample
        index = next(self.sampler_iter)
        return self.data[index]

# fmt: on


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that makes the same data set in every process, as in a script that seeds first."""

    def made() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make()

    return made


stream("map-style of the page", seeded(lambda: RandomDataset(4, 24)), shuffle=True)
stream("unsupported by the page", lambda: UnsupportedRandomIterableDataset(4, 24))
stream("protocol of the page", seeded(lambda: RandomIterableDataset(4, 24)))
stream("protocol of the page in workers", seeded(lambda: RandomIterableDataset(4, 16)), num_workers=2)


# This package's samplers.

NUM_MANY = 10**10


class Many(Dataset[Tensor]):
    """Has too many samples for a permutation in memory; each draws."""

    def __len__(self) -> int:
        return NUM_MANY

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / NUM_MANY) + 0.1 * torch.randn(4)


class Advances(Callback):
    """Counts the consumed batches in the sampler, which is not needed."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        [sampler] = of_kind(trainer.train_dataloader, InterruptibleSampler)
        sampler.advance(4)


def sampled(name: str, make: Callable[[], Any], **values: Any) -> None:
    """Add a loader with a sampler of this package."""
    train = lambda: DataLoader(NoisyDataset(24), batch_size=4, sampler=make())  # noqa: E731 - a row's function
    add(name, **{"part": "loaders", "shows": "content", "train": train, **values})


sampled("interruptible", lambda: InterruptibleSampler(range(24), seed=3), callbacks=Advances)
sampled("distributed", lambda: InterruptibleDistributedSampler(range(24), order="feistel"))
add(
    "ten billion samples",
    part="loaders",
    shows="content",
    train=lambda: DataLoader(Many(), 4, sampler=InterruptibleDistributedSampler(NUM_MANY, order="feistel")),
    trainer={"limit_train_batches": 6},
)


@row("train", part="loaders", shows="content")
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


class PassedOn(IterableDataset[Tensor]):
    """Passes on the samples of another data set, with noise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Tensor]:
        for each in self.inner:
            yield each + 0.1 * torch.randn(4)


def shards() -> str:
    """Return the directory of small shards, which each start writes where the first one did."""
    directory = Path("shards").absolute()
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=".") as written:
            with MDSWriter(out=f"{written}/data", columns={"n": "int"}, size_limit=128) as writer:
                for n in range(24):
                    writer.write({"n": n})
            Path(f"{written}/data").rename(directory)
    return str(directory)


def augmented() -> Augmented:
    """Return a shuffled streaming data set."""
    return Augmented(shards(), shuffle=True, batch_size=4, shuffle_block_size=16)


@row("train", part="loaders", shows="content")
def streaming() -> DataLoader[Any]:
    """Workers that live on read a streaming data set."""
    return StreamingDataLoader(augmented(), batch_size=4, num_workers=2, persistent_workers=True)


@row("train", part="loaders", shows="content")
def streaming_in_another_loader() -> DataLoader[Any]:
    """A loader of torch reads a streaming data set."""
    return DataLoader(augmented(), batch_size=4)


@row("train", part="loaders", shows="content")
def streaming_passed_on() -> DataLoader[Any]:
    """Another data set reads a streaming data set."""
    return DataLoader(PassedOn(augmented()), batch_size=4)


@row("data", part="loaders", shows="content", repeats=2)
class SharedStreaming(LightningDataModule):
    """Training and validation take turns with the epochs of a data set."""

    def setup(self, stage: str) -> None:
        self.shared = augmented()

    def train_dataloader(self) -> Any:
        return StreamingDataLoader(self.shared, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.shared, batch_size=4)

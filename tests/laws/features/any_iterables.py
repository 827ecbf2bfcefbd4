"""Loaders that are not a ``DataLoader``, and those that do more than torch's in their ``__iter__``."""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.laws.data_sets import NoisyDataset, Quiet, UnpackingLoader, batch_of, of_kind
from tests.laws.rows import add, add_loader, row, rows_of


def iterable(made: Callable[..., Any], **values: Any) -> Callable[..., Any]:
    """Add an iterable whose batches our state of loaders carries."""
    add_loader(made.__name__, made, **values)
    return made


class Batches:
    """Starts over in each epoch, in another order."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for number in random.sample(range(6), 6):
            yield batch_of(number)


class Slice:
    """Yields a slice of one endless stream in each epoch, as gluonts does."""

    def __init__(self) -> None:
        self.iterable = map(batch_of, itertools.count())

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.iterable, 6)


@row("train", part="loaders", shows="content", apart="ahead")
class ShiftedSlice(Slice):
    """Draws when an iteration over a slice of a stream starts."""

    def __iter__(self) -> Iterator[Any]:
        shift = torch.randn(())
        return (batch + shift for batch in super().__iter__())


@row("train", part="loaders", shows="content", apart="counts")
class ItsOwnIterator:
    """Keeps its position and its generator in attributes."""

    def __init__(self) -> None:
        self.place, self.epoch = 0, 0
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        self.place = 0
        self.epoch += 1
        return self

    def __next__(self) -> Tensor:
        if self.place == 6:
            raise StopIteration
        self.place += 1
        return batch_of(self.place) + self.epoch + float(self.rng.normal())


@dataclass
class Graph:
    """A batch of a custom class."""

    nodes: Tensor

    def to(self, *_: Any) -> Graph:
        """Return itself; there is nothing to move."""
        return self


@iterable
class Graphs(Batches):
    """Yields objects that only user code knows."""

    def __iter__(self) -> Iterator[Any]:
        return ({"graph": Graph(batch)} for batch in super().__iter__())


class Wrapper:
    """Takes its batches from a torch loader that it holds."""

    def __init__(self, dataset: Dataset[Tensor], **arguments: Any) -> None:
        self.inner = DataLoader(dataset, batch_size=4, shuffle=True, **arguments)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            yield batch + torch.randn(())


@iterable
def wrapped_workers() -> Wrapper:
    """The torch loader inside has workers that live on."""
    return Wrapper(NoisyDataset(24), num_workers=2, persistent_workers=True)


class CountedSamples(NoisyDataset):
    """Counts the samples that it gives, and makes each larger than the one before."""

    num_given = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_given += 1
        return super().__getitem__(index) * (1 + 0.01 * self.num_given)


@row("train", part="loaders", shows="content", apart="counts")
def wrapped_count() -> Wrapper:
    """The data set inside counts: its count is that of the start of the epoch before the epoch is replayed."""
    return Wrapper(CountedSamples(24))


class Queue(Dataset[Tensor]):
    """Fills itself from its own loader, as TorchIO's does."""

    def __init__(self) -> None:
        self.samples: list[Tensor] = []
        self.rest = iter(DataLoader(NoisyDataset(24), batch_size=4, shuffle=True))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        self.samples = self.samples or list(next(self.rest))
        return self.samples.pop() + torch.randn(4)


@iterable
class QueueInEachPass:
    """Creates a queue and its loader in each pass."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Queue(), batch_size=4))


def endless() -> Iterator[Tensor]:
    """Return an endless iterator of batches."""
    return map(batch_of, itertools.count())


add_loader("endless", endless, apart="ahead", trainer={"limit_train_batches": 6})
add("iterable for validation", validation=Slice, trainer={"val_check_interval": 3})


# One object in two places.


class Source:
    """Counts the batches that it has returned to all of its loaders."""

    def __init__(self) -> None:
        self.num_given = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            self.num_given += 1
            yield torch.randn(4, 4) + self.num_given / 8


class FromSource:
    """Yields batches from a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


@row("data", part="loaders", shows="content")
class OneSource(LightningDataModule):
    """The sanity check of a start moves the source of the training; a resumed run has no sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.one = FromSource(Source())

    def train_dataloader(self) -> Any:
        return self.one

    def val_dataloader(self) -> Any:
        return FromSource(self.one.source)


# Subclasses of DataLoader.


class ReadsAhead(DataLoader[Any]):
    """Fetches two batches ahead in a thread, as MONAI's ThreadDataLoader does; the thread draws nothing."""

    def __init__(self, dataset: Any = None, **arguments: Any) -> None:
        super().__init__(dataset or Quiet(24), batch_size=4, shuffle=True, **arguments)

    def __iter__(self) -> Iterator[Any]:
        fetched: queue.Queue[Any] = queue.Queue(2)

        def fetch(batches: Iterator[Any]) -> None:
            for batch in batches:
                fetched.put(batch)
            fetched.put(None)

        threading.Thread(target=fetch, args=(super().__iter__(),), daemon=True).start()
        while (batch := fetched.get()) is not None:
            yield batch


def draws_ahead() -> ReadsAhead:
    """One worker draws what a thread fetches ahead."""
    return ReadsAhead(NoisyDataset(24), num_workers=1)


iterable(draws_ahead, ranks=False)  # Lightning can't make it again for a rank


class Repeats:
    """Restarts its sampler again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class LivesOn(DataLoader[Any]):
    """Creates one iterator for all epochs when it is built, as timm's MultiEpochsDataLoader does."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(NoisyDataset(24), batch_size=4, shuffle=True)
        object.__setattr__(self, "batch_sampler", Repeats(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        return (next(self.iterator) for _ in range(len(self)))


iterable(LivesOn, ranks=False)  # Lightning refuses its batch sampler


# What loaders keep beside their batches, or read elsewhere.


class Scaled(DataLoader[Any]):
    """Has a factor behind a property, and knows its process."""

    _scale = 1.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.process = os.getpid()

    @property
    def scale(self) -> float:
        """The factor for a batch."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * self._scale


class Scales(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        [loader] = of_kind(trainer.train_dataloader, Scaled)
        loader.scale += 0.25
        assert loader.process == os.getpid()


add(
    "attribute of a loader", part="objects", shows="content", callbacks=Scales, apart="counts",
    train=lambda: Scaled(NoisyDataset(24), batch_size=4, shuffle=True),
)  # fmt: skip


seed = 0


class SeededByGlobal:
    """Seeds each epoch with a global of its module."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(6):
            yield torch.randn(4, 4, generator=generator) + torch.randn(())


class SetsSeed(Callback):
    """Sets the global when an epoch starts, and again in its middle."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        global seed
        seed = 100 + trainer.current_epoch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        global seed
        if batch_idx == 1:
            seed = 0


add_loader("global that an iteration reads", SeededByGlobal, callbacks=SetsSeed)


class LooksAtTheData(Callback):
    """Iterates over the trainer's own loaders in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (2, 5):
            for loader in (trainer.train_dataloader, trainer.val_dataloaders):
                iterator = iter(loader)
                next(iterator), next(iterator)


for num_workers in (0, 2):  # in a subclass, an iteration begins late: at its first fetch
    add_loader(
        f"iterated aside, with {num_workers} workers",
        lambda num=num_workers: (DataLoader if num else UnpackingLoader)(NoisyDataset(24), 4, num_workers=num),
        validation=rows_of(8, shuffle=False, num_workers=num_workers), callbacks=LooksAtTheData, alone=True,
    )  # fmt: skip

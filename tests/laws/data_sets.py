"""Data sets, samplers, and functions of loaders that rows and other tests share. Most of them draw random numbers.

They are at the top of a module, so that spawned workers can import them. The module does not import Lightning, so that
the import is fast.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info


class NoisyDataset(Dataset[Tensor]):
    """Fixed rows, with noise from all three global generators, including their cached Gaussians."""

    def __init__(self, length: int = 32) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        noise = random.gauss(0, 1) + float(np.random.randn()) + float(torch.randn(()))
        return self.rows[index] + 0.1 * noise


class HoldingDataset(NoisyDataset):
    """Draws from its own generators, too."""

    def __init__(self, length: int = 32) -> None:
        super().__init__(length)
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Tensor:
        own = self.python.gauss(0, 1) + self.numpy.normal() + self.legacy.randn()
        return super().__getitem__(index) + 0.1 * float(own) + 0.1 * torch.randn((), generator=self.torch)


class ManyAtOnceDataset(NoisyDataset):
    """Returns all samples of a batch together, with noise that they share."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        shared = float(np.random.randn())
        return [self[index] + shared for index in indices]


class LazyDataset(NoisyDataset):
    """Creates its generator on first use; until then its attribute is ``None``, or missing."""

    def __init__(self, *, has_attribute: bool) -> None:
        super().__init__()
        if has_attribute:
            self.rng = None

    def __getitem__(self, index: int) -> Tensor:
        if getattr(self, "rng", None) is None:
            self.rng = np.random.default_rng(0)
        return super().__getitem__(index) + self.rng.normal()


class LocalDataset(LazyDataset):
    """Creates a generator in each thread on first use."""

    def __init__(self) -> None:
        super().__init__(has_attribute=False)
        self.local = threading.local()

    def __getitem__(self, index: int) -> Tensor:
        if not hasattr(self.local, "rng"):
            self.local.rng = np.random.default_rng(0)
        return NoisyDataset.__getitem__(self, index) + self.local.rng.normal()


class Jitter:
    """A transform that draws from a generator that was passed to it."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: Tensor) -> Tensor:
        if isinstance(self.rng, torch.Generator):
            return value + torch.randn((), generator=self.rng)
        return value + float(self.rng.normal() if hasattr(self.rng, "normal") else self.rng.gauss(0, 1))


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class TransformedDataset(NoisyDataset):
    """Has a transform that holds each kind of generator."""

    def __init__(self) -> None:
        super().__init__()
        inner = Compose(Jitter(np.random.RandomState(0)), Jitter(torch.Generator().manual_seed(0)))
        self.transform = Compose(Jitter(random.Random(0)), {"inner": inner}["inner"], Jitter(np.random.default_rng(0)))

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(super().__getitem__(index))


class PythonShuffle(Sampler[int]):
    def __init__(self, length: int = 32) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


class DrawingSampler(PythonShuffle):
    """Draws from torch's global generator at every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


class Squares(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(i)) for i in range(32))


class NoisyCollate:
    """A ``collate_fn`` that draws from the global generators and from its own."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + self.rng.gauss(0, 1) + float(np.random.randn()) + torch.randn(())


def closed_over_collate() -> Callable[[list[Tensor]], Tensor]:
    """Return a ``collate_fn`` that draws from a generator in its closure."""
    rng = np.random.default_rng(0)
    return lambda samples: torch.stack(samples) + rng.normal()


def drawing_worker_init(worker_id: int) -> None:
    """Seed NumPy as tutorials do, draw, and store the numbers in the worker's copy of the data set."""
    np.random.seed((torch.initial_seed() + worker_id) % 2**32)
    info = get_worker_info()
    assert info is not None
    info.dataset.rows = info.dataset.rows + random.random() + float(np.random.rand()) + torch.rand(())


class UnpackingLoader(DataLoader[Any]):
    """Its ``__iter__`` is a generator that unpacks the batches, and draws."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            first, *others = batch
            yield torch.stack([first + torch.randn(()), *others])


class MappingLoader(DataLoader[Any]):
    """Its ``__iter__`` is a plain function that returns an iterator, which draws."""

    def __iter__(self) -> Iterator[Any]:
        return map(Jitter(random), super().__iter__())


class Unsized(DataLoader[Any]):
    """Has no length: Lightning fetches one batch ahead."""

    def __len__(self) -> int:
        raise TypeError("no length")


def noise() -> float:
    """Draw from all three global generators."""
    return random.gauss(0, 1) + float(np.random.randn()) + float(torch.randn(()))


def shard() -> tuple[int, int]:
    """Return this worker's number and the number of workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Stream(IterableDataset[Tensor]):
    """Shuffles through a buffer, draws at every sample, and is sharded by worker."""

    def __init__(self, length: int = 32) -> None:
        self.length = length
        self.rng = random.Random(0)

    def numbers(self) -> range:
        worker, num_workers = shard()
        return range(worker, self.length, num_workers)

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for number in self.numbers():
            buffer.append(number)
            if len(buffer) == 5:
                yield self.sample(buffer.pop(random.randrange(5)))
        while buffer:
            yield self.sample(buffer.pop(int(torch.randint(len(buffer), ()))))

    def sample(self, number: int) -> Tensor:
        return torch.full((4,), number / 32) + 0.1 * noise() + 0.1 * self.rng.gauss(0, 1)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class UnevenStream(Stream):
    """The first worker has 6 samples, the second 26."""

    def numbers(self) -> range:
        worker, num_workers = shard()
        return range(32) if num_workers == 1 else (range(6), range(6, 32))[worker]


class StatefulStream(SizedStream):
    """Has a state; a replay would not find the position, since it counts how often it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.num_begun, self.next, self.resumed_at = 0, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.resumed_at = self.resumed_at, 0
        self.num_begun += not begin
        numbers = self.numbers()
        for index in range(begin, len(numbers)):
            self.next = index + 1
            yield self.sample(numbers[index] + self.num_begun)

    def state_dict(self) -> dict[str, int]:
        return {"num_begun": self.num_begun, "next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_begun, self.next = state_dict["num_begun"], state_dict["next"]
        self.resumed_at = self.next


class StatefulSampler(Sampler[int]):
    """Continues where its state says; the order follows from the number of epochs that it has started."""

    def __init__(self) -> None:
        self.length = 32
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if self.position == self.length:
            self.epoch, self.position = self.epoch + 1, 0
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        while self.position < self.length:
            self.position += 1
            yield order[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class CountingDataset(NoisyDataset):
    """Adds to each sample the number of samples drawn before it; that number is its state. To load it, it draws."""

    drawn = 0

    def __getitem__(self, index: int) -> Tensor:
        self.drawn += 1
        return super().__getitem__(index) + self.drawn

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]
        torch.rand(3)


def counted() -> DataLoader[Any]:
    """Return a loader whose sampler and data set both have a state."""
    return DataLoader(CountingDataset(), batch_size=4, sampler=StatefulSampler())


class Quiet(Dataset[Tensor]):
    """Fixed rows, and no random number."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / self.length)


def batch_of(number: int) -> Tensor:
    """Return a batch that contains its number, with noise."""
    return torch.full((4, 4), number / 8) + random.gauss(0, 1) + torch.randn(4, 4)


def of_kind(loaders: Any, kind: type[Any]) -> list[Any]:
    """Return the loaders of a kind in a tree of loaders; or those whose data set, or sampler, is of the kind."""
    if isinstance(loaders, dict):
        return [found for each in loaders.values() for found in of_kind(each, kind)]
    if isinstance(loaders, list):
        return [found for each in loaders for found in of_kind(each, kind)]
    inner = (getattr(loaders, name, None) for name in ("dataset", "batch_sampler", "sampler"))
    return [each for each in (loaders, *inner) if isinstance(each, kind)][:1]

"""Data sets, samplers, and loaders of the tests. Nothing else is in this module: each tracker walks through it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Drawing(Dataset[Tensor]):
    """Each sample holds its index and draws from every generator, global and held, including cached Gaussians."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.lazy: random.Random | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Tensor:
        if self.lazy is None:
            self.lazy = random.Random(7)
        own = [self.python.gauss(0, 1), self.numpy.normal(), self.lazy.random()]
        common = [random.gauss(0, 1), np.random.randn(), torch.randn(()).item()]
        return torch.tensor([float(index), *own, *common], dtype=torch.float64)


class Noisy(Drawing):
    """A sample is its index and a random number."""

    def __getitem__(self, index: Any) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()], dtype=torch.float64)


class Echo(Dataset[str]):
    """A sample is its index, whatever that is, as a text."""

    def __init__(self, length: int = 9) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> str:
        return repr(index)


class Counts(IterableDataset[int]):
    """Counts its iterations, next to a module in training."""

    def __init__(self, first: int = 0) -> None:
        self.policy, self.first, self.count = nn.Linear(1, 1), first, 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        yield from range(self.first + self.count, self.first + self.count + 4)


class Threaded:
    """Draws each index lazily, from all generators."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            yield random.randrange(50) + 100 * int(np.random.randint(50)) + 10_000 * self.own.randrange(50)


class Slices(Threaded):
    """Yields objects, which a checkpoint can't hold."""

    def __iter__(self) -> Iterator[Any]:
        return (slice(index) for index in super().__iter__())


class Negative(DataLoader[Any]):
    """A user's loader that changes each batch and counts its iterations."""

    num_iterations = 0

    def __iter__(self) -> Any:
        self.num_iterations += 1
        for batch in super().__iter__():
            yield -batch


def generator(number: int = 3) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(number)


class DrawsAll:
    """Yields indices from random places of a buffer, so that each depends on all earlier draws.

    It draws from each kind of generator, also from its own.
    """

    def __init__(self) -> None:
        self.own = (random.Random(0), np.random.RandomState(0), np.random.default_rng(0), torch.Generator())

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[Any]:
        python, numpy, other, of_torch = self.own
        buffer = list(range(8))
        for index in range(8, 38):
            place = random.randrange(len(buffer))
            drawn = np.random.randn(), torch.randn(()).item(), python.gauss(0, 1), numpy.randn(), other.random()
            yield buffer[place], *drawn, torch.rand((), generator=of_torch).item()
            buffer[place] = index


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        raise RuntimeError("no such sample")


# What can't be resumed exactly.


class EndsAlike(Echo):
    """A sampler whose first 9 indices depend on the count of its starts; the later ones don't."""

    def __init__(self, num_iterations: int = 0, is_object: bool = False) -> None:
        super().__init__(20)
        self.count = ContextVar("count", default=num_iterations)  # the package does not look for state there
        self.is_object = is_object

    def __iter__(self) -> Iterator[Any]:
        self.count.set(self.count.get() + 1)
        indices = [(i + self.count.get()) % 9 if i < 9 else i for i in range(20)]
        return iter([slice(i) for i in indices] if self.is_object else indices)


class Equipped:
    """A sampler that draws late, from a generator that it may have been given."""

    def __init__(self, *parts: random.Random) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        yield self.parts[0].randrange(50) if self.parts else 0


class Rude(DataLoader[Any]):
    """Calls DataLoader's own `__iter__`."""

    def __iter__(self) -> Any:
        return DataLoader.__iter__(self)


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Eager(DataLoader[Any]):
    """Creates its iterator early and keeps it, like a loader that never ends its workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        return self.iterator


class Swelling(Echo):
    """Creates, when it is first used, more generators than the reserve for a worker's state allows."""

    generators: Any = ()

    def __getitem__(self, index: int) -> str:
        self.generators = [*self.generators, *(random.Random(i) for i in range(200))]
        return repr(index)

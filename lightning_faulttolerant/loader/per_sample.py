"""The second mode of worker randomness: every generator is seeded before each sample, so no state is captured.

The draws of a sample depend only on the seed, the loader, the epoch, and the sample's place in the epoch of all ranks.
They don't change with the number of workers or ranks. ``collate_fn`` continues from the seeds of its last sample.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import random
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import reseed, restore_globals, saved_globals

_PLACE = struct.Struct("<QQQ")
_SEEDS = struct.Struct("<QQQQ")
_MASK = 2**64 - 1
_SPREAD = 0x9E3779B97F4A7C15  # an odd number with well-spread bits
_MAX_TRIES = 4


def why_not_per_sample(loader: DataLoader[object]) -> str | None:
    """Return why the samples of `loader` can't be seeded one by one, or ``None`` if they can."""
    if isinstance(loader.dataset, IterableDataset):
        return (
            "its data set is iterable, so its samples have no position in the epoch from which to seed them; the "
            'states of its workers are saved as with worker_rng="capture"'
        )
    return None


class SeededIndices(NamedTuple):
    """Replaces an index batch, and adds the values that seed its samples.

    ``place`` is the first sample's place in the epoch. ``step`` is the distance to the next sample's place. It equals
    the number of ranks, because the ranks take samples in turn.
    """

    seed: int
    epoch: int
    place: int
    indices: Any
    step: int = 1


@dataclass(kw_only=True, slots=True)
class SampleSeeds:
    """Everything that determines the seeds of a loader's samples, besides their place.

    Args:
        seed: The seed of the whole run.
        name: The loader's name: two loaders of one run draw different numbers.
        num_begun: The number of iterations that have begun over the loader.
    """

    seed: int
    name: str = ""
    num_begun: int = field(default=0)

    def begin(self, *, is_resumed: bool) -> int:
        """Count a new iteration, unless it continues one. Return the number of iterations begun before it."""
        if not is_resumed or not self.num_begun:
            self.num_begun += 1
        return self.num_begun - 1

    def of(self, batch: object, *, epoch: int, place: int, step: int = 1) -> SeededIndices:
        """Return `batch` with the values that seed its samples."""
        return SeededIndices(_own_seed(self.seed, self.name), epoch, place, batch, step)

    def seed_workers(self, generator: torch.Generator | None) -> None:
        """Let torch draw the same seed for new workers, no matter when they are created."""
        seed = self.of(None, epoch=0, place=0).seed
        torch.default_generator.manual_seed(seed)
        if generator is not None:
            generator.manual_seed(seed)

    def state_dict(self, *, num_begun: int | None = None) -> dict[str, int]:
        """Return the seed and the count."""
        return {"seed": self.seed, "num_begun": self.num_begun if num_begun is None else num_begun}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from the seed and the count that `state_dict` returned."""
        self.seed, self.num_begun = state_dict["seed"], state_dict["num_begun"]


@functools.lru_cache
def _own_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


class LoaderSeeds:
    """The seeds of all loaders of a run, by place. They continue if a loader is created again.

    The run's seed is that of ``seed_everything``, else the one that torch started with. Nothing is drawn.
    """

    def __init__(self) -> None:
        seed = os.environ.get("PL_GLOBAL_SEED")
        self.seed = (int(seed) if seed else torch.initial_seed()) & _MASK
        self._seeds: dict[str, SampleSeeds] = {}

    def of(self, place: str) -> SampleSeeds:
        """Return the seeds of the loader at `place`."""
        return self._seeds.setdefault(place, SampleSeeds(seed=self.seed, name=place))

    def resume_from(self, states: Mapping[str, Any]) -> None:
        """Take the run's seed and the counts from the loaders' states, by place."""
        for place, state in states.items():
            if "per_sample" in state:
                self.seed = state["per_sample"]["seed"]
                self.of(place).load_state_dict(state["per_sample"])
        for seeds in self._seeds.values():
            seeds.seed = self.seed


class DatasetStandIn:
    """Stands in for a loader's map-style data set while torch creates an iterator, which keeps it.

    Args:
        dataset: The loader's data set. Every attribute is looked up on it.
    """

    def __init__(self, dataset: Any) -> None:
        self.user_dataset = dataset

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "user_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.user_dataset, name)

    def __len__(self) -> int:
        return len(self.user_dataset)

    @contextlib.contextmanager
    def stand_in(self, loader: DataLoader[Any], **others: object) -> Iterator[None]:
        """Replace the data set and other attributes of `loader` in the block."""
        parts = vars(loader)
        own = {name: parts[name] for name in ("dataset", *others)}
        parts.update(others, dataset=self)
        try:
            yield
        finally:
            parts.update(own)


class PerSampleDataset(DatasetStandIn):
    """Stands in for a data set whose samples are seeded one by one, and for the ``collate_fn``.

    The main process restores its generators after each batch. A worker's generators serve only the worker.

    Args:
        dataset: The loader's data set. Every attribute is looked up on it.
        collate_fn: The loader's ``collate_fn``.
        is_batched: Whether an index batch holds the indices of several samples.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        super().__init__(dataset)
        self._collate_fn = collate_fn
        self._is_batched = is_batched
        self._held: HeldGenerators | None = None
        self._before: tuple[Any, ...] | None = None
        self._current: SeededIndices | None = None

    def __getstate__(self) -> dict[str, object]:
        # A spawned worker searches its copy for generators.
        return {**vars(self), "_held": None, "_before": None}

    def __getitem__(self, index: Any) -> object:
        return self._fetch(index) if isinstance(index, SeededIndices) else self.user_dataset[index]

    def __getitems__(self, indices: Any) -> list[object]:
        """Return the samples of a batch, one after the other."""
        if isinstance(indices, SeededIndices):
            samples: list[object] = self._fetch(indices)
            return samples
        return [self.user_dataset[index] for index in indices]

    def _fetch(self, batch: SeededIndices) -> Any:
        held = self._held
        if held is None:
            held = self._held = HeldGenerators({"dataset": self.user_dataset, "collate_fn": self._collate_fn})
        held.refresh()
        if get_worker_info() is None:
            _numpy_random()
            self._before = (saved_globals(), held.state_dict() if held.paths else {})
        self._current = batch
        try:
            return self._take(batch, held)
        except BaseException:
            self._put_back()
            raise

    def _take(self, batch: SeededIndices, held: HeldGenerators) -> object:
        if not self._is_batched:
            return self._sample(batch, batch.place, batch.indices, held)
        first, step = batch.place, batch.step
        return [self._sample(batch, first + i * step, index, held) for i, index in enumerate(batch.indices)]

    def _sample(self, batch: SeededIndices, place: int, index: Any, held: HeldGenerators) -> object:
        for _ in range(_MAX_TRIES):
            seeded = seed_generators(batch.seed, batch.epoch, place, held)
            sample = self.user_dataset[index]
            # An object may have created a generator just now, with its own seed. Then take the sample again.
            if not _has_more_than(held, seeded):
                return sample
        raise NotExactError(
            f"{type(self.user_dataset).__name__} creates another random generator for each sample, and keeps them all. "
            "They can't be seeded before the sample draws from them. Let it create them at its start, or use "
            'worker_rng="capture".'
        )

    def collate(self, samples: Any) -> object:
        """Collate a batch with the user's function, after the seeds of its last sample."""
        batch, held = self._current, self._held
        if batch is None or held is None:  # another iteration beside the followed one
            return self._collate_fn(samples)
        self._current = None
        try:
            seeded = held.generators().keys() if held.paths else ()
            collated = self._collate_fn(samples)
            # The function may have created a generator and changed its samples. Then take both again.
            return self._collate_fn(self._take(batch, held)) if _has_more_than(held, seeded) else collated
        finally:
            self._put_back()

    def _put_back(self) -> None:
        if self._before is None:
            return
        (states, held), self._before = self._before, None
        restore_globals(states)
        if held and self._held is not None:
            self._held.load_state_dict(held)


def _has_more_than(held: HeldGenerators, seeded: Collection[str]) -> bool:
    """Return whether there are more generators now than those that were seeded."""
    held.refresh()
    return bool(held.paths) and not held.generators().keys() <= set(seeded)


def seed_generators(seed: int, epoch: int, place: int, held: HeldGenerators) -> Collection[str]:
    """Seed the global generators and those of `held` for one sample; return the paths in `held`."""
    digest = hashlib.blake2b(_PLACE.pack(seed, epoch, place), digest_size=_SEEDS.size).digest()
    for_python, for_numpy, for_torch, for_held = _SEEDS.unpack(digest)
    random.seed(for_python)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        _seed_random_state(numpy_random, for_numpy)
    torch.default_generator.manual_seed(for_torch)
    if not held.paths:
        return ()
    generators = held.generators()
    for name, generator in generators.items():
        # Seeded by path: another process may have found more or fewer generators.
        _seed_generator(generator, for_held ^ zlib.crc32(name.encode()) * _SPREAD & _MASK)
    return generators.keys()


def _seed_generator(generator: object, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "get_state"):
        _seed_random_state(generator, seed)
    else:
        reseed(generator, seed)


def _seed_random_state(random_state: Any, seed: int) -> None:
    try:
        random_state.seed(seed & 0xFFFFFFFF)  # an array of more bits would cost six times as much
    except TypeError:  # its bits are not MT19937's
        state = random_state.get_state(legacy=False)
        fresh = getattr(_numpy_random(), state["bit_generator"])(seed).state
        random_state.set_state({**state, **fresh, "has_gauss": 0, "gauss": 0.0})


@functools.cache
def _numpy_random() -> ModuleType | None:
    # Import it now. If the first sample to draw from it imported it, that sample could not be seeded.
    try:
        return importlib.import_module("numpy.random")
    except ImportError:
        return None

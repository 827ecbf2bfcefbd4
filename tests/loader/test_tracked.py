"""The law of the loader, in a plain loop: wherever it is cut, the rest is that of the uninterrupted run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.replayer import takes_each_batch_alone
from lightning_faulttolerant.loader.sampler_states import rest_of
from lightning_faulttolerant.state.packing import pack_blobs
from lightning_faulttolerant.state.rng import rng_state
from tests import data_sets
from tests.loader.loops import (
    Saved,
    assert_every_cut,
    follow,
    full_state,
    listed,
    loop,
    safe,
    seed,
    tracked_loop,
)
from tests.loader.made import (
    BufferShuffle,
    ChunkShuffle,
    Drawing,
    DrawsAll,
    Echo,
    Failing,
    Negative,
    OwnIterator,
    SampledRange,
    Slices,
    Stream,
    Tasks,
    Threaded,
    generator,
    sharing,
)

WORKERS: dict[str, dict[str, Any]] = {
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
    "3 persistent workers": {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 3},
}


MixedBatches = [
    [0],
    [1, True],
    [(1, torch.tensor(2))],
    (3, [4]),
    [],
    [{"video": "a.mp4", 3: (1, 2)}, b"x"],
    np.arange(2),
]

SAMPLERS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "in order": lambda n, size: {"batch_size": size},
    "shuffled": lambda n, size: {"batch_size": size, "shuffle": True},
    "last dropped": lambda n, size: {"batch_size": size, "shuffle": True, "drop_last": True},
    "loader's generator": lambda n, size: {"batch_size": size, "shuffle": True, "generator": generator()},
    "sampler's generator": lambda n, size: {
        "batch_size": size,
        "sampler": RandomSampler(range(n), generator=generator()),
    },
    "replacement": lambda n, size: {"batch_size": size, "sampler": RandomSampler(range(n), True, num_samples=11)},
    "several passes": lambda n, size: {"batch_size": size, "sampler": RandomSampler(range(n), num_samples=2 * n + 1)},
    "part of a pass": lambda n, size: {"batch_size": size, "sampler": RandomSampler(range(n + 9), num_samples=n)},
    "subset": lambda n, size: {"batch_size": size, "sampler": SubsetRandomSampler([7 * k for k in range(n)])},
    "weighted": lambda n, size: {"batch_size": size, "sampler": WeightedRandomSampler([0.5, 0.5, 2.0], n + 2)},
    "batch sampler": lambda n, size: {"batch_sampler": BatchSampler(RandomSampler(range(n)), size, drop_last=False)},
    "Lightning's": lambda n, size: {"batch_sampler": _IndexBatchSamplerWrapper(BatchSampler(Threaded(), size, False))},
    "list of batches": lambda n, size: {"batch_sampler": [[0], [1, 0], [1]]},
    "no batching": lambda n, size: {"batch_size": None, "shuffle": True},
    "distributed": lambda n, size: {"batch_size": size, "sampler": DistributedSampler(range(n), 2, 1, seed=5)},
    "distributed, batches": lambda n, size: {
        "batch_sampler": BatchSampler(DistributedSampler(range(n), 3, 2, drop_last=True), size, drop_last=True)
    },
    "drawn one by one": lambda n, size: {"batch_size": size, "sampler": Threaded()},
    "own class": lambda n, size: {"sampler": data_sets.PythonShuffle(n), "batch_size": size},
}

LOADERS: dict[str, Callable[..., Any]] = {
    "objects": lambda **more: DataLoader(Echo(), 2, sampler=Slices(), collate_fn=list, **more),
    "own iterator": lambda **more: DataLoader(Echo(), None, sampler=OwnIterator(), **more),
    "mixed batches": lambda **more: DataLoader(Echo(), batch_sampler=MixedBatches, collate_fn=list, **more),
    "shared generator": lambda **more: sharing(9, 2, **more),
    "own __iter__": lambda **more: Negative(Drawing(7), 2, shuffle=True, **more),
    "iterable": lambda **more: DataLoader(Stream(), 2, **more),
    "shuffle buffer": lambda **more: DataLoader(data_sets.Stream(13), 3, **more),
    "uneven": lambda **more: DataLoader(data_sets.UnevenStream(), 4, **more),
    "sampler of an iterable": lambda **more: DataLoader(SampledRange(), 3, **more),
    "tasks": lambda **more: DataLoader(Tasks(), None, **more),
    "all at once": lambda **more: DataLoader(data_sets.ManyAtOnceDataset(7), 2, **more),
    "lazy generator": lambda **more: DataLoader(data_sets.LazyDataset(has_attribute=False), 8, shuffle=True, **more),
    "transforms": lambda **more: DataLoader(data_sets.TransformedDataset(), 8, shuffle=True, **more),
    "collate": lambda **more: DataLoader(data_sets.NoisyDataset(7), 2, collate_fn=data_sets.NoisyCollate(), **more),
    "closure": lambda **more: DataLoader(
        data_sets.NoisyDataset(7), 2, collate_fn=data_sets.closed_over_collate(), **more
    ),
    "worker_init": lambda **more: DataLoader(
        data_sets.NoisyDataset(7), 2, worker_init_fn=data_sets.drawing_worker_init, **more
    ),
}


def make_loader(name: str, length: int = 9, size: int = 2, **more: Any) -> DataLoader[Any]:
    """Return a loader with one of the samplers."""
    return DataLoader(Drawing(length), **SAMPLERS[name](length, size), **more)


ROWS = (
    LOADERS
    | {name: partial(make_loader, name) for name in SAMPLERS}
    | {
        "drawn at its start": lambda **more: DataLoader(Echo(), None, sampler=data_sets.PythonShuffle(9), **more),
    }
)
"""Each row is a function that returns a new loader."""

with_torch_warnings = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")


@pytest.mark.parametrize("row", ROWS)
def test_every_cut_resumes_exactly(row: str) -> None:
    """Before batches, at the ends of epochs, and between them, in this process; half of the rows are cut again."""
    once = row == "Lightning's"  # for predictions, which have one epoch
    # A stream that counts its starts in an eager `__iter__` is refused after its start, before its first batch.
    cuts = slice(0, -1, 2 if row == "tasks" else 3)
    assert_every_cut(ROWS[row], num_epochs=1 if once else 2, cuts=cuts, again=0 if len(row) % 2 else None)


FAST = ("shuffled", "no batching", "drawn one by one", "objects", "iterable", "uneven", "tasks", "worker_init")


def worker_rows() -> list[Any]:
    """Return each row with each kind of workers; some of them are fast."""
    fast = {(row, WORKERS_OF[k % 3]) for k, row in enumerate(FAST)}
    fast |= {("shuffled", workers) for workers in WORKERS_OF}
    return [
        pytest.param(row, workers, marks=() if (row, workers) in fast else pytest.mark.slow)
        for row, workers in itertools.product(ROWS, WORKERS)
    ]


WORKERS_OF = ("2 persistent workers", "2 workers", "1 worker")


@with_torch_warnings
@pytest.mark.parametrize(("row", "workers"), worker_rows())
def test_cuts_resume_exactly_with_workers(row: str, workers: str) -> None:
    """The same holds with workers, which fetch ahead of the consumed batches, with cuts in a round and between them."""
    again = 1 if row in ("shuffled", "iterable") else None
    assert_every_cut(partial(ROWS[row], **WORKERS[workers]), cuts=(1, 6), again=again)


@pytest.mark.slow
@with_torch_warnings
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("row", ["shuffled", "iterable", "uneven"])
def test_every_cut_resumes_exactly_with_workers(row: str, workers: str) -> None:
    """All cuts, and each later one of a resumed run."""
    assert_every_cut(partial(ROWS[row], **WORKERS[workers]), num_epochs=3, again=3)


@pytest.mark.slow
def test_spawned_workers_resume_exactly() -> None:
    """Spawned workers get their state and setup by pickle, and continue exactly."""
    assert_every_cut(
        lambda: DataLoader(Drawing(7), 2, shuffle=True, num_workers=2, multiprocessing_context="spawn"), cuts=(1, 3)
    )


@settings(max_examples=12, deadline=None)
@given(row=st.sampled_from(sorted(SAMPLERS)), length=st.integers(2, 14), size=st.integers(1, 5), cut=st.integers(0, 20))
def test_any_length_batch_size_and_cut(row: str, length: int, size: int, cut: int) -> None:
    """Any sampler, length and batch size, any cut."""
    make = partial(make_loader, row, length, size)
    assert_every_cut(make, num_epochs=1 + (row != "Lightning's"), cuts=(cut,), number=length)


OTHERS: dict[str, Callable[[], Any]] = {
    "few": lambda: (random.random(), torch.rand(3)),
    "many": lambda: (torch.rand(20_000), np.random.rand(700), [random.random() for _ in range(1_000)]),
    "Gaussians": lambda: (torch.randn(3), np.random.randn(3), random.gauss(0, 1)),
    "seeded": lambda: (seed(5), torch.rand(700)),
    "torch seeded": lambda: (torch.manual_seed(torch.initial_seed() + 1), torch.rand(700))[1],
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("sampler", [BufferShuffle, ChunkShuffle, DrawsAll])
def test_sampler_that_draws_as_it_goes_continues_exactly(others: str, sampler: type) -> None:
    """The rest is the same although the sampler draws between batches and remembers its draws, and others draw too."""
    assert_every_cut(
        lambda: DataLoader(Echo(), None, sampler=sampler()),
        num_epochs=1,
        cuts=(1, 29),
        draw=lambda: repr(OTHERS[others]()),
        again=13,
    )


@pytest.mark.parametrize(("others", "most"), [("few", 2), ("many", 3), ("Gaussians", 60), ("torch seeded", 9)])
def test_the_position_hardly_grows(others: str, most: int) -> None:
    """A batch adds a few bytes to a checkpoint where other code draws; a cached Gaussian adds some more."""
    drawn = (int(torch.randint(50, ())) + random.randrange(50) + np.random.randint(50) for _ in range(400))
    tracker, loader = follow(DataLoader(Echo(), None, sampler=drawn))
    batches, sizes = iter(loader), []
    for k in (200, 400):
        for _ in range(200):
            next(batches)
            OTHERS[others]()
        sizes.append(len(pack_blobs(tracker.state_dict(k))["blobs"]["data"]))
    assert sizes[1] - sizes[0] < 200 * most


def test_a_long_epoch_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of an epoch of torch's own samplers is computed: a resume draws none of the samples before."""

    def batches() -> DataLoader[Any]:
        return DataLoader(Echo(50_000), None, sampler=RandomSampler(range(50_000), generator=generator()))

    reference = [index for _, _, index, _ in loop(batches(), num_epochs=1)]
    seed(1)
    tracker, loader = follow(batches())
    assert list(itertools.islice(iter(loader), 100)) == reference[:100]
    state = safe(tracker.state_dict(100))
    fresh = batches()
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: pytest.fail("it was walked through"))
    assert list(follow(fresh, state)[1]) == reference[100:]


def test_rest_of_a_changed_distributed_sampler_is_what_it_would_yield() -> None:
    """Other code may have set another number of samples: torch then complains, and so does the rest."""
    sampler = DistributedSampler(range(10), num_replicas=2, rank=0)
    sampler.num_samples = 4
    with pytest.raises(AssertionError):
        list(rest_of(sampler, 1) or ())
    sampler.total_size, sampler.drop_last = 8, True
    assert list(rest_of(sampler, 1) or ()) == list(sampler)[1:]
    assert rest_of(BatchSampler(SequentialSampler(range(8)), 2, drop_last=False), 5) is None, "it ends before"


@pytest.mark.parametrize("workers", ["2 workers", "2 persistent workers"])
def test_epoch_that_was_left_early_is_no_obstacle(workers: str) -> None:
    """After an epoch that was broken off with batches in flight, the next one is saved and resumed exactly."""

    def run(loader: DataLoader[Any]) -> tuple[list[Any], Iterator[Any]]:
        seed(1)
        list(itertools.islice(iter(loader), 3))
        iterator = iter(loader)
        return [listed(next(iterator)) for _ in range(3)], iterator

    make = partial(DataLoader, batch_size=1, shuffle=True, **WORKERS[workers])
    expected, iterator = run(make(Drawing(9)))
    rest = [listed(batch) for batch in iterator]
    tracker, tracked = follow(make(Drawing(9)))
    assert run(tracked)[0] == expected
    state = safe(full_state(tracker, 3))
    seed(2)
    assert [listed(batch) for batch in follow(make(Drawing(9)), state["loader"])[1]] == rest


@pytest.mark.parametrize("workers", [{}, WORKERS["2 persistent workers"]])
def test_loaded_state_is_the_state(workers: dict[str, Any]) -> None:
    """It stays so until batches are consumed; it is a copy; and a loader with living workers can be set back."""
    make = partial(DataLoader, batch_size=2, shuffle=True, **workers)
    seed(1)
    tracker, tracked = follow(make(Echo(8)))
    iterator = iter(tracked)
    next(iterator), next(iterator)
    state = tracker.state_dict(2)
    copy = safe(state)
    rest = [listed(batch) for batch in iterator]
    assert state == copy
    again, resumed = follow(make(Echo(8)), copy)
    again.state_dict(None)["consumed"] = 5
    assert again.state_dict(None) == copy
    iterator = iter(resumed)
    assert again.state_dict(2)["workers"] == copy["workers"]
    tracker.load_state_dict(copy)
    assert [listed(batch) for batch in tracked] == [listed(batch) for batch in iterator] == rest


@pytest.mark.parametrize("workers", [{}, WORKERS["2 persistent workers"]])
@pytest.mark.parametrize("kind", [DataLoader, Negative])
def test_copy_is_of_the_users_class_and_the_loader_unchanged(kind: Any, workers: dict[str, Any]) -> None:
    """The copy has the user's class and samplers; the loader keeps all attributes but those that it counts itself."""
    loader: Any = kind(Drawing(6), batch_size=2, shuffle=True, generator=generator(0), **workers)
    before, state = dict(vars(loader)), loader.generator.get_state()
    tracker, tracked = follow(loader)
    assert isinstance(tracked, kind)
    assert (type(tracked).__name__, type(tracked).__module__) == (kind.__name__, kind.__module__)
    assert torch.equal(loader.generator.get_state(), state)
    iterator = iter(tracked)
    next(iterator)
    for name in ("dataset", "sampler", "batch_sampler", "batch_size"):
        assert getattr(tracked, name) is getattr(loader, name)
    assert len(tracked) == len(loader)
    assert tracker.num_handed_out > 0
    assert type(loader) is kind
    found = {name: value for name, value in vars(loader).items() if name != "num_iterations"}
    assert found == before
    assert getattr(loader, "num_iterations", 1) == 1
    other: Any = type(tracked)(tracked.dataset, batch_size=3)
    assert (len(other), len(tracked)) == (2, 3), "a loader that is made of the copy's class is its own"


def test_two_loops_that_count_iterations_agree() -> None:
    """After a resume, a loader's own class changes and counts as before."""
    seed(1)
    loader = Negative(Drawing(7), 2, shuffle=True)
    _, saved = tracked_loop(loader, num_epochs=1, save=True)
    assert loader.num_iterations == 1
    again = Negative(Drawing(7), 2, shuffle=True)
    tracked_loop(again, num_epochs=2, resume=Saved(epoch=0, batch=2, state=saved[2].state))
    assert again.num_iterations == 2


# worker_rng="per_sample": samples that are seeded one by one depend only on their place.


def test_seeded_samples_do_not_depend_on_the_number_of_workers() -> None:
    """Three epochs yield the same batches with no, one and two workers; a generator of the sampler moves on alike."""
    found = []
    for num_workers in (0, 1, 2):
        seed(1)
        own = generator(5)
        loader = DataLoader(Drawing(6), 2, sampler=RandomSampler(range(6), generator=own), num_workers=num_workers)
        tracked = follow(loader, seeds=SampleSeeds(seed=3))[1]
        found.append(([listed(batch) for _ in range(3) for batch in tracked], own.get_state().tolist()))
    assert found[0] == found[1] == found[2]


def test_seeded_fetch_leaves_the_generators() -> None:
    """Without workers, a fetch leaves the global and the held generators as they were, even if it fails."""
    for data in (Drawing(4), Failing(4)):
        iterator = iter(follow(DataLoader(data, batch_size=2), seeds=SampleSeeds(seed=3))[1])
        before = rng_state(), data.python.getstate(), data.numpy.bit_generator.state
        if isinstance(data, Failing):
            with pytest.raises(RuntimeError, match="no such sample"):
                next(iterator)
        else:
            next(iterator)
        assert (rng_state(), data.python.getstate(), data.numpy.bit_generator.state) == before


# Loaders with an `__iter__` of their own may begin in the middle if each batch stands alone.


class Moves(DataLoader[Any]):
    """Moves each batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch, target in super().__iter__():
            moved = batch.to("cpu")
            yield moved, target


class Enumerates(DataLoader[Any]):
    """Adds the number of each batch."""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            yield batch + number


class Repeats(DataLoader[Any]):
    """Yields each batch twice."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield batch


class Remembers(DataLoader[Any]):
    """Adds the batch before."""

    last: Any = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            before = self.last
            self.last = batch
            yield batch + before


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(DataLoader, True), (data_sets.Unsized, True), (data_sets.UnpackingLoader, True), (Moves, True)]
    + [
        (kind, False) for kind in (data_sets.MappingLoader, Enumerates, Repeats, Remembers, type("Sub", (Repeats,), {}))
    ],
)
def test_classes_that_take_each_batch_alone(kind: Any, expected: bool) -> None:
    """A class that counts, repeats, or keeps something may not begin in the middle."""
    assert takes_each_batch_alone(kind) is expected


def test_user_collate_functions_pass() -> None:
    """A user's `collate_fn` gets the samples, and its result reaches the loop unchanged."""
    data: Dataset[Any] = torch.utils.data.TensorDataset(torch.arange(4))
    loader = DataLoader(data, batch_size=2, num_workers=1, collate_fn=lambda samples: ("own", *samples))
    assert repr(list(follow(loader)[1])) == repr([("own", *map(data.__getitem__, pair)) for pair in ((0, 1), (2, 3))])

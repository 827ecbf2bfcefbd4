"""The law of ResumableDataLoader, in a plain loop: wherever it is cut, the rest is that of the uninterrupted run."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_faulttolerant import FingerprintMismatchError, InterruptibleSampler, NotExactError, ResumableDataLoader
from lightning_faulttolerant.loader.resumable_run import from_json, to_json
from lightning_faulttolerant.state.packing import pack_blobs
from tests.laws import data_sets
from tests.laws.processes import run_ranks
from tests.loader.loops import assert_resumable, begun, follow, listed, own_draws, resumable_loop, seed, small
from tests.loader.made import Counts, Drawing, DrawsAll, Echo, Negative, Slices, Threaded, generator


class Passes(IterableDataset[int]):
    """Yields the number of the pass over it."""

    num_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.num_begun += 1
        return iter([self.num_begun] * 2)


class NegativeResumable(Negative, ResumableDataLoader[Any]):
    """Changes the batches, as subclasses of DataLoader do."""


def sharing() -> dict[str, Any]:
    """Return a sampler and a data set that draw from one generator."""
    data = Drawing(9)
    data.shared = own = generator()  # type: ignore[attr-defined]
    data.lazy = type("Both", (), {"random": lambda self: torch.rand((), generator=own).item()})()  # type: ignore[assignment]
    return {"dataset": data, "sampler": RandomSampler(data, generator=own)}


def mixed_batches() -> list[Any]:
    """Return batches of all kinds."""
    return [[0], [1, True], [(1, torch.tensor(2))], (3, [4]), [], [{"video": "a.mp4", 3: (1, 2)}, b"x"], np.arange(2)]


def shrunk() -> DistributedSampler[Any]:
    """Return a sampler that was created before its data set got smaller."""
    sampler = DistributedSampler(range(24), 2, 1)  # type: ignore[arg-type]
    sampler.dataset = range(9)  # type: ignore[assignment]
    return sampler


# The arguments of a loader, by default of `Drawing(9)` in batches of two.
ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "last dropped": lambda: {"drop_last": True},
    "shuffled": lambda: {"shuffle": True},
    "loader's generator": lambda: {"shuffle": True, "generator": generator()},
    "sampler's generator": lambda: {"sampler": RandomSampler(range(9), generator=generator())},
    "replacement": lambda: {"sampler": RandomSampler(range(9), True, num_samples=11)},
    "several passes": lambda: {"sampler": RandomSampler(range(9), num_samples=19)},
    "part of a pass": lambda: {"sampler": RandomSampler(range(18), num_samples=9)},
    "subset": lambda: {"sampler": SubsetRandomSampler([7 * k for k in range(9)])},
    "weighted": lambda: {"sampler": WeightedRandomSampler([0.5, 0.5, 2.0], 11)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(9)), 2, drop_last=False)},
    "list of batches": lambda: {"batch_sampler": [[0], [1, 0], [1]]},
    "no batching": lambda: {"batch_size": None, "shuffle": True},
    "distributed": lambda: {"sampler": DistributedSampler(range(9), 2, 1, seed=5)},
    "distributed, batches": lambda: {
        "batch_sampler": BatchSampler(DistributedSampler(range(9), 3, 2, drop_last=True), 2, drop_last=True)
    },
    "drawn one by one": lambda: {"sampler": Threaded()},
    "drawn at its start": lambda: {"dataset": Echo(), "batch_size": None, "sampler": data_sets.PythonShuffle(9)},
    "sampler of ours": lambda: {"sampler": InterruptibleSampler(9)},
    "per_sample": lambda: {"shuffle": True, "worker_rng": "per_sample", "seed": 3},
    "objects": lambda: {"dataset": Echo(), "sampler": Slices(), "collate_fn": list},
    "mixed batches": lambda: {"dataset": Echo(), "batch_sampler": mixed_batches(), "collate_fn": list},
    "shared generator": sharing,
    "subclass": lambda: {"shuffle": True},
    "iterable": lambda: {"dataset": data_sets.Stream(13), "batch_size": 3},
    "passes of an iterable": lambda: {"dataset": Passes(), "batch_size": 1},
    "batches of an iterable": lambda: {"dataset": data_sets.Stream(7), "batch_size": None},
    "uneven": lambda: {"dataset": data_sets.UnevenStream(), "batch_size": 4},
    "all at once": lambda: {"dataset": data_sets.ManyAtOnceDataset(7)},
    "shrunk data set": lambda: {"sampler": shrunk(), "batch_size": 1},
    "counts next to a module": lambda: {"dataset": Counts()},
    "worker_init": lambda: {
        "dataset": data_sets.NoisyDataset(7), "worker_init_fn": data_sets.drawing_worker_init
    },
}  # fmt: skip
WORKERS: tuple[dict[str, Any], ...] = (
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2},
    {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 3},
    {"num_workers": 1},
)
FAST = ("shuffled", "no batching", "drawn one by one", "objects", "iterable", "uneven", "all at once", "worker_init")
NOT_PLAIN = ("per_sample", "subclass")


def of_row(row: str, **more: Any) -> ResumableDataLoader[Any]:
    """Return the loader of a row."""
    arguments = {"dataset": Drawing(9), **ROWS[row](), **more}
    if "batch_sampler" not in arguments:
        arguments.setdefault("batch_size", 2)
    return (NegativeResumable if row == "subclass" else ResumableDataLoader)(**arguments)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", ROWS)
def test_every_position_resumes_exactly(row: str, every: int) -> None:
    """Before the first iteration and after each batch, including the last ones, with states that JSON holds.

    In a quick run, each row has every fifth position, and all rows together have all.
    """
    first = [*ROWS].index(row) % every
    assert_resumable(partial(of_row, row), cuts=slice(first, None, every), is_plain=row not in NOT_PLAIN)


@pytest.mark.parametrize(
    ("row", "workers"),
    [
        pytest.param(row, workers, marks=() if row in FAST and FAST.index(row) % 4 == k else pytest.mark.slow)
        for row in ROWS
        for k, workers in enumerate(WORKERS)
        if (row, workers["num_workers"]) != ("uneven", 3)  # its samples are those of two workers
    ],
    ids=str,
)
def test_positions_resume_exactly_with_workers(row: str, workers: dict[str, Any]) -> None:
    """The draws of the workers continue too, whether they live for one epoch or for all."""
    cuts = slice(1 + [*ROWS].index(row) % 5, None, 9)
    assert_resumable(partial(of_row, row, **workers), cuts=cuts, is_plain=row not in NOT_PLAIN)


@pytest.mark.slow
def test_spawned_workers_resume_exactly() -> None:
    """Spawned workers get their state and setup by pickle, and continue exactly."""
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    assert_resumable(partial(of_row, "shuffled", **spawned), cuts=slice(1, None, 5))


OTHERS: dict[str, Callable[[], Any]] = {
    "few": lambda: (random.random(), torch.rand(3)),
    "many": lambda: (torch.rand(20_000), np.random.rand(700), [random.random() for _ in range(1_000)]),
    "Gaussians": lambda: (torch.randn(3), np.random.randn(3), random.gauss(0, 1)),
    "seeded": lambda: (seed(5), torch.rand(700)),
    "torch seeded": lambda: (torch.manual_seed(torch.initial_seed() + 1), torch.rand(700))[1],
}


@pytest.mark.parametrize("others", OTHERS)
def test_sampler_that_draws_as_it_goes_continues_exactly(others: str) -> None:
    """The rest is the same although the sampler draws between batches and remembers its draws, and others draw too."""
    assert_resumable(
        lambda: ResumableDataLoader(Echo(), None, sampler=DrawsAll()),
        num_epochs=1,
        cuts=slice(5 + 5 * [*OTHERS].index(others), None, 25),
        draw=lambda: repr(OTHERS[others]()),
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


def counted_loop(loader: Any, epoch: int, *, counts: bool) -> Iterator[Any]:
    """Yield the batches of an epoch of the sampler, which the loop may count in the sampler."""
    with loader.sampler.in_epoch(epoch):
        for batch in loader:
            if counts:
                loader.sampler.advance(len(batch))
            yield batch


def ended_loop(loader: Any, epoch: int) -> Iterator[Any]:
    """Yield two batches, and end the epoch."""
    for k, batch in enumerate(loader):
        if k == 1:
            loader.end_epoch()
        yield batch


# The row, arguments of the loader, and a loop over an epoch.
LOOPS: dict[str, tuple[str, dict[str, Any], Callable[[Any, int], Iterator[Any]]]] = {
    "told by in_epoch": ("sampler of ours", {}, partial(counted_loop, counts=False)),
    "told, and counted in the sampler": ("sampler of ours", {}, partial(counted_loop, counts=True)),
    "ended": ("shuffled", {}, ended_loop),
    "ended, with workers": ("shuffled", WORKERS[0], ended_loop),
    "never asked for its end": ("shuffled", {}, lambda loader, epoch: islice(loader, 5)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_resumes_exactly(name: str) -> None:
    """The epochs of a sampler of ours continue with the loader's; an epoch may be ended early, or left at its end."""
    row, arguments, epoch_of = LOOPS[name]
    make = partial(of_row, row, **arguments)
    assert_resumable(make, epoch_of=epoch_of, num_epochs=3, cuts=slice(3, None, 3), is_plain=False)


@pytest.mark.parametrize("row", ["shuffled", "drawn at its start"])
def test_a_state_before_the_first_batch_of_an_iteration_has_all_its_batches(row: str) -> None:
    """A state taken between ``iter`` and the first ``next``, here or after a resume, begins with batch 0."""
    seed(1)
    loader = of_row(row)
    batches = iter(loader)
    state = loader.state_dict()
    reference = [(listed(batch), *own_draws()) for batch in batches]
    for _ in range(2):
        seed(2)
        resumed = of_row(row)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        random.random()
        state = resumed.state_dict()
        assert [(listed(batch), *own_draws()) for batch in batches] == reference


def test_a_loop_left_by_break_continues_after_its_last_batch() -> None:
    """A state taken after the loop, as for a stop, has the rest of the epoch."""
    seed(1)
    whole = [listed(batch) for batch in small()]
    seed(1)
    loader = small()
    for k, _ in enumerate(loader):
        if k == 2:
            break
    resumed = small()
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.epoch, [listed(batch) for batch in resumed]) == (0, whole[3:])
    assert resumed.epoch == 1


def test_epochs_that_are_left_and_not_saved_there_are_as_with_any_loader() -> None:
    """Without a state at the place of the break, the next iteration is the next epoch."""
    seed(1)
    plain = DataLoader(Drawing(5), batch_size=1, shuffle=True)
    reference = [listed(next(iter(plain))) for _ in range(3)]
    seed(1)
    loader = small()
    assert [listed(next(iter(loader))) for _ in range(3)] == reference
    assert loader.epoch == 2


def test_a_copy_has_the_state_that_was_loaded() -> None:
    """A copy of a loader that has not begun continues where the loader would; its state is its own."""
    state, rest = begun(small())
    original = small(state=state)
    duplicate = copy.copy(original)
    assert [listed(batch) for batch in duplicate] == rest
    assert duplicate.state_dict()["epoch"] == 1
    assert original.state_dict()["epoch"] == 0


def test_a_sampler_whose_loader_was_given_a_state_can_be_pickled() -> None:
    """It then receives its epochs itself, and the original sampler doesn't."""
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0)
    loader = ResumableDataLoader(list(range(6)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    loader.load_state_dict(loader.state_dict())
    for again in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        again.set_epoch(3)
        assert (again.epoch, sampler.epoch) == (3, 0)


def test_what_is_set_after_a_load_takes_effect() -> None:
    """An attribute that is set between a load and the first iteration takes effect, and the place stays loaded."""
    state, rest = begun(small())
    resumed = small(state=state)
    resumed.collate_fn = lambda samples: torch.stack(samples)[:, :1]
    assert [listed(batch) for batch in resumed] == [[sample[:1] for sample in batch] for batch in rest]


def test_state_does_not_wait_for_a_batch_that_failed() -> None:
    """A worker that could not fetch what it was given leaves no state: that is said at once."""
    loader = ResumableDataLoader([0, 1], None, sampler=[0, 1, 6, 6], **WORKERS[0])  # type: ignore[arg-type]
    next(iter(loader))
    loader.end_epoch()
    with pytest.raises(NotExactError, match="no state after 2 batches"):
        loader.state_dict()


# Under Fabric, which wraps loaders, rebuilds them for a sampler, and counts epochs from 0.


def test_fabric_saves_and_loads_it(tmp_path: Path) -> None:
    """`fabric.save` and `fabric.load` treat it as an object with a state."""
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(of_row("shuffled"))
    next(batches := iter(loader))
    fabric.save(tmp_path / "state.ckpt", {"loader": loader})
    rest = [listed(batch) for batch in batches]
    resumed = fabric.setup_dataloaders(of_row("shuffled"))
    fabric.load(tmp_path / "state.ckpt", {"loader": resumed})
    assert [listed(batch) for batch in resumed] == rest


def on_two_ranks(directory: Path, rank: int) -> None:
    """Run all cases on one of two ranks."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()

    def wrapped() -> Any:
        return fabric.setup_dataloaders(of_row("shuffled"))

    assert_resumable(wrapped, cuts=slice(2, None, 5), is_plain=False)
    seed(1)
    saved: list[Any] = []
    loader = wrapped()
    assert isinstance(loader.sampler, DistributedSampler)
    reference = resumable_loop(loader, num_epochs=2, saved=saved)
    position, state = saved[2]
    # A state that is loaded before Fabric rebuilds the loader is not lost.
    seed(51)
    early = of_row("shuffled")
    early.load_state_dict(state)
    assert resumable_loop(fabric.setup_dataloaders(early), num_epochs=2) == reference[position:]
    # If Fabric does not put in its sampler after all, the beginning of the iteration reports it.
    early = of_row("shuffled")
    early.load_state_dict(state)
    with pytest.raises(FingerprintMismatchError, match=r"over DistributedSampler' then, '.* over RandomSampler' now"):
        iter(early)
    states = [None, None]
    torch.distributed.all_gather_object(states, state)
    with pytest.raises(FingerprintMismatchError, match=rf"rank {1 - rank} then, {rank} now"):
        loader.load_state_dict(states[1 - rank])
    (directory / str(rank)).write_text(str([event[1] for event in reference]))


def test_each_of_two_ranks_resumes_from_its_own_state(tmp_path: Path) -> None:
    """With Fabric's sampler, loaded before or after it is put in; the state of the other rank is refused."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    codes = run_ranks(lambda rank: on_two_ranks(tmp_path, rank), outputs=outputs, seed=1)
    assert codes == [0, 0], [output.read_text() for output in outputs]
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert texts[0] != texts[1]


# As torchdata's StatefulDataLoader.


def epoch_events(loader: ResumableDataLoader[Any]) -> list[Any]:
    """Return the events of a loop over one epoch."""
    return [(listed(batch), *own_draws()) for batch in loader]


@pytest.mark.parametrize("arguments", [{}, {"worker_rng": "per_sample", "seed": 3}])
def test_a_first_state_starts_over_with_living_workers(arguments: dict[str, Any]) -> None:
    """A state from before the first iteration continues with other workers than those that have drawn since."""
    seed(1)
    loader = small(num_workers=2, persistent_workers=True, **arguments)
    state = loader.state_dict()
    reference = epoch_events(loader)
    loader.load_state_dict(state)
    assert epoch_events(loader) == reference


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_an_iterator_that_was_left_is_not_in_the_way_of_a_state(arguments: dict[str, Any]) -> None:
    """A state is loaded while an old iterator exists; the old iterator's next raises, and the loop is exact."""
    seed(1)
    loader = small(**arguments)
    left = iter(loader)
    next(left)
    state = loader.state_dict()
    draws = own_draws()
    next(left)
    loader.load_state_dict(state)
    with pytest.raises(NotExactError):
        next(left)
    other = small(**arguments)
    other.load_state_dict(state)
    reference = (own_draws(), epoch_events(other))
    loader.load_state_dict(state)
    assert (own_draws(), epoch_events(loader)) == reference
    assert reference[0] == draws
    with pytest.raises(NotExactError):
        next(left)


def test_the_iterator_has_what_torchs_has() -> None:
    """Workers are found where torch has them, and an attribute that torch's iterator lacks is lacking."""
    batches = iter(small(num_workers=2))
    assert [worker.is_alive() for worker in batches._workers] == [True, True]
    assert not hasattr(batches, "nothing_of_that_name")
    assert not hasattr(iter(small()), "_workers")


class TooLong(data_sets.Stream):
    def __len__(self) -> int:
        return 2


def test_torch_warns_of_more_samples_than_the_length() -> None:
    """As with torch's loader, the warning comes once the length was used, not before."""
    loader = ResumableDataLoader(TooLong(4), batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(iter(loader))) == 4
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len([batch for batch in loader]) == 4  # noqa: C416 - list() would use the length


def test_what_json_lacks_comes_back() -> None:
    """Tensors, tuples, bytes, numbers as keys, and dicts that look like their replacements come back."""
    tensors = [torch.tensor(2.5, dtype=torch.bfloat16), torch.arange(6).reshape(2, 3).t(), torch.empty(0, 3)]
    for value in ({"<tensor>": 1}, {"blob": 2}, {1: "a", "1": "b"}, (1, (2, [3])), b"bytes", *tensors):
        [back] = from_json(json.loads(json.dumps(to_json({"value": value})))).values()
        assert (type(back), str(back)) == (type(value), str(value))
        if isinstance(value, torch.Tensor):
            assert (back.dtype, back.shape) == (value.dtype, value.shape)

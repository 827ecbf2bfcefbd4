"""The law of ResumableDataLoader, in a plain loop: wherever it is cut, the rest is that of the uninterrupted run."""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from lightning_faulttolerant import FingerprintMismatchError, InterruptibleSampler, NotExactError, ResumableDataLoader
from tests.loader.loops import Drawing, listed, own_draws, seed
from tests.loader.resumed_loops import Event, Make, assert_resumes, run, safe


class Stream(IterableDataset[float]):
    """Records which worker yielded which sample, and draws for it; the workers' parts differ in length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, step = (0, 1) if info is None else (info.id, info.num_workers)
        order = torch.randperm(self.length).tolist()
        for k in range(worker, self.length, step):
            yield torch.tensor([float(k), order[k], self.rng.random(), random.gauss(0, 1), torch.rand(()).item()])


class OwnIterator(IterableDataset[float]):
    """Is its own iterator, and begins again at each call of `iter`."""

    def __iter__(self) -> Iterator[Any]:
        self.place = 0
        return self

    def __next__(self) -> Any:
        if self.place == 7:
            raise StopIteration
        self.place += 1
        return torch.tensor([float(self.place), torch.rand(()).item()])


def generator(number: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(number)


MAPS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"dataset": Drawing(7), "batch_size": 2, "shuffle": True},
    "last dropped": lambda: {"dataset": Drawing(7), "batch_size": 2, "shuffle": True, "drop_last": True},
    "generator": lambda: {"dataset": Drawing(7), "batch_size": 2, "shuffle": True, "generator": generator(3)},
    "batch sampler": lambda: {
        "dataset": Drawing(7),
        "batch_sampler": BatchSampler(RandomSampler(range(7)), 3, drop_last=False),
    },
    "no batching": lambda: {"dataset": Drawing(5), "batch_size": None, "sampler": RandomSampler(range(5))},
    "distributed": lambda: {
        "dataset": Drawing(9),
        "batch_size": 2,
        "sampler": DistributedSampler(range(9), num_replicas=2, rank=1, seed=5),
    },
    "iterable": lambda: {"dataset": Stream(7), "batch_size": 2},
    "its own iterator": lambda: {"dataset": OwnIterator(), "batch_size": 2},
    "sampler of ours": lambda: {"dataset": Drawing(7), "batch_size": 2, "sampler": InterruptibleSampler(7)},
}


@pytest.mark.parametrize("kind", MAPS)
def test_every_position_resumes_exactly(kind: str) -> None:
    """This holds in each of three epochs, before the first iteration and after each batch, including the last ones."""
    assert_resumes(lambda: ResumableDataLoader(**MAPS[kind]()))


WORKERS = {
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("kind", ["shuffled", "iterable"])
@pytest.mark.parametrize("workers", WORKERS)
def test_every_position_resumes_exactly_with_workers(kind: str, workers: str) -> None:
    """The draws of the workers continue too, whether they live for one epoch or for all."""
    assert_resumes(lambda: ResumableDataLoader(**MAPS[kind](), **WORKERS[workers]), num_epochs=2, every=2)


def test_samples_seeded_one_by_one_resume_with_another_number_of_workers() -> None:
    """With worker_rng="per_sample" the draws of the samples continue alike with 0 workers and with 2."""

    def make(num_workers: int) -> ResumableDataLoader[Any]:
        data = TensorDataset(torch.arange(9.0))
        return ResumableDataLoader(
            data, batch_size=2, shuffle=True, num_workers=num_workers, worker_rng="per_sample", seed=5, collate_fn=drawn
        )

    seed(1)
    saved: dict[int, Any] = {}
    reference = run(make(0), num_epochs=2, saved=saved)
    for position, num_workers in ((2, 2), (5, 0), (7, 2)):
        seed(position)
        loader = make(num_workers)
        loader.load_state_dict(saved[position])
        assert run(loader, num_epochs=2) == reference[position:]


def drawn(samples: list[Any]) -> Any:
    """Return a batch with a random number."""
    return torch.tensor([[x.item() for (x,) in samples], [torch.rand(()).item()] * len(samples)])


def test_a_resumed_run_is_resumed_again() -> None:
    """States of a run that was itself resumed in the middle of a round of workers are as good as the first ones."""

    def make() -> ResumableDataLoader[Any]:
        return ResumableDataLoader(Drawing(8), batch_size=1, shuffle=True, num_workers=2)

    seed(1)
    saved: dict[int, Any] = {}
    reference = run(make(), num_epochs=2, saved=saved)
    first, again = make(), {}
    first.load_state_dict(saved[3])
    assert run(first, num_epochs=2, saved=again) == reference[3:]
    second = make()
    second.load_state_dict(again[4])
    assert run(second, num_epochs=2) == reference[7:]


def small(**arguments: Any) -> ResumableDataLoader[Any]:
    """Return a loader of 5 batches."""
    return ResumableDataLoader(Drawing(5), batch_size=1, shuffle=True, **arguments)


def test_a_state_before_the_first_batch_of_an_iteration_has_all_its_batches() -> None:
    """A state taken between ``iter`` and the first ``next``, here or after a resume, begins with batch 0."""
    seed(1)
    loader = small()
    batches = iter(loader)
    state = loader.state_dict()
    reference = [(listed(batch), *own_draws()) for batch in batches]
    for _ in range(2):
        seed(2)
        resumed = small()
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


def test_an_epoch_that_is_cut_short_on_purpose_is_ended() -> None:
    """After `end_epoch` the loop ends, and a state begins the next epoch; a cut epoch without it is refused."""

    def epochs(loader: ResumableDataLoader[Any], saved: list[Any]) -> list[Event]:
        events = []
        for epoch in range(loader.epoch, 3):
            for k, batch in enumerate(loader):
                events.append((epoch, listed(batch), *own_draws()))
                if k == 1:
                    loader.end_epoch()
            saved.append(safe(loader.state_dict()))
        return events

    for arguments in ({}, {"num_workers": 2, "persistent_workers": True}):
        seed(1)
        saved: list[Any] = []
        reference = epochs(small(**arguments), saved)
        assert len(reference) == 6
        resumed = small(**arguments)
        resumed.load_state_dict(saved[0])
        assert epochs(resumed, []) == reference[2:]
    loader = small()
    with pytest.raises(NotExactError, match="no epoch was in progress"):
        loader.end_epoch()
    next(iter(loader))
    loader.state_dict()
    with pytest.raises(NotExactError, match="after batch 1 of epoch 0"):
        iter(loader)


def test_a_loop_that_asks_for_so_many_batches_resumes_exactly() -> None:
    """An iterator that yields all its batches, but is never asked for its end, leaves no epoch unfinished."""

    def epochs(loader: ResumableDataLoader[Any], saved: list[Any], first: int = 0) -> list[Event]:
        events: list[Event] = []
        for epoch in range(loader.epoch, 3):
            batches = iter(loader)
            for k in range(first, 5):
                events.append((epoch, k, listed(next(batches)), *own_draws()))
                saved.append(safe(loader.state_dict()))
            first = 0
        return events

    seed(1)
    saved: list[Any] = []
    reference = epochs(small(), saved)
    for num_done in (3, 5, 15):
        loader = small()
        loader.load_state_dict(saved[num_done - 1])
        assert epochs(loader, [], first=(num_done - 1) % 5 + 1) == reference[num_done:]


def test_epochs_that_are_left_and_not_saved_there_are_as_with_any_loader() -> None:
    """Without a state at the place of the break, the next iteration is the next epoch."""
    seed(1)
    plain = DataLoader(Drawing(5), batch_size=1, shuffle=True)
    reference = [listed(next(iter(plain))) for _ in range(3)]
    seed(1)
    loader = small()
    assert [listed(next(iter(loader))) for _ in range(3)] == reference
    assert loader.epoch == 2


def test_what_cant_be_exact_is_refused() -> None:
    """A state of two concurrent iterations is refused, and a loader that can't be followed isn't created."""
    loader = small()
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    other = iter(loader)
    next(other)
    next(batches)
    with pytest.raises(NotExactError, match="in progress"):
        loader.state_dict()
    with pytest.raises(ValueError, match=r"collate_fn .* was set after its first iteration"):
        loader.collate_fn = drawn
    with pytest.raises(NotExactError, match="in_order"):
        small(in_order=False, num_workers=2)
    with pytest.raises(NotExactError, match="per_sample"):
        ResumableDataLoader(Stream(3), worker_rng="per_sample")
    with pytest.raises(ValueError, match="worker_rng"):
        small(worker_rng="none")  # type: ignore[arg-type]
    with pytest.raises(NotExactError, match="version"):
        small().load_state_dict({**state, "version": 99})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: small(num_workers=2), "number of workers 0 then, 2 now"),
        (lambda: ResumableDataLoader(Drawing(6), batch_size=1, shuffle=True), "number of samples 5 then, 6 now"),
        (lambda: ResumableDataLoader(Drawing(5), batch_size=2, shuffle=True), "batch size 1 then, 2 now"),
        (lambda: small(drop_last=True), "drop_last False then, True now"),
        (
            lambda: ResumableDataLoader(Drawing(5), batch_size=1),
            "sampler '.* over RandomSampler' then, '.* over SequentialSampler' now",
        ),
        (lambda: small(worker_rng="per_sample"), "worker_rng 'capture' then, 'per_sample' now"),
    ],
)
def test_the_state_of_another_loader_is_refused(other: Make, message: str) -> None:
    """Another length, batch size, `drop_last`, sampler, number of workers or mode is named, with both values."""
    loader = small()
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    for state in (*states[:2], loader.state_dict()):  # before, in and after the epoch
        with pytest.raises(FingerprintMismatchError, match=message):
            other().load_state_dict(state)


def test_a_state_that_does_not_name_its_sampler_is_loaded() -> None:
    """States from before samplers were compared continue."""
    seed(1)
    loader = small()
    next(batches := iter(loader))
    state = loader.state_dict()
    rest = [listed(batch) for batch in batches]
    del state["fingerprint"]["sampler"]
    assert [listed(batch) for batch in small(state=state)] == rest


@pytest.mark.parametrize(
    ("state", "message"), [({}, r"it has \[\]"), ({"dataloader": 1}, r"it has \['dataloader'\]"), (None, "it is None")]
)
def test_what_is_no_state_is_refused(state: Any, message: str) -> None:
    """An empty state, one of another kind, and None are each refused by what they are."""
    with pytest.raises(ValueError, match=f"This is not a state of a ResumableDataLoader: {message}"):
        small().load_state_dict(state)


def test_a_copy_has_the_state_that_was_loaded() -> None:
    """A copy of a loader that has not begun continues where the loader would; its state is its own."""
    seed(1)
    loader = small()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [listed(batch) for batch in batches]
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
    seed(1)
    loader = small()
    next(batches := iter(loader))
    state = loader.state_dict()
    rest = [batch[0, 0].item() for batch in batches]
    resumed = small(state=state)
    resumed.collate_fn = lambda samples: torch.stack(samples)[:, :1]
    assert [listed(batch) for batch in resumed] == [[[index]] for index in rest]


@pytest.mark.parametrize("counts", [False, True])
def test_a_sampler_that_is_told_by_in_epoch_continues(counts: bool) -> None:
    """The sampler's own epochs and the loader's continue together, even if the loop counts in the sampler."""

    def epochs(loader: ResumableDataLoader[Any], saved: list[Any]) -> list[Event]:
        events: list[Event] = []
        for epoch in range(loader.epoch, 3):
            with loader.sampler.in_epoch(epoch):  # type: ignore[attr-defined]
                for batch in loader:
                    events.append((epoch, listed(batch), *own_draws()))
                    if counts:
                        loader.sampler.advance(len(batch))  # type: ignore[attr-defined]
                    saved.append((len(events), safe(loader.state_dict())))
            saved.append((len(events), safe(loader.state_dict())))
        return events

    def made() -> ResumableDataLoader[Any]:
        return ResumableDataLoader(Drawing(7), batch_size=2, sampler=InterruptibleSampler(7))

    seed(1)
    saved: list[Any] = []
    reference = epochs(made(), saved)
    for number, (done, state) in enumerate(saved):
        seed(100)
        loader = made()
        loader.load_state_dict(state)
        assert epochs(loader, []) == reference[done:], f"state {number}"


class Doubling(ResumableDataLoader[Any]):
    """Changes the batches, as subclasses of DataLoader do."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 2


def test_subclasses_resume() -> None:
    """A subclass that changes the batches in its ``__iter__`` yields the right ones after a resume."""
    seed(1)
    loader = Doubling(Drawing(5), batch_size=2, shuffle=True)
    next(batches := iter(loader))
    state = loader.state_dict()
    rest = [listed(batch) for batch in batches]
    resumed = Doubling(Drawing(5), batch_size=2, shuffle=True)
    resumed.load_state_dict(state)
    assert [listed(batch) for batch in resumed] == rest
    assert len(resumed) == 3


class Slow(Dataset[float]):
    """Loads one sample in 6 seconds, and can't load another one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        if index == 6:
            raise OSError("a broken file")
        time.sleep(6 * (index == 2))
        return random.random()


class SlowStream(IterableDataset[float]):
    """Loads its second sample in 6 seconds."""

    def __iter__(self) -> Iterator[float]:
        for k in range(5):
            time.sleep(6 * (k == 1))
            yield random.random()


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Slow(), SlowStream()], ids=["map-style", "iterable"])
def test_state_waits_for_a_slow_worker(dataset: Any) -> None:
    """A state that needs what persistent workers still fetch waits for it, however long that takes."""
    states, rests = [], []
    for _ in range(2):
        loader = ResumableDataLoader(
            dataset, num_workers=2, batch_size=None, prefetch_factor=1, persistent_workers=True
        )
        seed(1)
        if states:
            loader.load_state_dict(states[0])
        else:
            next(iter(loader))
            loader.end_epoch()
            states.append(loader.state_dict())
        rests.append([float(next(batches)) for batches in [iter(loader)] for _ in range(4)])
    assert rests[0] == rests[1]


@pytest.mark.slow
def test_state_does_not_wait_for_a_batch_that_failed() -> None:
    """A worker that could not fetch what it was given leaves no state: that is said at once."""
    loader = ResumableDataLoader(
        Slow(), sampler=[0, 1, 6, 6], num_workers=2, batch_size=None, prefetch_factor=2, persistent_workers=True
    )
    next(iter(loader))
    loader.end_epoch()
    with pytest.raises(NotExactError, match="no state after 2 batches"):
        loader.state_dict()

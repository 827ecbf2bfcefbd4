"""The law of the loader, in a plain loop: wherever it is cut, the rest is that of the uninterrupted run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import why_not_exact
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from tests.loader.loops import Drawing, after, full_state, listed, loop, safe, seed, tracked_loop

# Three workers on a machine with two cores, as on a small test machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")

WORKERS = {
    "no workers": {},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "3 workers": {"num_workers": 3, "prefetch_factor": 1},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
    "3 persistent workers": {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 3},
}


@pytest.mark.parametrize(
    "workers", [pytest.param(name, marks=[pytest.mark.slow] if name[0] == "3" else []) for name in WORKERS]
)
def test_every_cut_resumes_exactly(workers: str) -> None:
    """Before each batch of two epochs, and at their ends, a resume there continues as the uninterrupted run.

    The next epochs and the main process's own draws are included. Reading the state at every position changes
    nothing.
    """
    make = partial(DataLoader, batch_size=2, shuffle=True, **WORKERS[workers])
    seed(1)
    reference = loop(make(Drawing(7)), num_epochs=3)
    seed(1)
    events, saved = tracked_loop(make(Drawing(7)), num_epochs=2, save=True)
    assert events == [event for event in reference if event[0] < 2]
    assert len(saved) == 2 * 5
    for number, cut in enumerate(saved):
        seed(100 + number)
        resumed, _ = tracked_loop(make(Drawing(7)), num_epochs=3, resume=cut)
        assert resumed == after(reference, cut), f"cut before batch {cut.batch} of epoch {cut.epoch}"


@pytest.mark.parametrize("workers", ["2 workers", "3 persistent workers"])
def test_resumed_run_is_cut_again(workers: str) -> None:
    """A run that was resumed in the middle of a round of workers is saved and resumed again at each later position."""
    make = partial(DataLoader, batch_size=1, shuffle=True, **WORKERS[workers])
    seed(1)
    reference = loop(make(Drawing(8)), num_epochs=2)
    seed(1)
    _, saved = tracked_loop(make(Drawing(8)), num_epochs=1, save=True)
    seed(2)
    resumed, again = tracked_loop(make(Drawing(8)), num_epochs=1, resume=saved[4], save=True)
    assert resumed == after(reference[:8], saved[4])
    for cut in again[::2]:
        seed(3)
        twice, _ = tracked_loop(make(Drawing(8)), num_epochs=2, resume=cut)
        assert twice == after(reference, cut), f"cut again before batch {cut.batch}"


def generator(number: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(number)


SAMPLERS: dict[str, Callable[[Dataset[Any], int], dict[str, Any]]] = {
    "in order": lambda data, size: {"batch_size": size},
    "shuffled": lambda data, size: {"batch_size": size, "shuffle": True},
    "shuffled, last dropped": lambda data, size: {"batch_size": size, "shuffle": True, "drop_last": True},
    "generator of the loader": lambda data, size: {"batch_size": size, "shuffle": True, "generator": generator(3)},
    "generator of the sampler": lambda data, size: {
        "batch_size": size,
        "sampler": RandomSampler(data, generator=generator(4)),
    },
    "with replacement": lambda data, size: {
        "batch_size": size,
        "sampler": RandomSampler(data, replacement=True, num_samples=11),
    },
    "subset": lambda data, size: {"batch_size": size, "sampler": SubsetRandomSampler([0, 0, 1, 1, 0])},
    "weighted": lambda data, size: {"batch_size": size, "sampler": WeightedRandomSampler([0.5, 0.5], 9)},
    "batch sampler": lambda data, size: {"batch_sampler": BatchSampler(RandomSampler(data), size, drop_last=False)},
    "list of batches": lambda data, size: {"batch_sampler": [[0], [1, 0], [1]]},
    "no batching": lambda data, size: {"batch_size": None, "shuffle": True},
    "distributed": lambda data, size: {
        "batch_size": size,
        "sampler": DistributedSampler(data, num_replicas=2, rank=1, seed=5),
    },
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(2, 12), batch_size=st.integers(1, 5), number=st.integers(0, 1000), place=st.floats(0, 1))
def test_every_sampler_resumes_exactly(sampler: str, length: int, batch_size: int, number: int, place: float) -> None:
    """Any sampler of torch's, any length and batch size, any cut: the rest is that of the uninterrupted run."""

    def make() -> DataLoader[Any]:
        data = Drawing(length)
        return DataLoader(data, **SAMPLERS[sampler](data, batch_size))

    seed(number)
    reference = loop(make(), num_epochs=3)
    seed(number)
    events, saved = tracked_loop(make(), num_epochs=3, save=True)
    assert events == reference
    cut = saved[min(int(place * len(saved)), len(saved) - 1)]
    seed(number + 1)
    resumed, _ = tracked_loop(make(), num_epochs=3, resume=cut)
    assert resumed == after(reference, cut)


@pytest.mark.parametrize("sampler", ["generator of the loader", "with replacement", "no batching", "distributed"])
def test_samplers_resume_with_workers(sampler: str) -> None:
    """The same holds with workers, which fetch ahead of the consumed batches."""

    def make() -> DataLoader[Any]:
        data = Drawing(9)
        return DataLoader(data, num_workers=2, **SAMPLERS[sampler](data, 2))

    seed(1)
    reference = loop(make(), num_epochs=2)
    seed(1)
    events, saved = tracked_loop(make(), num_epochs=2, save=True)
    assert events == reference
    for cut in saved[1:6:2]:
        seed(2)
        resumed, _ = tracked_loop(make(), num_epochs=2, resume=cut)
        assert resumed == after(reference, cut)


@pytest.mark.parametrize("workers", ["no workers", "2 workers", "2 persistent workers"])
def test_resumes_between_two_epochs(workers: str) -> None:
    """If a loader is saved between iterations, as a validation loader is, it resumes with the iteration that is due."""
    make = partial(DataLoader, batch_size=2, shuffle=True, **WORKERS[workers])
    seed(1)
    reference = loop(make(Drawing(6)), num_epochs=3)
    seed(1)
    loader = make(Drawing(6))
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    loop(tracked, num_epochs=1)
    state = safe(full_state(tracker, None))
    for number in (2, 3):
        seed(number)
        fresh = make(Drawing(6))
        again = TrackedLoader(fresh)
        copy = again.copy_of(fresh)
        again.load_state_dict(state["loader"])
        events = _loop_from_epoch_1(again, copy, state)
        assert events == [event for event in reference if event[0] >= 1]


def _loop_from_epoch_1(tracker: TrackedLoader, tracked: DataLoader[Any], state: dict[str, Any]) -> list[Any]:
    set_rng_state(state["rng"])
    tracker.held.load_state_dict(state["held"])
    return [(epoch + 1, *event) for epoch in range(2) for _, *event in loop(tracked, num_epochs=1)]


@pytest.mark.parametrize("workers", ["2 workers", "2 persistent workers"])
def test_epoch_that_was_left_early_is_no_obstacle(workers: str) -> None:
    """After an epoch that was broken off with batches in flight, the next one is saved and resumed exactly."""
    make = partial(DataLoader, batch_size=1, shuffle=True, **WORKERS[workers])

    def run(loader: DataLoader[Any]) -> tuple[list[Any], Iterator[Any]]:
        seed(1)
        for k, _ in enumerate(loader):
            if k == 2:
                break
        iterator = iter(loader)
        return [listed(next(iterator)) for _ in range(3)], iterator

    expected, iterator = run(make(Drawing(9)))
    rest = [listed(batch) for batch in iterator]
    loader = make(Drawing(9))
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    assert run(tracked)[0] == expected
    state = safe(full_state(tracker, 3))
    seed(2)
    fresh = make(Drawing(9))
    again = TrackedLoader(fresh)
    copy = again.copy_of(fresh)
    again.load_state_dict(state["loader"])
    assert [listed(batch) for batch in copy] == rest


@pytest.mark.parametrize("workers", ["no workers", "2 workers", "2 persistent workers"])
def test_loaded_state_is_the_state(workers: str) -> None:
    """Before the first iteration, and after it has begun, the state is the one that was loaded."""
    make = partial(DataLoader, batch_size=2, shuffle=True, **WORKERS[workers])
    seed(1)
    _, saved = tracked_loop(make(Drawing(8)), num_epochs=1, save=True)
    state = safe(saved[2].state)["loader"]
    loader = make(Drawing(8))
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    tracker.load_state_dict(state)
    assert tracker.state_dict(None) == state
    iterator = iter(tracked)
    assert tracker.state_dict(2)["workers"] == state["workers"]
    assert tracker.state_dict(2)["record"]["first"] == state["record"]["first"]
    del iterator


def test_loader_with_living_workers_is_set_back() -> None:
    """A loader whose persistent workers wait for the next epoch gets new workers for a loaded state."""
    loader = DataLoader(Drawing(8), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    seed(1)
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    iterator = iter(tracked)
    next(iterator)
    state = safe(tracker.state_dict(1))
    rest = [listed(batch) for batch in iterator]
    tracker.load_state_dict(state)
    assert [listed(batch) for batch in tracked] == rest


def test_state_is_a_copy() -> None:
    """Continuing, or changing the returned state, changes neither state nor tracker."""
    loader = DataLoader(Drawing(8), batch_size=2, shuffle=True)
    tracker = TrackedLoader(loader)
    iterator = iter(tracker.copy_of(loader))
    next(iterator)
    state = tracker.state_dict(1)
    copy = safe(state)
    next(iterator)
    assert state == copy
    fresh = TrackedLoader(loader)
    kept = fresh.copy_of(loader)
    fresh.load_state_dict(state)
    fresh.state_dict(None)["consumed"] = 5
    assert fresh.state_dict(None) == copy
    del kept


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_leaves_the_generators_as_they_were(num_workers: int) -> None:
    """Continuing in an epoch neither draws from the main process's generators nor moves them."""
    make = partial(DataLoader, batch_size=2, shuffle=True, num_workers=num_workers)
    seed(1)
    _, saved = tracked_loop(make(Drawing(8)), num_epochs=1, save=True)
    seed(2)
    loader = make(Drawing(8))
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    tracker.load_state_dict(saved[3].state["loader"])
    before = rng_state()
    iterator = iter(tracked)
    assert rng_state() == before
    del iterator


class Named(DataLoader[Any]):
    """A user's loader that changes each batch and counts its iterations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_iterations = 0

    def __iter__(self) -> Any:
        self.num_iterations += 1
        for batch in super().__iter__():
            yield -batch


@pytest.mark.parametrize("workers", ["no workers", "2 workers"])
def test_loader_of_the_users_own_class_resumes_exactly(workers: str) -> None:
    """The user's class still changes each batch, before and after, even if its `__iter__` is a generator."""
    make = partial(Named, batch_size=2, shuffle=True, **WORKERS[workers])
    seed(1)
    reference = loop(make(Drawing(7)), num_epochs=2)
    seed(1)
    events, saved = tracked_loop(make(Drawing(7)), num_epochs=2, save=True)
    assert events == reference
    seed(2)
    for cut in (saved[1], saved[4], saved[7]):
        loader = make(Drawing(7))
        tracker = TrackedLoader(loader)
        tracked = tracker.copy_of(loader)
        state = safe(cut.state)
        tracker.load_state_dict(state["loader"])
        found = [listed(batch)[0][0] for batch in tracked]
        assert found == [event[2][0][0] for event in after(reference, cut) if event[0] == cut.epoch]


@pytest.mark.parametrize("workers", ["no workers", "2 persistent workers"])
@pytest.mark.parametrize("kind", [DataLoader, Named])
def test_copy_is_of_the_users_class_and_the_loader_unchanged(kind: type[DataLoader[Any]], workers: str) -> None:
    """The copy has the user's class; the user's loader keeps all attributes, except those that it counts itself."""
    loader = kind(Drawing(6), batch_size=2, shuffle=True, generator=generator(0), **WORKERS[workers])
    before, state = dict(vars(loader)), loader.generator.get_state()
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    assert isinstance(tracked, kind)
    assert (type(tracked).__name__, type(tracked).__module__) == (kind.__name__, kind.__module__)
    assert tracked.dataset is loader.dataset
    assert (len(tracked), tracked.batch_size, tracked.sampler) == (len(loader), loader.batch_size, loader.sampler)
    assert torch.equal(loader.generator.get_state(), state)
    iterator = iter(tracked)
    next(iterator)
    assert vars(loader).keys() == before.keys()
    counted = {"num_iterations"} & before.keys()
    assert all(vars(loader)[name] is value for name, value in before.items() if name not in counted)
    assert all(getattr(loader, name) == before[name] + 1 for name in counted)
    assert type(loader) is kind
    del iterator


@pytest.mark.parametrize("workers", ["no workers", "1 worker"])
@pytest.mark.parametrize("arguments", [{"batch_size": 2, "shuffle": True}, {"batch_size": None}])
def test_copy_has_the_users_samplers(arguments: dict[str, Any], workers: str) -> None:
    """Code that looks at the samplers of a loader finds the user's, during an iteration as well; they are followed."""
    loader: Any = DataLoader(Drawing(6), **arguments, **WORKERS[workers])
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    iterator = iter(tracked)
    next(iterator)
    assert tracked.batch_sampler is loader.batch_sampler
    assert tracked.sampler is loader.sampler
    assert tracker.num_handed_out > 0
    del iterator


@pytest.mark.parametrize("kind", [DataLoader, Named])
def test_loader_made_of_the_copys_class_is_its_own(kind: type[DataLoader[Any]]) -> None:
    """Code that makes a loader of the class of another one gets one that draws from its own sampler."""
    loader: Any = kind(Drawing(6), batch_size=2)
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    other: Any = type(tracked)(tracked.dataset, batch_size=3)
    assert len(other) == 2
    assert len(tracked) == 3
    assert list(other._index_sampler) == [[0, 1, 2], [3, 4, 5]]


def test_class_that_goes_round_is_reported() -> None:
    """A subclass that calls DataLoader's own `__iter__` past ours can't be followed: the error says how it can be."""

    class Rude(DataLoader[Any]):
        def __iter__(self) -> Any:
            return DataLoader.__iter__(self)

    loader = Rude(Drawing(4))
    with pytest.raises(NotExactError, match=r"Let it call super\(\).__iter__\(\)"):
        next(iter(TrackedLoader(loader).copy_of(loader)))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Eager(DataLoader[Any]):
    """Creates its iterator early and keeps it, like a loader that never ends its workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter([0])


def with_living_workers() -> DataLoader[Any]:
    """Return a loader that has been iterated over and keeps its workers."""
    loader = DataLoader(Drawing(4), num_workers=1, persistent_workers=True)
    iter(loader)
    return loader


REASONS: dict[str, tuple[Callable[[], object], str]] = {
    "list": (lambda: [1, 2], "its class list is not a torch DataLoader"),
    "its own state": (lambda: Stateful(Drawing(2)), "a Stateful keeps its own state"),
    "out of order": (lambda: DataLoader(Drawing(2), num_workers=1, in_order=False), "set in_order=True"),
    "living workers": (with_living_workers, "already has its own iterator"),
    "iterator made at once": (lambda: Eager(Drawing(2)), "already has its own iterator"),
}


@pytest.mark.parametrize("case", REASONS)
def test_loader_that_cant_be_exact_is_told_why(case: str) -> None:
    """Each loader that can't be resumed exactly gets its own reason."""
    make, reason = REASONS[case]
    assert reason in (why_not_exact(make()) or "nothing")


@pytest.mark.parametrize("workers", WORKERS)
def test_loader_that_can_be_exact_has_no_reason_against_it(workers: str) -> None:
    """Plain loaders pass, with workers of any kind."""
    assert why_not_exact(DataLoader(Drawing(4), shuffle=True, **WORKERS[workers])) is None
    assert why_not_exact(Named(Drawing(4), **WORKERS[workers])) is None


class Swelling(Dataset[int]):
    """Creates, when it is first used, more generators than the slot's reserve allows."""

    def __init__(self) -> None:
        self.generators: list[Any] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.generators += [random.Random(i) for i in range(200)]
        return index


def test_worker_state_that_does_not_fit_is_reported() -> None:
    """A state that outgrows its slot raises when it is read; another state is never resumed."""
    loader = DataLoader(Swelling(), num_workers=1)
    tracker = TrackedLoader(loader)
    iterator = iter(tracker.copy_of(loader))
    next(iterator)
    with pytest.raises(NotExactError, match=r"has \d+ bytes, but its slots have \d+"):
        tracker.state_dict(1)
    del iterator


class Telling(Dataset[Any]):
    """Returns a number that depends on how the worker was set up."""

    setup = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return Telling.setup


def _set_up(number: int, worker_id: int) -> None:
    Telling.setup = 10 * number + worker_id


@pytest.mark.parametrize(("own", "default", "expected"), [(None, 1, 10), (2, 1, 20), (2, None, 20), (None, None, 0)])
def test_workers_are_set_up_as_the_user_says(own: int | None, default: int | None, expected: int) -> None:
    """The user's `worker_init_fn` runs; without one, the default one does, if any."""
    functions = [None if number is None else partial(_set_up, number) for number in (own, default)]
    loader = DataLoader(Telling(), batch_size=2, num_workers=2, worker_init_fn=functions[0])
    tracked = TrackedLoader(loader, default_worker_init=functions[1]).copy_of(loader)
    worker_1 = 0 if expected == 0 else 1
    assert [batch.tolist() for batch in tracked] == [[expected] * 2, [expected + worker_1] * 2]


def test_copy_that_is_gone_takes_its_workers_along() -> None:
    """Nothing keeps workers alive once the copy is dropped; the tracker then reports that it is gone."""
    loader = DataLoader(Drawing(4), num_workers=1, persistent_workers=True)
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    next(iter(tracked))
    assert len(multiprocessing.active_children()) == 1
    gc.disable()
    try:
        del tracked
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="no longer exists"):
        tracker.loader  # noqa: B018 - it raises


# Workers that don't come back by themselves, and signals that reach them.


class Stuck(Dataset[Any]):
    """Reports that a sample is being read, and never returns."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.begun = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.begun[index % 2] = 1
        if self.how == "sleep":
            time.sleep(1000)
        while self.how == "busy loop":
            pass
        return sum(range(10**13))  # a loop in C that runs no Python handler

    def wait_until_stuck(self) -> None:
        deadline = time.monotonic() + 20
        while not self.begun.all():
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.mark.parametrize("how", ["sleep", "busy loop", "loop in C"])
def test_stuck_workers_are_ended_soon(how: str) -> None:
    """Stuck workers are gone before torch's 5 s each, without an exception, and torch's handler is back in place."""
    loader = DataLoader(Stuck(how), num_workers=2)
    tracker = TrackedLoader(loader)
    iterator = iter(tracker.copy_of(loader))
    loader.dataset.wait_until_stuck()
    handler = signal.getsignal(signal.SIGCHLD)
    began = time.monotonic()
    tracker.close_workers(timeout_seconds=0.3)
    assert time.monotonic() - began < 4.0
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGCHLD) == handler
    time.sleep(0.01)  # a late signal would arrive here
    began = time.monotonic()
    del iterator
    gc.collect()
    assert time.monotonic() - began < 4.0


def test_handler_of_childrens_deaths_does_not_hear_of_the_workers() -> None:
    """Torch's handler raises when a worker was killed: it does not run while workers are closed, and is put back."""
    loader = DataLoader(Stuck("loop in C"), num_workers=2)
    tracker = TrackedLoader(loader)
    iterator = iter(tracker.copy_of(loader))
    loader.dataset.wait_until_stuck()
    heard: list[int] = []

    def handler(signum: int, frame: object) -> None:
        heard.append(signum)

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        tracker.close_workers(timeout_seconds=0.1)
        time.sleep(0.01)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert heard == []
    del iterator


def test_workers_are_closed_twice_and_before_they_are_made() -> None:
    """Closing is harmless without workers, before the first iteration, and a second time."""
    TrackedLoader(DataLoader(Drawing(2))).close_workers()
    loader = DataLoader(Drawing(4), num_workers=1)
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    tracker.close_workers()
    iterator = iter(tracked)
    next(iterator)
    tracker.close_workers()
    tracker.close_workers()
    assert multiprocessing.active_children() == []
    del iterator


def test_other_children_are_left_alone() -> None:
    """A child process of user code outlives the closing of the workers."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    try:
        loader = DataLoader(Drawing(4), num_workers=1)
        tracker = TrackedLoader(loader)
        iterator = iter(tracker.copy_of(loader))
        next(iterator)
        tracker.close_workers()
        assert multiprocessing.active_children() == [child]
        del iterator
    finally:
        child.terminate()
        child.join()


def _signals_that_arrive() -> list[signal.Signals]:
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


def test_workers_continue_through_signals_until_told() -> None:
    """A signal to the whole process group doesn't end workers; once they are released, SIGTERM does."""
    loader = DataLoader(Drawing(40), batch_size=1, num_workers=2)
    tracker = TrackedLoader(loader)
    seed(1)
    expected = [listed(batch) for batch in DataLoader(Drawing(40), batch_size=1, num_workers=2)]
    seed(1)
    iterator = iter(tracker.copy_of(loader))
    found = [listed(next(iterator)) for _ in range(2)]  # both are set up
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for signum in _signals_that_arrive():
        for worker in workers:
            os.kill(worker.pid, signum)
        found += [listed(next(iterator)) for _ in range(4)]
    found += [listed(next(iterator)) for _ in range(20)]
    assert found == expected[: len(found)]
    assert all(worker.is_alive() for worker in workers)
    tracker.release_workers()
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0]
    del iterator


UNFINISHED = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_faulttolerant.loader.tracked import TrackedLoader
loader = DataLoader(TensorDataset(torch.arange(40)), num_workers=2, persistent_workers=True)
tracker = TrackedLoader(loader)
tracked = tracker.copy_of(loader)
iterator = iter(tracked)
next(iterator)
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert not tracker._workers.current.ring.is_closing(0), "a child's end is not the run's"
raise RuntimeError("of the user")
"""


def test_process_with_living_workers_can_end() -> None:
    """A user's exception that leaves an iterator behind ends the process, which does not wait for workers."""
    ended = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("RuntimeError: of the user")


def _fail_with_an_iterator() -> None:
    tracker = TrackedLoader(loader := DataLoader(Drawing(40), batch_size=1, num_workers=1))
    batches = iter(tracker.copy_of(loader))
    next(batches)
    raise RuntimeError("of the user")


def test_process_of_multiprocessing_with_living_workers_can_end() -> None:
    """The same in a process that calls no function of atexit, such as a rank that Lightning spawns."""
    child = multiprocessing.get_context("fork").Process(target=_fail_with_an_iterator)
    child.start()
    child.join(20)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 1


@pytest.mark.slow
def test_spawned_workers_resume_exactly() -> None:
    """Spawned workers get ring, state and setup by pickle, and continue exactly."""
    make = partial(DataLoader, batch_size=2, shuffle=True, num_workers=2, multiprocessing_context="spawn")
    seed(1)
    reference = loop(make(Drawing(7)), num_epochs=1)
    seed(1)
    events, saved = tracked_loop(make(Drawing(7)), num_epochs=1, save=True)
    assert events == reference
    seed(2)
    resumed, _ = tracked_loop(make(Drawing(7)), num_epochs=1, resume=saved[3])
    assert resumed == after(reference, saved[3])


def test_tensor_data_sets_and_other_collate_functions_pass() -> None:
    """A user's `collate_fn` gets the samples, and its result reaches the loop unchanged."""
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1, collate_fn=_as_tuple)
    assert list(TrackedLoader(loader).copy_of(loader)) == [("own", 0, 1), ("own", 2, 3)]


def _as_tuple(samples: list[Any]) -> Any:
    return ("own", *(value.item() for (value,) in samples))

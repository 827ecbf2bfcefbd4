"""What can't be exact is refused, with the reason; without strict, it continues and is reported once."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_faulttolerant import FaultToleranceError, ResumableDataLoader
from lightning_faulttolerant.errors import FingerprintMismatchError, NotExactError
from lightning_faulttolerant.loader.exactness import Exactness, why_not_exact
from lightning_faulttolerant.loader.replayer import Replayer
from tests.laws.data_sets import SizedStream
from tests.loader.loops import follow, resumable_loop, seed, small
from tests.loader.made import Counts, Drawing, Eager, Echo, EndsAlike, Equipped, Negative, Rude, Stateful, Swelling
from tests.state.objects.round_trips import through_a_file


def cut(make: Callable[[], DataLoader[Any]], position: int = 3) -> Any:
    """Return the state of a loader after `position` batches of its second epoch."""
    seed(1)
    tracker, loader = follow(make())
    list(loader)
    list(itertools.islice(batches := iter(loader), position))
    state = through_a_file(tracker.state_dict(position))
    del batches
    tracker.close_workers()
    return state


def batches_of(size: int, **more: Any) -> DataLoader[Any]:
    """Return a loader of batches of random samples, whose number is `size`."""
    return DataLoader(Echo(size), batch_sampler=BatchSampler(RandomSampler(range(size)), 2, drop_last=False), **more)


def samples(sampler: Any, **more: Any) -> DataLoader[Any]:
    """Return a loader of single samples."""
    return DataLoader(Echo(), None, sampler=sampler, **more)


REPLAYS: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "differs early": (lambda: samples(EndsAlike()), lambda: samples(EndsAlike(3)), 14),
    "objects differ early": (lambda: samples(EndsAlike(is_object=True)), lambda: samples(EndsAlike(3, True)), 14),
    "other length": (lambda: batches_of(40), lambda: batches_of(39), 5),
    "stream": (lambda: DataLoader(Counts()), lambda: DataLoader(Counts(1)), 3),
    "generator of the sampler": (lambda: samples(Equipped(random.Random(1))), lambda: samples(Equipped()), 3),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's iterator, which is not created
@pytest.mark.parametrize("row", REPLAYS)
def test_iteration_that_cant_begin_again(row: str, caplog: pytest.LogCaptureFixture, snapshot: Any) -> None:
    """Under strict this is an error; without, one warning and a line of the report for each reason; it continues."""
    make, other, position = REPLAYS[row]
    state = cut(make, position)
    tracker, loader = follow(other(), state)
    with pytest.raises(NotExactError) as error:
        list(loader)
    tracker.close_workers()
    with caplog.at_level(logging.WARNING, "lightning_faulttolerant"):
        tracker, loader = follow(other(), state, strict=False)
        assert list(loader)
    tracker.close_workers()
    assert tracker.exactness.reasons == [record.message for record in caplog.records]
    assert len(set(tracker.exactness.reasons)) == len(tracker.exactness.reasons) > 0
    assert {"error": str(error.value), "reasons": tracker.exactness.reasons} == snapshot


def living() -> DataLoader[Any]:
    """Return a loader that has been iterated over and keeps its workers."""
    loader = DataLoader(Echo(4), num_workers=1, persistent_workers=True)
    iter(loader)
    return loader


def followed(loader: DataLoader[Any]) -> Any:
    """Return the state of a followed loader after a batch."""
    tracker, copy = follow(loader)
    next(batches := iter(copy))  # noqa: F841 - kept until there is a state
    return tracker.state_dict(1)


def two_iterations() -> Any:
    """Return the state of a loader with two iterations in progress."""
    loader = small()
    next(first := iter(loader)), next(iter(loader)), next(first)
    return loader.state_dict()


def left_epoch() -> Any:
    """Iterate again in an epoch that was left after its state was taken."""
    loader = small()
    next(iter(loader))
    loader.state_dict()
    return iter(loader)


def late(name: str) -> Any:
    """Set an attribute of a loader after its first iteration."""
    loader = small()
    next(iter(loader))
    return setattr(loader, name, None)


def old_iterator() -> Any:
    """Advance an iterator that is older than the state that was loaded."""
    loader = small()
    next(batches := iter(loader))
    loader.load_state_dict(loader.state_dict())
    return next(batches)


def loaded(state: Any, **arguments: Any) -> Any:
    """Load a state into a new loader."""
    return small(**arguments).load_state_dict(state)


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "class that goes round": (lambda: followed(Rude(Echo(4))), NotExactError),
    "worker state too large": (lambda: followed(DataLoader(Swelling(), num_workers=1)), NotExactError),
    "two iterations": (two_iterations, NotExactError),
    "in_order": (lambda: small(in_order=False, num_workers=2), NotExactError),
    "per_sample of a stream": (lambda: ResumableDataLoader(SizedStream(3), worker_rng="per_sample"), NotExactError),
    "worker_rng": (lambda: small(worker_rng="none"), ValueError),
    "version": (lambda: loaded({**small().state_dict(), "version": 99}), NotExactError),
    "set late": (lambda: late("collate_fn"), ValueError),
    "left epoch": (left_epoch, NotExactError),
    "no epoch to end": (lambda: small().end_epoch(), NotExactError),
    "old iterator": (old_iterator, NotExactError),
    "empty state": (lambda: loaded({}), ValueError),
    "state of something else": (lambda: loaded({"dataloader": 1}), ValueError),
    "no state": (lambda: loaded(None), ValueError),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's iterators, which are left
@pytest.mark.parametrize("row", ERRORS)
def test_error(row: str, snapshot: SnapshotAssertion) -> None:
    """Each is an error of its type, which says what happened and what to do."""
    call, expected = ERRORS[row]
    with pytest.raises(expected) as error:
        call()
    assert isinstance(error.value, FaultToleranceError) == (expected is NotExactError)
    assert re.sub(r"\d+ bytes|slots have \d+", "SIZE", str(error.value)) == snapshot


OTHER_LOADERS: dict[str, dict[str, Any]] = {
    "workers": {"num_workers": 2},
    "batch size": {"batch_size": 2},
    "drop_last": {"drop_last": True},
    "sampler": {"shuffle": False},
    "worker_rng": {"worker_rng": "per_sample"},
}


@pytest.mark.parametrize("row", [*OTHER_LOADERS, "length"])
def test_the_state_of_another_loader_is_refused(row: str, snapshot: SnapshotAssertion) -> None:
    """From before, in, and after an epoch, what differs is named, with both values."""
    states: list[Any] = []
    resumable_loop(small(), num_epochs=1, saved=states)
    messages = set()
    for _, state in (states[0], states[2], states[-1]):
        data = Drawing(6 if row == "length" else 5)
        with pytest.raises(FingerprintMismatchError) as error:
            ResumableDataLoader(
                data, **{"batch_size": 1, "shuffle": True, **OTHER_LOADERS.get(row, {})}
            ).load_state_dict(state)
        messages.add(str(error.value))
    assert sorted(messages) == snapshot


def smart() -> DataLoader[Any]:
    """Return a loader of a data set that a thread of its library fills."""
    kind: type[Dataset[int]] = type("SmartCacheDataset", (Dataset,), {"__module__": "monai.data.dataset"})
    return DataLoader(kind(), sampler=[0])


KEEPING: Any = type("K", (Echo,), {"state_dict": lambda _: {"a": [[], {1}]}, "load_state_dict": lambda _, state: None})
REASONS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "its own state": lambda: Stateful(Echo(2)),
    "out of order": lambda: DataLoader(Echo(2), num_workers=1, in_order=False),
    "living workers": living,
    "iterator made at once": lambda: Eager(Echo(2)),
    "filled by a thread": smart,
    "state with an object": lambda: StatefulDataLoader(KEEPING(2)),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_loaders_that_cant_be_followed(snapshot: SnapshotAssertion) -> None:
    """Each gets its own reason; plain loaders, with workers of any kind, and a user's class have none against them."""
    assert {row: why_not_exact(make()) for row, make in REASONS.items()} == snapshot
    for arguments in ({}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}):
        assert why_not_exact(DataLoader(Echo(4), shuffle=True, **arguments)) is None
        assert why_not_exact(Negative(Echo(4), **arguments)) is None


@pytest.mark.parametrize("strict", [True, False, None])
def test_what_happens_to_reasons(strict: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    """Strict raises; False collects and logs each once; None collects quietly; what is admitted is always logged."""
    exactness = Exactness(strict=strict)
    with caplog.at_level(logging.WARNING):
        for reason in ("the order differs", "a generator is gone", "the order differs"):
            if strict:
                with pytest.raises(NotExactError, match=reason):
                    exactness.refuse(reason)
            else:
                exactness.refuse(reason)
        exactness.admit("a worker died")
    collected = [] if strict else ["the order differs", "a generator is gone"]
    assert exactness.reasons == [*collected, "a worker died"]
    assert caplog.messages == [*(collected if strict is False else []), "a worker died"]
    of_worker = exactness.of_worker()
    assert (of_worker.strict, of_worker.reasons) == (strict, [])


BEGUN, STARTED = threading.Event(), threading.Event()


class Waits(Drawing):
    """Lets another thread start one during its first sample."""

    def __getitem__(self, index: Any) -> Any:
        BEGUN.set()
        STARTED.wait()
        return super().__getitem__(index)


def test_thread_of_other_code_is_not_the_loaders() -> None:
    """A loader that draws in this process is not refused because another thread starts one while it loads a batch."""

    def other() -> None:
        BEGUN.wait()
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        STARTED.set()

    loader = Negative(Waits(3), batch_size=None)
    threading.Thread(target=other).start()
    batches = Replayer(loader, name="loader", exactness=Exactness(strict=True)).iterate(lambda: iter(loader))
    assert len(list(batches)) == 3


def test_an_argument_without_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Each state belongs to the last batch, whatever number torchdata's loader would have taken."""
    small(snapshot_every_n_steps=3)
    assert "snapshot_every_n_steps has no effect in a ResumableDataLoader" in caplog.text

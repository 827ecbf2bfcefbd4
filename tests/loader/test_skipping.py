"""The rest of an epoch, computed without a walk over its beginning, is the rest that the sampler itself yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_faulttolerant.loader import sampler_states as replay
from lightning_faulttolerant.loader.index_record import record_state
from lightning_faulttolerant.loader.sampler_states import rest_of
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from tests.loader.index_sides import begin, resume
from tests.loader.loops import safe, seed


def generator() -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(3)


KNOWN: dict[str, Callable[[int], Any]] = {
    "sequential": lambda n: SequentialSampler(range(n)),
    "random": lambda n: RandomSampler(range(n)),
    "random, own generator": lambda n: RandomSampler(range(n), generator=generator()),
    "distributed": lambda n: DistributedSampler(range(2 * n), num_replicas=2, rank=1),
    "distributed, dropping": lambda n: DistributedSampler(range(n + 3), num_replicas=3, rank=2, drop_last=True),
    "distributed, in order": lambda n: DistributedSampler(range(n), num_replicas=2, rank=0, shuffle=False),
}
UNKNOWN: dict[str, Callable[[int], Any]] = {
    "with replacement": lambda n: RandomSampler(range(n), replacement=True),
    "several passes": lambda n: RandomSampler(range(n), num_samples=2 * n + 1),
    "part of a pass": lambda n: RandomSampler(range(n + 1), num_samples=n),
    "subset": lambda n: SubsetRandomSampler([7 * i for i in range(n)]),
    "weighted": lambda n: WeightedRandomSampler([1.0, 2.0, 0.5], n),
    "subclass": lambda n: type("Mine", (SequentialSampler,), {})(range(n)),
    "list": lambda n: list(range(n)),
}


@pytest.fixture(autouse=True)
def _own_states() -> Iterator[None]:
    """Restore the generators for other tests."""
    before = rng_state()
    yield
    set_rng_state(before)


def outcome(sampler: Any, rest: Iterator[Any]) -> tuple[Any, ...]:
    """Return the items, with their types, and the states of the generators afterwards."""
    items = list(rest)
    inner = getattr(sampler, "sampler", sampler)
    own = getattr(inner, "generator", None)
    return repr(items), torch.get_rng_state().tolist(), None if own is None else own.get_state().tolist()


@pytest.mark.parametrize("name", KNOWN)
@given(data=st.data())
def test_rest_is_what_the_sampler_gives(name: str, data: st.DataObject) -> None:
    """For each size, batch size and position the rest is the same, and so are all generators after it."""
    length = data.draw(st.integers(1, 40), "length")
    batch_size = data.draw(st.integers(1, 7) | st.none(), "batch size")
    drop_last = data.draw(st.booleans(), "drop_last")

    def make() -> Any:
        sampler = KNOWN[name](length)
        return sampler if batch_size is None else BatchSampler(sampler, batch_size, drop_last)

    # The rest that is checked is never empty.
    position = data.draw(st.integers(0, max(0, len(make()) - 1)), "position")
    torch.manual_seed(1)
    slow = make()
    expected = outcome(slow, islice(iter(slow), position, None))
    torch.manual_seed(1)
    fast = make()
    rest = rest_of(fast, position)
    assert rest is not None
    assert outcome(fast, rest) == expected


@pytest.mark.parametrize("name", KNOWN)
def test_rest_of_many_is_what_the_sampler_gives(name: str) -> None:
    """Indices that become Python numbers part by part are the same, over the ends of the parts."""
    torch.manual_seed(1)
    expected = outcome(None, islice(iter(KNOWN[name](50_000)), 100, None))
    torch.manual_seed(1)
    rest = rest_of(KNOWN[name](50_000), 100)
    assert rest is not None
    assert outcome(None, rest) == expected


def test_distributed_sampler_that_was_changed_yields_what_it_would_yield() -> None:
    """Other code may have set another number of samples: torch then complains, and so does the rest."""
    sampler = DistributedSampler(range(10), num_replicas=2, rank=0)
    sampler.num_samples = 4
    with pytest.raises(AssertionError, match="does not match num_samples"):
        list(rest_of(sampler, 1) or ())
    sampler.total_size = 8
    sampler.drop_last = True
    assert list(rest_of(sampler, 1) or ()) == list(sampler)[1:]


@pytest.mark.parametrize("name", UNKNOWN)
def test_others_are_left_alone(name: str) -> None:
    """For a sampler that must be run through, nothing is drawn and nothing is returned."""
    for sampler in (UNKNOWN[name](9), BatchSampler(UNKNOWN[name](9), 2, drop_last=False)):
        before = rng_state()
        assert rest_of(sampler, 3) is None
        assert rng_state() == before


def test_position_behind_the_end_is_left_alone() -> None:
    """A position after the sampler's end, as with a data set that has shrunk, is not skipped to."""
    assert rest_of(BatchSampler(SequentialSampler(range(8)), 2, drop_last=False), 5) is None


def cut(sampler: Any) -> tuple[Any, list[Any]]:
    """Begin an epoch; return its state after the fourth batch, which keeps two batches, and the rest."""
    seed(1)
    side, iterator = begin(sampler, window=2)
    for _ in range(4):
        next(iterator)
    return safe(record_state(side.record)), list(iterator)


def test_resume_skips_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler of torch's is not run through, and continues where it was."""
    state, rest = cut(BatchSampler(RandomSampler(range(20)), 2, drop_last=False))
    seed(2)
    sampler = RandomSampler(range(20))
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: pytest.fail("it was run through"))
    _, resumed = resume(BatchSampler(sampler, 2, drop_last=False), state, 4)
    assert list(resumed) == rest


def test_rest_that_is_not_the_samplers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch draws in another way than we know, the sampler itself is run through, from the right states."""
    own = generator()
    state, rest = cut(BatchSampler(RandomSampler(range(20), generator=own), 2, drop_last=False))
    end = own.get_state()

    def wrong(sampler: Any, num_batches: int) -> Iterator[Any]:
        torch.rand(3, generator=sampler.sampler.generator)
        torch.rand(3)
        return iter([[0, 0]] * 8)

    monkeypatch.setattr(replay, "rest_of", wrong)
    own = generator()
    _, resumed = resume(BatchSampler(RandomSampler(range(20), generator=own), 2, drop_last=False), state, 4)
    assert list(resumed) == rest
    assert torch.equal(own.get_state(), end)


def test_the_order_of_a_generator_on_another_device_is_drawn_as_torch_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The permutation is created with torch's own call: on a GPU, the type of its numbers could change them."""

    class OfGpu:
        device = torch.device("cuda")

    def randperm(length: int, **arguments: object) -> torch.Tensor:
        assert arguments == {"generator": sampler.generator}
        return torch.arange(length).flip(0)

    sampler = RandomSampler(range(5), generator=OfGpu())
    monkeypatch.setattr(torch, "randperm", randperm)
    rest = rest_of(sampler, 2)
    assert rest is not None
    assert list(rest) == list(sampler)[2:] == [2, 1, 0]

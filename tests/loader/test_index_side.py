"""The index sampler is passed through and resumed by its random states; a sampler that can't be is detected."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.index_record import RandomStates, birth_plan, plan_from_state, record_state
from lightning_faulttolerant.loader.index_side import IndexSide
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.packing import pack_blobs
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from tests.loader.index_sides import begin, make, resume
from tests.loader.loops import safe, seed


class ThreadedRandom:
    """Draws each index lazily, from all generators."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        for _ in range(9):
            yield random.randrange(50) + 100 * int(np.random.randint(50)) + 10_000 * self.own.randrange(50)


class Counting:
    """Yields other indices at each start because of an internal counter: it can't be resumed."""

    def __init__(self) -> None:
        self.num_iterations = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.num_iterations += 1
        return iter([self.num_iterations * 100 + i for i in range(6)])


SAMPLERS = {
    "in order": lambda: SequentialSampler(range(9)),
    "shuffled": lambda: RandomSampler(range(9)),
    "batches": lambda: BatchSampler(RandomSampler(range(9)), 2, drop_last=False),
    "drawn one by one": ThreadedRandom,
    "its own generator": lambda: RandomSampler(range(9), generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_every_position_resumes(sampler: str, num_ahead: int) -> None:
    """At each position, with or without batches handed out ahead, the rest and the generators after it are the same."""
    length = len(SAMPLERS[sampler]())
    for position in range(length + 1):
        seed(1)
        side, iterator = begin(SAMPLERS[sampler](), window=num_ahead + 1)
        indices = [next(iterator, None) for _ in range(min(position + num_ahead, length))]
        state, rng = safe(record_state(side.record)), rng_state()
        held = side.states.now().held
        rest = list(iterator)
        seed(2)
        again, resumed = resume(SAMPLERS[sampler](), state, position)
        again.states.restore(again.states.now())
        _put(rng, held, again)
        assert list(resumed) == indices[position:] + rest


def _put(rng: Any, held: Any, side: IndexSide) -> None:
    side.states.restore(RandomStates(rng=rng, held=held, sampler_epochs=[]))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampler_is_passed_through(sampler: str) -> None:
    """The indices, the draws for them, and the length are those of the sampler itself."""
    seed(1)
    expected, draws = list(SAMPLERS[sampler]()), rng_state()
    seed(1)
    side, iterator = begin(SAMPLERS[sampler]())
    assert len(side) == len(SAMPLERS[sampler]())
    assert list(iterator) == expected
    assert rng_state() == draws


def test_reading_the_state_changes_nothing() -> None:
    """Reading the record at any position does not change the indices that follow."""
    seed(1)
    expected = list(ThreadedRandom())
    seed(1)
    side, iterator = begin(ThreadedRandom())
    found = []
    for index in iterator:
        record_state(side.record)
        side.states.now()
        found.append(index)
    assert found == expected


def test_attributes_are_the_samplers() -> None:
    """The user's sampler answers for every attribute; an attribute that it lacks is lacking here."""
    sampler = BatchSampler(RandomSampler(range(9)), 2, drop_last=True)
    side = make(sampler)
    assert (side.batch_size, side.drop_last, side.sampler) == (2, True, sampler.sampler)
    assert not hasattr(side, "set_epoch")
    with pytest.raises(TypeError):
        len(make(iter([1])))


def test_epoch_of_the_sampler_is_put_back() -> None:
    """A sampler with `set_epoch` resumes in its epoch, even inside a batch sampler."""

    def make_sampler() -> BatchSampler:
        return BatchSampler(DistributedSampler(range(20), num_replicas=2, rank=0, seed=3), 2, drop_last=False)

    sampler = make_sampler()
    sampler.sampler.set_epoch(4)
    expected = list(sampler)
    side, iterator = begin(sampler)
    next(iterator)
    fresh = make_sampler()
    _, resumed = resume(fresh, safe(record_state(side.record)), 1)
    assert list(resumed) == expected[1:]
    assert fresh.sampler.epoch == 4


def test_sampler_with_its_own_state_is_found_out() -> None:
    """When it is started again, it yields other indices: this raises an error that names it and gives the remedy."""
    sampler = Counting()
    sampler.num_iterations = 5  # earlier epochs
    side, iterator = begin(sampler)
    next(iterator)
    with pytest.raises(NotExactError, match="Counting yields other indices than before batch 1"):
        resume(Counting(), safe(record_state(side.record)), 1)


def test_sampler_with_its_own_state_is_noted_without_strict(caplog: pytest.LogCaptureFixture) -> None:
    """Without strict this is a warning and a note in the report, and the batches in flight are handed out again."""
    sampler = Counting()
    sampler.num_iterations = 5
    side, iterator = begin(sampler)
    first = [next(iterator) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        exactness = Exactness(strict=False)
        _, resumed = resume(Counting(), safe(record_state(side.record)), 1, exactness=exactness)
    assert len(exactness.reasons) == 1
    assert exactness.reasons[0] in caplog.messages
    assert next(resumed) == first[1]


class Remembering(ThreadedRandom):
    """Draws lazily, and remembers its draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.seen += 1
            yield index + 1_000_000 * self.seen


class BufferShuffle:
    """Yields indices from random places of a buffer: each depends on all earlier draws."""

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        buffer = list(range(8))
        for index in range(8, 38):
            place = random.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = index


class ChunkShuffle:
    """Draws only now and then: a permutation for each chunk."""

    def __init__(self) -> None:
        self.same = torch.default_generator  # it has two names

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        for start in range(0, 30, 7):
            yield from (start + torch.randperm(7)).tolist()


class DrawsAll(BufferShuffle):
    """Draws from each kind of generator, also from its own."""

    def __init__(self) -> None:
        self.own = (random.Random(0), np.random.RandomState(0), np.random.default_rng(0), torch.Generator())

    def __iter__(self) -> Iterator[Any]:
        python, numpy, other, of_torch = self.own
        for index in super().__iter__():
            drawn = np.random.randn(), torch.randn(()).item(), python.gauss(0, 1), numpy.randn(), other.random()
            yield index, *drawn, torch.rand((), generator=of_torch).item()


OTHERS = {
    "few": lambda: (random.random(), torch.rand(3)),
    "many": lambda: (torch.rand(20_000), np.random.rand(700), [random.random() for _ in range(1_000)]),
    "Gaussians": lambda: (torch.randn(3), np.random.randn(3), random.gauss(0, 1)),
    "seeded": lambda: (seed(5), torch.rand(700)),
    "torch seeded": lambda: (torch.manual_seed(torch.initial_seed() + 1), torch.rand(700)),
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("sampler", [BufferShuffle, ChunkShuffle, DrawsAll])
@pytest.mark.parametrize("cuts", [(1,), (29,), (4, 17)])
def test_sampler_that_draws_as_it_goes_continues_exactly(others: str, sampler: type, cuts: tuple[int, ...]) -> None:
    """The rest is the same although the sampler draws between batches and remembers its draws, and others draw too."""

    def run(iterator: Iterator[Any], number: int) -> list[Any]:
        found = []
        for _ in range(number):
            found.append(next(iterator))
            OTHERS[others]()
        return found

    seed(1)
    _, iterator = begin(sampler(), window=3)
    whole = run(iterator, 30)
    seed(1)
    side, iterator = begin(sampler(), window=3)
    before = 0
    for cut in cuts:
        assert run(iterator, cut - before) == whole[before:cut]
        state, rng = safe(record_state(side.record)), rng_state()
        seed(2)
        side, iterator = resume(sampler(), state, cut)
        side.ensure_open()
        set_rng_state(rng)
        before = cut
    assert run(iterator, 30 - before) == whole[before:]


@pytest.mark.parametrize(("others", "most"), [("few", 2), ("many", 3), ("Gaussians", 60), ("torch seeded", 9)])
def test_the_record_hardly_grows(others: str, most: int) -> None:
    """A batch adds a few bytes to a checkpoint where other code draws; a cached Gaussian adds some more."""
    sampler = (int(torch.randint(50, ())) + random.randrange(50) + np.random.randint(50) for _ in range(400))
    side, iterator = begin(sampler)
    sizes = []
    for _ in range(2):
        for _ in range(200):
            next(iterator)
            OTHERS[others]()
        sizes.append(len(pack_blobs(record_state(side.record))["blobs"]["data"]))
    assert sizes[1] - sizes[0] < 200 * most


def test_a_record_that_grows_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other code seeds Python's generator in each step, its states are kept whole, and named once if large."""
    monkeypatch.setattr("lightning_faulttolerant.loader.samplers._LARGE_BYTES", 50_000)
    _, iterator = begin(random.randrange(50) for _ in range(100))
    for number in range(100):
        next(iterator)
        random.seed(number)
    [message] = caplog.messages
    assert message.startswith("The position of a loader takes 0 MB in each checkpoint, and grows with each batch")


def test_sampler_of_torch_is_not_watched() -> None:
    """Torch's own samplers draw at their start, so nothing is compared at their batches, and nothing is kept."""
    for sampler in (RandomSampler(range(9)), BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)):
        side, iterator = begin(sampler)
        for _ in range(4):
            next(iterator)
        assert not side.states.may_draw
        assert side.record.log.pack() == b""


def test_generator_that_the_sampler_shares_is_kept() -> None:
    """A sampler's generator is put back even if it is also found on the data set, which draws from it too."""
    for make_sampler in (
        lambda own: RandomSampler(range(9), generator=own),
        lambda own: BatchSampler(RandomSampler(range(9), generator=own), 2, drop_last=False),
        lambda own: RandomSampler(range(9), num_samples=20, generator=own),
    ):
        own = torch.Generator().manual_seed(5)
        sampler = make_sampler(own)
        held = HeldGenerators({"dataset": {"rng": own}, "sampler": sampler})
        side = IndexSide(sampler, held=held, exactness=Exactness(), window=2)
        side.begin(None, new_workers=True)
        iterator = iter(side)
        given = []
        for _ in range(3):
            given.append(next(iterator))
            torch.rand(7, generator=own)
        state, now = safe(record_state(side.record)), own.get_state()
        rest = list(iterator)
        held = HeldGenerators({"dataset": {"rng": own}, "sampler": sampler})
        again = IndexSide(sampler, held=held, exactness=Exactness(), window=2)
        own.manual_seed(77)
        again.begin(plan_from_state(state, 3), new_workers=True)
        resumed = iter(again)
        again.ensure_open()
        own.set_state(now)
        assert list(resumed) == rest


def test_only_what_a_sampler_of_torch_may_draw_from_is_kept() -> None:
    """For torch's own samplers these are torch's generator and their own; the workers' birth needs workers."""
    sampler = RandomSampler(range(9), generator=torch.Generator())
    held = HeldGenerators({"dataset": {"rng": random.Random(0)}, "sampler": sampler})
    for has_workers in (False, True):
        side = IndexSide(sampler, held=held, exactness=Exactness(), window=2, has_workers=has_workers)
        side.begin(None, new_workers=True)
        next(iter(side))
        for moment in (side.record.start, side.record.first):
            assert moment is not None
            assert moment.rng.keys() == {"torch"}
            assert moment.held.keys() == {"sampler.generator"}
        assert (side.record.birth is not None) == has_workers
        if side.record.birth is not None:
            assert side.record.birth.held.keys() == {"sampler.generator", "dataset['rng']"}


def test_window_keeps_the_last_batches_only() -> None:
    """The record holds as many batches as may be in flight, whatever the length of the epoch."""
    side, iterator = begin(SequentialSampler(range(9)), window=3)
    for _ in range(7):
        next(iterator)
    state = record_state(side.record)
    assert (state["handed_out"], len(state["recent"])) == (7, 3)


class OwnOrder(SequentialSampler):
    """A sampler of the user's own class."""


def _batches(sampler: Any) -> BatchSampler:
    return BatchSampler(sampler, 2, drop_last=False)


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(9)),
        RandomSampler(range(9)),
        RandomSampler(range(9), generator=torch.Generator()),
        DistributedSampler(range(9), num_replicas=2, rank=0),
        _batches(SequentialSampler(range(9))),
        _IndexBatchSamplerWrapper(_batches(SequentialSampler(range(9)))),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_order_that_follows_from_its_start_is_not_digested(sampler: Any) -> None:
    """Torch's samplers yield what their length and their states at the start determine: nothing else is compared."""
    side, iterator = begin(sampler)
    next(iterator)
    assert record_state(side.record)["digests"] == []


@pytest.mark.parametrize(
    "sampler",
    [
        OwnOrder(range(9)),
        [4, 2, 7],
        RandomSampler(range(9), replacement=True),
        RandomSampler(range(9), num_samples=4),
        SubsetRandomSampler([4, 2, 7]),
        WeightedRandomSampler([1.0, 2.0, 3.0], 3),
        _batches(OwnOrder(range(9))),
        _batches([4, 2, 7]),
        _IndexBatchSamplerWrapper(_batches(OwnOrder(range(9)))),
        _IndexBatchSamplerWrapper(OwnOrder(range(9))),  # type: ignore[arg-type]
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_any_other_order_is_digested(sampler: Any) -> None:
    """All that other samplers yield is compared, batch by batch."""
    side, iterator = begin(sampler)
    next(iterator)
    assert len(record_state(side.record)["digests"]) == 2


@pytest.mark.parametrize("has_wrapper", [False, True])
def test_order_of_another_length_is_found_out(has_wrapper: bool) -> None:
    """The last batches are compared, also where no digest is kept."""

    def make_sampler(length: int) -> Any:
        batches = _batches(RandomSampler(range(length)))
        return _IndexBatchSamplerWrapper(batches) if has_wrapper else batches

    seed(1)
    side, iterator = begin(make_sampler(40))
    for _ in range(5):
        next(iterator)
    state = safe(record_state(side.record))
    with pytest.raises(NotExactError, match="yields other indices than before"):
        next(resume(make_sampler(39), state, 5)[1])


def test_iteration_that_nobody_announced_is_refused() -> None:
    """Indices that are drawn past the tracker would be counted wrongly, so this raises."""
    with pytest.raises(NotExactError, match="calls DataLoader"):
        iter(make(SequentialSampler(range(3))))


def test_plan_with_workers_alone_starts_a_new_epoch() -> None:
    """A plan with only the workers' birth draws the order of the next epoch from the current generators."""
    seed(1)
    side, iterator = begin(RandomSampler(range(9)))
    list(iterator)
    state, rng = record_state(side.record), rng_state()
    expected = list(RandomSampler(range(9)))
    again = make(RandomSampler(range(9)))
    again.begin(birth_plan(safe(state)), new_workers=True)
    _put(rng, {}, again)
    assert list(again) == expected


class Equipped(Counting):
    """Draws late, from a generator that it may have been given."""

    def __init__(self, *parts: random.Random) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        yield self.parts[0].randrange(50) if self.parts else 0


def test_generator_that_is_gone_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A sampler that began with a generator that is gone can't be begun again; without strict this is reported."""
    side, indices = begin(Equipped(random.Random(1)))
    for _ in range(3):
        next(indices)
    state = safe(record_state(side.record))
    reason = r"order of samples can't begin again exactly: the generator sampler\.parts\[0\] does not exist"
    with pytest.raises(NotExactError, match=reason):
        resume(Equipped(), state, 3)
    with caplog.at_level(logging.WARNING, "lightning_faulttolerant"):
        exactness = Exactness(strict=False)
        _, rest = resume(Equipped(), state, 3, exactness=exactness)
    assert list(rest) == [3, 4, 5, 0]
    assert [record.message for record in caplog.records] == exactness.reasons
    assert len(exactness.reasons) == 1


class EndsAlike:
    """Its order depends on a count that is not restored, except for the later indices."""

    starts = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Any]:
        type(self).starts += 1
        return iter([self.give((i + self.starts) % 9 if i < 9 else i) for i in range(20)])

    @staticmethod
    def give(index: int) -> Any:
        return index


class Objects(EndsAlike):
    """The same with objects that are not kept."""

    @staticmethod
    def give(index: int) -> Any:
        return slice(index, index + 1)


@pytest.mark.parametrize("sampler", [EndsAlike, Objects])
def test_replay_is_compared_from_its_first_batch_on(sampler: type) -> None:
    """A replay that differs is refused even if the last batches, including those in flight, happen to be the same."""
    side, iterator = begin(sampler(), window=3)
    given = [next(iterator) for _ in range(15)]
    state = safe(record_state(side.record))
    assert given[9:] == [sampler.give(i) for i in range(9, 15)]
    with pytest.raises(NotExactError, match=f"{sampler.__name__} yields other indices than before batch 15"):
        resume(sampler(), state, 14)


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_objects_in_flight_are_drawn_again(num_ahead: int) -> None:
    """A checkpoint can't hold the objects: the sampler yields them again, and the rest too, also at a second resume."""

    class Slices(ThreadedRandom):
        def __iter__(self) -> Iterator[Any]:
            return (slice(i, i + 1) for i in super().__iter__())

    seed(1)
    expected = list(Slices())
    seed(1)
    side, iterator = begin(Slices(), window=3)
    for _ in range(3 + num_ahead):
        next(iterator)
    seed(2)
    side, iterator = resume(Slices(), safe(record_state(side.record)), 3)
    assert [next(iterator) for _ in range(2)] == expected[3:5]
    seed(3)
    _, iterator = resume(Slices(), safe(record_state(side.record)), 4)
    assert next(iterator) == expected[4]


class OwnIterator:
    """Is its own iterator, and begins again at each call of `iter`."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> OwnIterator:
        self.left = iter(random.sample(range(9), 9))
        return self

    def __next__(self) -> Any:
        return slice(next(self.left))


def test_sampler_that_is_its_own_iterator_is_begun_once() -> None:
    """It continues where it was, as the samplers of lhotse do."""
    seed(1)
    side, iterator = begin(OwnIterator())
    given = [next(iterator) for _ in range(4)]
    state = safe(record_state(side.record))
    rest = list(map(next, [iterator] * 5))
    seed(2)
    _, resumed = resume(OwnIterator(), state, 4)
    assert list(resumed) == rest
    assert len(given) == 4

"""The law of a resume: at every cut, the samples before and after it are those of an uncut run, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming import dataset as dataset_module
from lightning_faulttolerant.streaming.world import World
from tests.streaming.shard_files import batches, write

NUM_SAMPLES, NUM_EPOCHS = 61, 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a data set of 61 samples in 5 shards."""
    return write(tmp_path_factory.mktemp("data"), NUM_SAMPLES)


def _loader(directory: str, *, batch_size: int = 8, num_workers: int = 0, **options: Any) -> StreamingDataLoader:
    names = ("drop_last", "persistent_workers")
    of_loader = {name: options.pop(name) for name in names if name in options}
    dataset = StreamingDataset(directory, shuffle=True, **options)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, **of_loader)


def _epochs(loader: StreamingDataLoader, *, until: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the batches of all remaining epochs, with their epochs."""
    while (epoch := loader.dataset.next_epoch) < until:
        for batch in loader:
            yield epoch, batch["n"].tolist()


def _cut(epochs: Iterator[tuple[int, list[int]]], num_batches: int) -> list[tuple[int, list[int]]]:
    return [batch for _, batch in zip(range(num_batches), epochs, strict=False)]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    batch_size=st.sampled_from([1, 5, 8, 61, 70]),
    drop_last=st.booleans(),
    parts=st.sampled_from([None, 1, 3]),
    is_same_loader=st.booleans(),
)
def test_a_run_that_is_cut_anywhere_continues(
    directory: str,
    cuts: list[int],
    batch_size: int,
    drop_last: bool,
    parts: int | None,
    is_same_loader: bool,
) -> None:
    """Cut again and again, within and between epochs, by an early exit or a new process, the batches are the same."""

    def make() -> StreamingDataLoader:
        return _loader(directory, batch_size=batch_size, drop_last=drop_last, num_canonical_nodes=parts)

    expected = list(_epochs(make(), until=NUM_EPOCHS))
    loader, read = make(), []
    for num_batches in cuts:
        epochs = _epochs(loader, until=NUM_EPOCHS)
        read += _cut(epochs, num_batches)
        state = loader.state_dict()
        epochs.close()
        assert loader.state_dict() == state
        loader = loader if is_same_loader else make()
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    read += _epochs(loader, until=NUM_EPOCHS)
    assert read == expected


@pytest.mark.parametrize(("num_workers", "persistent"), [(1, True), (3, False)])
def test_a_run_with_workers_continues_with_any_number_of_them(
    directory: str, num_workers: int, persistent: bool
) -> None:
    """The batches are those without workers, cut in the middle and at the end of epochs, and with other workers."""
    expected = list(_epochs(_loader(directory), until=NUM_EPOCHS))
    assert len(expected) == 24
    read, state = [], None
    for num_batches, workers in ((5, num_workers), (6, 0), (5, num_workers)):
        loader = _loader(directory, num_workers=workers, persistent_workers=persistent and workers > 0)
        if state is not None:
            loader.load_state_dict(state)
        epochs = _epochs(loader, until=NUM_EPOCHS)
        read += _cut(epochs, num_batches)
        state = loader.state_dict()
        epochs.close()
    loader.load_state_dict(state)
    assert read + list(_epochs(loader, until=NUM_EPOCHS)) == expected


def _global_batches(
    directory: str, state: dict[str, Any] | None, *, num_ranks: int, batch_size: int, num_steps: int, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the samples of each global step of all ranks, and their state, which must be the same on all."""
    steps: list[list[int]] = []
    states = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(num_ranks):
            world = World(rank=rank, num_ranks=num_ranks, ranks_per_node=num_ranks)
            patch.setattr(dataset_module, "current_world", lambda world=world: world)
            loader = _loader(directory, batch_size=batch_size, **options)
            if state is not None:
                loader.load_state_dict(state)
            own = _cut(_epochs(loader, until=2), num_steps)
            for step, (_, batch) in enumerate(own):
                if step == len(steps):
                    steps.append([])
                steps[step] += batch
            states.append(loader.state_dict())
    assert all(other == states[0] for other in states)
    return steps, states[0]


@settings(max_examples=12, deadline=None)
@given(
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=4),
    num_steps=st.integers(1, 3),
    parts=st.sampled_from([1, 2]),
)
def test_a_run_continues_with_any_number_of_ranks(
    directory: str, worlds: list[int], num_steps: int, parts: int
) -> None:
    """At an equal global batch, each global step has the same samples, whatever the number of ranks and its changes."""
    expected, _ = _global_batches(directory, None, num_ranks=1, batch_size=12, num_steps=99, num_canonical_nodes=parts)
    state, done = None, 0
    for num_ranks in worlds:
        steps, state = _global_batches(
            directory,
            state,
            num_ranks=num_ranks,
            batch_size=12 // num_ranks,
            num_steps=num_steps,
            num_canonical_nodes=parts,
        )
        for step in steps:
            # If the samples don't divide evenly, the last step of an epoch repeats some of the earlier ones.
            again = len(step) - len(expected[done])
            assert 0 <= again < num_ranks
            assert set(expected[done]) <= set(step) if again else sorted(expected[done]) == sorted(step)
            done += 1


def test_the_order_is_the_same_on_any_world(directory: str) -> None:
    """A resume takes over the canonical nodes of the first run, so the order stays though the nodes change."""
    read, state = [], {}
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            world = World(rank=rank, num_ranks=2, ranks_per_node=1)
            patch.setattr(dataset_module, "current_world", lambda world=world: world)
            two = _loader(directory, batch_size=4)
            read += [number for _, batch in _cut(_epochs(two, until=1), 3) for number in batch]
            state = two.state_dict()
    one = _loader(directory, batch_size=8)
    one.load_state_dict(state)
    assert sorted(read + [number for batch in batches(one) for number in batch]) == list(range(NUM_SAMPLES))
    assert one.state_dict()["num_canonical_nodes"] == state["num_canonical_nodes"] == 2

"""The law of a resume: at every cut, the samples before and after it are those of an uncut run, in order."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant import ResumableDataLoader, Stream, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming import dataset as dataset_module
from lightning_faulttolerant.streaming.world import World
from tests.foreign import mosaic
from tests.processes import run
from tests.streaming.shards import batches, numbers, write_numbers

NUM_SAMPLES, NUM_EPOCHS = 61, 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a data set of 61 samples in 5 shards."""
    return write_numbers(tmp_path_factory.mktemp("data"), NUM_SAMPLES)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a data set of 40 samples."""
    return write_numbers(tmp_path_factory.mktemp("other"), 40, first=1000)


def _loader(directory: str | None, *, batch_size: int | None = 8, **options: Any) -> StreamingDataLoader:
    of_loader = {name: options.pop(name) for name in ("drop_last", "num_workers", "in_order") if name in options}
    dataset = StreamingDataset(directory, shuffle=True, batch_size=batch_size, **options)
    return StreamingDataLoader(dataset, batch_size=batch_size, **of_loader)


def _place(loader: StreamingDataLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["sample_in_epoch"]


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


def _global_batches(
    state: dict[str, Any] | None, *, num_ranks: int, num_steps: int, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the samples of each global step of ranks on nodes of their own, and their state, the same on all."""
    steps: list[list[int]] = []
    states = []
    for rank in range(num_ranks):
        with pytest.MonkeyPatch.context() as patch:
            world = World(rank=rank, num_ranks=num_ranks, ranks_per_node=1)
            patch.setattr(dataset_module, "current_world", lambda world=world: world)
            loader = _loader(None, batch_size=12 // num_ranks, **options)
            if state is not None:
                loader.load_state_dict(state)
            for step, (_, batch) in enumerate(_cut(_epochs(loader, until=2), num_steps)):
                if step == len(steps):
                    steps.append([])
                steps[step] += batch
            states.append(loader.state_dict())
    assert all(other == states[0] for other in states)
    return steps, states[0]


@settings(max_examples=20, deadline=None)
@given(
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=4),
    num_steps=st.integers(1, 3),
    method=st.sampled_from(["random", "stratified", "per_stream"]),
)
def test_a_run_continues_with_any_number_of_ranks(
    directory: str, other: str, worlds: list[int], num_steps: int, method: str
) -> None:
    """At an equal global batch, each step has the samples of a run on the first number of nodes, on any world."""
    options = {"batching_method": method, "streams": [Stream(local=directory), Stream(local=other)]}
    expected, _ = _global_batches(None, num_ranks=1, num_steps=99, num_canonical_nodes=worlds[0], **options)
    state, done = None, 0
    for num_ranks in worlds:
        steps, state = _global_batches(state, num_ranks=num_ranks, num_steps=num_steps, **options)
        for step in steps:
            # If the samples don't divide evenly, the last step of an epoch repeats some of the earlier ones.
            again = len(step) - len(expected[done])
            assert 0 <= again < num_ranks
            assert set(expected[done]) <= set(step) if again else sorted(expected[done]) == sorted(step)
            done += 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_takes_effect_before_the_first_batch_and_ends_others(directory: str, num_workers: int) -> None:
    """An iterator without a batch so far begins at the place that is loaded; one that has yielded a batch raises."""
    saved = _loader(directory)
    first = [batch["n"].tolist() for batch in itertools.islice(saved, 4)]
    loader = _loader(directory, num_workers=num_workers)
    made = iter(loader)
    loader.load_state_dict(saved.state_dict())
    assert first + batches(made) == batches(_loader(directory))
    assert _place(loader) == (1, 0)
    made = iter(loader)
    next(made)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StreamingError, match="after 1 batches"):  # it would silently jump
        next(made)


def test_a_last_batch_that_is_dropped_is_the_end_of_the_epoch(directory: str) -> None:
    """With drop_last, the state after the last full batch is the next epoch's beginning, not an empty rest."""
    loader = _loader(directory, drop_last=True)
    first = batches(loader)
    assert [len(batch) for batch in first] == [8] * 7
    assert _place(loader) == (1, 0)
    resumed = _loader(directory, batch_size=50, drop_last=True)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "sample_in_epoch": 32})
    assert [len(batch) for batch in batches(resumed)] == [50]  # the rest of 29 samples is no batch


def test_samples_without_batches_are_counted(directory: str) -> None:
    """With batch_size=None each sample is handed out and counted alone, with workers in their turn."""
    loader = _loader(directory, batch_size=None, num_workers=2)
    read = numbers(itertools.islice(loader, 33))
    assert _place(loader) == (0, 33)
    resumed = _loader(directory, batch_size=None, num_workers=1, in_order=False)  # a single worker is in order
    resumed.load_state_dict(loader.state_dict())
    assert read + numbers(resumed) == numbers(_loader(directory))


OWN: dict[str, tuple[Any, bool]] = {
    "generated": (lambda samples: (yield from samples), True),  # it begins with the request for its first sample
    "filtered": (lambda samples: (sample for sample in samples if sample["n"] < 10 or sample["n"] % 5), False),
    "multiplied": (lambda samples: (sample for sample in samples for _ in range(2)), False),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_data_set_that_changes_the_number_of_samples_has_no_wrong_position(tmp_path: Path, kind: str) -> None:
    """At each batch, the state is exact or refused, and then ResumableDataLoader's is exact."""
    changes, keeps_number = OWN[kind]
    own = type("Own", (StreamingDataset,), {"__iter__": lambda self: changes(StreamingDataset.__iter__(self))})
    write_numbers(tmp_path, 36)

    def loader(of: type[Any] = StreamingDataLoader) -> Any:
        return of(own(tmp_path, batch_size=4), batch_size=4)

    whole, refused, running = batches(loader()), list[str](), loader()
    for number, _ in enumerate(running, start=1):
        try:
            state = running.state_dict()
        except StreamingError as error:
            refused.append(str(error))
            continue
        resumed = loader()
        resumed.load_state_dict(state)
        assert batches(resumed) == (whole[number:] or whole)
    assert bool(refused) != keeps_number
    assert all("ResumableDataLoader" in error for error in refused)
    assert running.state_dict()["sample_in_epoch"] == 0
    first, second = loader(ResumableDataLoader), loader(ResumableDataLoader)
    for _ in itertools.islice(first, number // 2):
        state = first.state_dict()
    second.load_state_dict(state)
    assert batches(second) == whole[number // 2 :]


def _read_with_the_original(directory: str, answer: Path) -> None:
    """Write its states in the middle and at the end of an epoch."""
    warnings.simplefilter("ignore")
    tempfile.tempdir = str(answer.parent)  # it leaves lock files
    dataset = mosaic().StreamingDataset(local=directory, batch_size=8, shuffle=True, shuffle_seed=3)
    loader = mosaic().StreamingDataLoader(dataset, batch_size=8)
    states = [loader.state_dict() for _, _ in zip(range(5), loader, strict=False)]
    batches(loader)
    answer.write_text(json.dumps([states[-1], loader.state_dict()]))


def test_a_state_of_the_original_continues_from_the_next_epoch(
    directory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its seed, and with a warning if it is in the middle of an epoch."""
    answer = tmp_path / "answer.json"
    ended = run(functools.partial(_read_with_the_original, directory, answer))
    assert ended.exit_code == 0, ended.output
    for state, warning in zip(json.loads(answer.read_text()), ["in the middle of epoch 0", ""], strict=True):
        caplog.clear()
        loader = _loader(directory)
        loader.load_state_dict(state)
        assert warning in caplog.text
        assert bool(caplog.records) == bool(warning)
        assert loader.state_dict()["epoch"] == state["epoch"] + 1
        whole = _loader(directory, shuffle_seed=3)
        epochs = [batches(whole) for _ in range(3)]
        assert batches(loader) == epochs[loader.dataset.next_epoch - 1]

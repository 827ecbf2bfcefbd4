"""A run that is cut has the samples of an uncut run, in order. Batches are torch's; their memory is used again."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import tempfile
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import default_collate

from lightning_faulttolerant import ResumableDataLoader, Stream, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming import MDSWriter, dataset as dataset_module
from lightning_faulttolerant.streaming.loader import collate
from lightning_faulttolerant.streaming.world import World
from tests.foreign import mosaic
from tests.processes import Child, run
from tests.streaming.shards import batches, numbers, same, write_numbers

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


Pair = namedtuple("Pair", ["left", "right"])

ARRAYS = {
    f"{dtype} {'x'.join(map(str, shape)) or 'scalar'}": [
        {"array": np.full(shape, number, dtype=dtype)} for number in range(3)
    ]
    for dtype in ("bool", "uint8", "uint16", "int32", "uint64", "int64", "float16", "float32", "float64", "complex64")
    for shape in ((), (4,), (2, 3), (0,), (2, 0), (5000,))
}
COLUMNS: dict[str, list[Any]] = {
    "integers": [0, -1, 2**62],
    "booleans": [True, False, True],
    "an integer and a float": [1, 2.5, 3],
    "floats": [1.5, float("nan"), 1e300],
    "strings": ["a", "", "ü"],
    "bytes": [b"a", b"", b"\x00"],
    "numpy integers": [np.int32(1), np.int32(2), np.int32(3)],
    "tensors": [torch.ones(2), torch.zeros(2), torch.ones(2)],
    "lists of arrays": [[np.ones(2), 1], [np.zeros(2), 2], [np.ones(2), 3]],
    "named tuples": [Pair(1, "a"), Pair(2, "b"), Pair(3, "c")],
    "nested dicts": [{"a": {"b": np.ones(2)}, "c": 1}] * 3,
    "arrays that are not contiguous": [np.arange(12).reshape(3, 4).T] * 3,
    "arrays that can't be written to": [np.frombuffer(bytes(8), np.int16)] * 3,
    "arrays of two dtypes": [np.ones(2, np.float32), np.ones(2, np.float64), np.ones(2, np.float32)],
}
WRONG: dict[str, list[Any]] = {
    "shapes that differ": [{"x": np.ones(2)}, {"x": np.ones(3)}],
    "a column that is missing": [{"x": 1}, {"y": 1}],
    "arrays of strings": [{"x": np.array(["a"])}, {"x": np.array(["b"])}],
    "arrays of another byte order": [{"x": np.ones(2, ">i4")}, {"x": np.ones(2, ">i4")}],
    "a kind that nobody knows": [{"x": object()}, {"x": object()}],
    "nothing": [{"x": None}, {"x": None}],
}
CASES = {**ARRAYS, **{name: [{"column": value} for value in values] for name, values in COLUMNS.items()}, **WRONG}


def outcome(function: Any, samples: Any) -> Any:
    """Return the result, or the exception's type and text."""
    try:
        return function(samples)
    except Exception as error:  # noqa: BLE001 -- whatever it is, both must raise it
        return type(error), str(error)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_batch_is_that_of_default_collate(name: str) -> None:
    """Each kind of value gives torch's batch or error: in a dict, alone, and in a batch of one."""
    for samples in (CASES[name], CASES[name][:1], COLUMNS.get(name, [])):
        assert same(outcome(collate, samples), outcome(default_collate, samples))


def test_batch_shares_no_memory_with_its_samples() -> None:
    """Writing to a batch leaves the arrays of its samples as they are, also in a batch of one."""
    for size in (4, 5000):
        array = np.zeros(size)
        collate([{"array": array}])["array"] += 1
        assert not array.any()


NUM_ROWS, BATCH_SIZE = 64, 2
WRITTEN = {
    "number": "int",
    "large": "ndarray:int32:50,100",
    "small": "ndarray:float32:3",
    "varying": "ndarray",
    "name": "str",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of numbers, of arrays small and large, of arrays that grow, and of strings."""
    where = tmp_path_factory.mktemp("samples")
    with MDSWriter(out=str(where), columns=WRITTEN, size_limit=200_000) as writer:
        for i in range(NUM_ROWS):
            large, small = np.arange(i, i + 5000, dtype=np.int32).reshape(50, 100), np.full(3, i, np.float32)
            grows = np.full(1 + i // BATCH_SIZE * 4000, i, np.int64)  # the last ones are larger than a batch should be
            writer.write({"number": i, "large": large, "small": small, "varying": grows, "name": f"sample {i}"})
    return where


def loader_of(rows: Path, **options: Any) -> StreamingDataLoader:
    """Return a loader with a worker, if nothing else is asked for."""
    dataset = StreamingDataset(rows, batch_size=BATCH_SIZE)
    return StreamingDataLoader(dataset, BATCH_SIZE, **{"num_workers": 1, **options})


def expected_of(rows: Path) -> list[dict[str, Any]]:
    """Return the batches that torch makes of the samples."""
    samples = list(StreamingDataset(rows))
    return [default_collate(samples[at : at + BATCH_SIZE]) for at in range(0, NUM_ROWS, BATCH_SIZE)]


def test_others_than_the_loaders_own_collate_get_arrays_of_their_own(rows: Path) -> None:
    """A custom collate_fn, also one that is set later, and a plain iteration may write to samples."""
    later = loader_of(rows, num_workers=0)
    later.collate_fn = list
    given = loader_of(rows, num_workers=0, collate_fn=list)
    for samples in (list(later.dataset), [sample for batch in given for sample in batch], next(iter(later))):
        assert all(sample["large"].flags.writeable and sample["large"].base is None for sample in samples)


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"persistent_workers": True}, {"num_workers": 2, "drop_last": True}], ids=str
)
def test_batches_of_a_loader_are_those_of_torch(rows: Path, options: dict[str, Any]) -> None:
    """All batches of two epochs are equal, kept together or not, and each array has memory of its size."""
    expected, loader, places = expected_of(rows), loader_of(rows, **options), set()
    assert same(list(loader), expected)
    for batch, other in zip(loader, expected, strict=True):
        assert same(batch, other)
        assert batch["large"].untyped_storage().nbytes() == 4 * batch["large"].numel()
        places.add(batch["large"].data_ptr())
        batch["large"] += 1
    assert loader.collate_fn is collate
    # Batches that are gone leave their place to others.
    assert len(places) < len(expected) / 2 or loader.num_workers == 0


def test_every_reference_keeps_the_memory(rows: Path) -> None:
    """Whatever refers to a batch, its storage or an array too, sees its values, however many batches follow."""
    for keep in (torch.Tensor.detach, torch.Tensor.untyped_storage, torch.Tensor.numpy):
        batches = iter(loader_of(rows))
        kept = [keep(batch["large"]) for batch in itertools.islice(batches, 3)]
        for _ in batches:
            pass
        expected = [keep(batch["large"]) for batch in expected_of(rows)[:3]]
        assert [bytes(np.asarray(found)) for found in kept] == [bytes(np.asarray(other)) for other in expected]


def test_a_child_reads_its_batch_during_training(rows: Path) -> None:
    """A process that draws a batch while training continues sees that batch, not a later one."""
    ready = multiprocessing.get_context("fork").Event()
    batches = iter(loader_of(rows))
    kept = [next(batches)]
    expected = kept[0]["large"].clone()

    def look() -> None:
        ready.wait()
        assert torch.equal(kept[0]["large"], expected)

    with Child(look) as process:
        kept.clear()
        for _ in batches:
            pass
        ready.set()
        assert process.wait() == 0

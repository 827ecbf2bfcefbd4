"""Batches are those of torch's collate, and their memory is used again once nothing refers to it, never before."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_faulttolerant.streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming.loader import collate
from tests.processes import Child
from tests.streaming.shards import same

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


NUM_SAMPLES, BATCH_SIZE = 64, 2
WRITTEN = {
    "number": "int",
    "large": "ndarray:int32:50,100",
    "small": "ndarray:float32:3",
    "varying": "ndarray",
    "name": "str",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of numbers, of arrays small and large, of arrays that grow, and of strings."""
    where = tmp_path_factory.mktemp("samples")
    with MDSWriter(out=str(where), columns=WRITTEN, size_limit=200_000) as writer:
        for i in range(NUM_SAMPLES):
            large, small = np.arange(i, i + 5000, dtype=np.int32).reshape(50, 100), np.full(3, i, np.float32)
            grows = np.full(1 + i // BATCH_SIZE * 4000, i, np.int64)  # the last ones are larger than a batch should be
            writer.write({"number": i, "large": large, "small": small, "varying": grows, "name": f"sample {i}"})
    return where


def loader_of(directory: Path, **options: Any) -> StreamingDataLoader:
    """Return a loader with a worker, if nothing else is asked for."""
    dataset = StreamingDataset(directory, batch_size=BATCH_SIZE)
    return StreamingDataLoader(dataset, BATCH_SIZE, **{"num_workers": 1, **options})


def expected_of(directory: Path) -> list[dict[str, Any]]:
    """Return the batches that torch makes of the samples."""
    samples = list(StreamingDataset(directory))
    return [default_collate(samples[at : at + BATCH_SIZE]) for at in range(0, NUM_SAMPLES, BATCH_SIZE)]


def test_others_than_the_loaders_own_collate_get_arrays_of_their_own(directory: Path) -> None:
    """A custom collate_fn, also one that is set later, and a plain iteration may write to samples."""
    later = loader_of(directory, num_workers=0)
    later.collate_fn = list
    given = loader_of(directory, num_workers=0, collate_fn=list)
    for samples in (list(later.dataset), [sample for batch in given for sample in batch], next(iter(later))):
        assert all(sample["large"].flags.writeable and sample["large"].base is None for sample in samples)


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"persistent_workers": True}, {"num_workers": 2, "drop_last": True}], ids=str
)
def test_batches_of_a_loader_are_those_of_torch(directory: Path, options: dict[str, Any]) -> None:
    """All batches of two epochs are equal, kept together or not, and each array has memory of its size."""
    expected, loader, places = expected_of(directory), loader_of(directory, **options), set()
    assert same(list(loader), expected)
    for batch, other in zip(loader, expected, strict=True):
        assert same(batch, other)
        assert batch["large"].untyped_storage().nbytes() == 4 * batch["large"].numel()
        places.add(batch["large"].data_ptr())
        batch["large"] += 1
    assert loader.collate_fn is collate
    # Batches that are gone leave their place to others.
    assert len(places) < len(expected) / 2 or loader.num_workers == 0


def test_every_reference_keeps_the_memory(directory: Path) -> None:
    """Whatever refers to a batch, its storage or an array too, sees its values, however many batches follow."""
    for keep in (torch.Tensor.detach, torch.Tensor.untyped_storage, torch.Tensor.numpy):
        batches = iter(loader_of(directory))
        kept = [keep(batch["large"]) for batch in itertools.islice(batches, 3)]
        for _ in batches:
            pass
        expected = [keep(batch["large"]) for batch in expected_of(directory)[:3]]
        assert [bytes(np.asarray(found)) for found in kept] == [bytes(np.asarray(other)) for other in expected]


def test_a_child_reads_its_batch_during_training(directory: Path) -> None:
    """A process that draws a batch while training continues sees that batch, not a later one."""
    ready = multiprocessing.get_context("fork").Event()
    batches = iter(loader_of(directory))
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

"""Our collate gives the same results as torch's."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_faulttolerant.streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming.loader import collate
from tests.streaming.same_batches import assert_same

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
    "an integer and a boolean": [1, True, 0],
    "an integer and a float": [1, 2.5, 3],
    "a float and an integer": [1.5, 2, 3],
    "floats": [1.5, float("nan"), 1e300],
    "strings": ["a", "", "ü"],
    "bytes": [b"a", b"", b"\x00"],
    "numpy integers": [np.int32(1), np.int32(2), np.int32(3)],
    "numpy floats": [np.float16(1.5), np.float16(2.5), np.float16(3.5)],
    "numpy booleans": [np.True_, np.False_, np.True_],
    "tensors": [torch.ones(2), torch.zeros(2), torch.ones(2)],
    "lists of integers": [[1, 2], [3, 4], [5, 6]],
    "lists of arrays": [[np.ones(2), 1], [np.zeros(2), 2], [np.ones(2), 3]],
    "tuples": [(1, "a"), (2, "b"), (3, "c")],
    "named tuples": [Pair(1, "a"), Pair(2, "b"), Pair(3, "c")],
    "nested dicts": [{"a": {"b": np.ones(2)}, "c": 1}] * 3,
    "ordered dicts": [OrderedDict(b=1, a=2)] * 3,
    "arrays that are not contiguous": [np.arange(12).reshape(3, 4).T] * 3,
    "arrays that can't be written to": [np.frombuffer(bytes(8), np.int16)] * 3,
    "arrays of two dtypes": [np.ones(2, np.float32), np.ones(2, np.float64), np.ones(2, np.float32)],
}
CASES = {**ARRAYS, **{name: [{"column": value} for value in values] for name, values in COLUMNS.items()}}


def outcome(function: Any, samples: Any) -> Any:
    """Return the result, or the type of the exception."""
    try:
        return function(samples)
    except Exception as error:  # noqa: BLE001 -- whatever it is, both must raise it
        return type(error)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_batch_is_that_of_default_collate(name: str) -> None:
    """Each kind of value gives the same batch as torch's own collate, alone and in a batch of one."""
    for samples in (CASES[name], CASES[name][:1]):
        assert_same(outcome(collate, samples), outcome(default_collate, samples))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_samples_that_are_no_dicts_are_left_to_torch(name: str) -> None:
    """A batch of bare values is torch's own."""
    assert_same(outcome(collate, COLUMNS[name]), outcome(default_collate, COLUMNS[name]))


WRONG: dict[str, list[Any]] = {
    "shapes that differ": [{"x": np.ones(2)}, {"x": np.ones(3)}],
    "a column that is missing": [{"x": 1}, {"y": 1}],
    "arrays of strings": [{"x": np.array(["a"])}, {"x": np.array(["b"])}],
    "arrays of another byte order": [{"x": np.ones(2, ">i4")}, {"x": np.ones(2, ">i4")}],
    "numbers that are too large": [{"x": 2**64}, {"x": 1}],
    "a kind that nobody knows": [{"x": object()}, {"x": object()}],
    "nothing": [{"x": None}, {"x": None}],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_a_batch_is_torchs_error(name: str) -> None:
    """Values that default_collate refuses are refused with the same error."""
    with pytest.raises((RuntimeError, KeyError, TypeError, OverflowError, ValueError)) as expected:
        default_collate(WRONG[name])
    with pytest.raises(expected.type) as found:
        collate(WRONG[name])
    assert str(found.value) == str(expected.value)


def test_batch_shares_no_memory_with_its_samples() -> None:
    """Writing to a batch leaves the arrays of its samples as they are, also in a batch of one."""
    for size in (4, 5000):
        array = np.zeros(size)
        collate([{"array": array}])["array"] += 1
        assert not array.any()


@pytest.fixture
def dataset(tmp_path: Path) -> StreamingDataset:
    """Return five samples of a number, a small array, and one that is large enough to be lent."""
    columns = {"large": "ndarray:int32:50,100", "number": "int", "small": "ndarray:int32:4"}
    with MDSWriter(out=str(tmp_path), columns=columns, size_limit=50_000) as writer:
        for number in range(5):
            large = np.arange(number, number + 5000, dtype=np.int32).reshape(50, 100)
            writer.write({"large": large, "number": number, "small": np.full(4, number, np.int32)})
    return StreamingDataset(tmp_path, batch_size=2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streaming_loader_collates_so(dataset: StreamingDataset, num_workers: int) -> None:
    """The loader's batches are those of default_collate, and writing to one changes nothing else."""
    samples = list(dataset)
    expected = [default_collate(samples[begin : begin + 2]) for begin in (0, 2, 4)]
    loader = StreamingDataLoader(dataset, batch_size=2, num_workers=num_workers)
    assert loader.collate_fn is collate
    for batches in (list(loader), list(loader)):
        assert_same(batches, expected)
        for batch in batches:
            batch["large"] += 1


def test_others_than_the_loaders_own_collate_get_arrays_of_their_own(dataset: StreamingDataset) -> None:
    """A custom collate_fn, also one that is set later, and a plain iteration may keep samples and write to them."""
    loader = StreamingDataLoader(dataset, batch_size=2, collate_fn=list)
    later = StreamingDataLoader(dataset, batch_size=2)
    later.collate_fn = list
    for samples in (list(dataset), [sample for batch in loader for sample in batch], next(iter(later))):
        assert all(sample["large"].flags.writeable and sample["large"].base is None for sample in samples)


class Doubled(StreamingDataset):
    """Changes the samples that it reads."""

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            sample["large"] *= 2
            yield sample


def test_a_data_set_that_changes_its_samples_gets_them_as_its_own(dataset: StreamingDataset) -> None:
    """A derived class may write to the samples it iterates over, also with the loader's own collate."""
    doubled = Doubled(dataset.streams[0].directory, batch_size=2)
    for num_workers in (0, 1):
        found = next(iter(StreamingDataLoader(doubled, batch_size=2, num_workers=num_workers)))
        assert torch.equal(found["large"], 2 * next(iter(StreamingDataLoader(dataset, batch_size=2)))["large"])

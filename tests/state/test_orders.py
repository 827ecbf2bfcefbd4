"""The order of a list, an array, or a mapping is kept in few bytes, and put into the same elements."""

from __future__ import annotations

import random
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_faulttolerant.state import orders
from lightning_faulttolerant.state.orders import NotPlainError, directory_of, text_of

NUM = 40


@dataclass
class Sample:
    """A plain object."""

    name: str
    boxes: list[int]


VALUES: dict[str, list[Any]] = {
    "numbers": list(range(NUM)),
    "fractions": [i / 7 for i in range(NUM)],
    "some numbers twice": [i % 5 for i in range(NUM)],
    "names": [f"{i:02d}.png" for i in range(NUM)],
    "paths": [Path(f"/data/{i:02d}.png") for i in range(NUM)],
    "labeled": [(f"/data/{i:02d}.png", i % 3) for i in range(NUM)],
    "records": [{"name": f"{i:02d}", "boxes": [[i, 2]], "mask": None} for i in range(NUM)],
    "objects": [Sample(f"{i:02d}", [i]) for i in range(NUM)],
    "tensors": [(torch.full((2, 2), float(i)), i) for i in range(NUM)],
    "mixed": [i if i % 2 else str(i) for i in range(NUM)],
}
KINDS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "mapping": lambda values: {f"key {i}": value for i, value in enumerate(values)},
}


def shuffled(values: list[Any], seed: int) -> list[Any]:
    """Return the elements in the order of a seed."""
    found = list(values)
    random.Random(seed).shuffle(found)
    return found


def texts(value: Any) -> list[str]:
    """Return the texts of all elements, in their order."""
    return [text_of(one) for one in (value.items() if isinstance(value, dict) else value)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VALUES)
def test_same_elements_come_in_the_same_order(kind: str, name: str) -> None:
    """Another order of the same elements becomes the one that was kept; their digests differ."""
    first, second = (KINDS[kind](shuffled(VALUES[name], seed)) for seed in (0, 1))
    kept = orders.kept_order(first)
    assert kept is not None
    assert orders.digest(first) != orders.digest(second)
    found = orders.in_order(second, kept)
    assert texts(found) == texts(first)
    if kind != "tuple":
        assert orders.fill(second, found)
        assert type(second) is type(first)
        assert orders.digest(second) == orders.digest(first)
    else:
        assert not orders.fill(second, found)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64", "<U8"])
def test_arrays(dtype: str) -> None:
    """A one-dimensional array is filled in place."""
    first, second = (np.array(shuffled(list(range(NUM)), seed)).astype(dtype) for seed in (0, 1))
    kept = orders.kept_order(first)
    assert kept is not None
    memory = second.ctypes.data
    assert orders.fill(second, orders.in_order(second, kept))
    assert second.tolist() == first.tolist()
    assert second.ctypes.data == memory
    second.flags.writeable = False
    assert not orders.fill(second, orders.in_order(second, kept))


def test_tensors() -> None:
    """A tensor is filled in place; one with more dimensions has no order."""
    first, second = (torch.tensor(shuffled(list(range(NUM)), seed)) for seed in (0, 1))
    kept = orders.kept_order(first)
    assert kept is not None
    assert orders.fill(second, orders.in_order(second, kept))
    assert torch.equal(first, second)
    assert orders.is_ordered(first)
    assert not orders.is_ordered(first.reshape(2, -1))
    assert not orders.is_ordered(np.zeros((2, 2)))


@pytest.mark.parametrize("name", VALUES)
def test_other_elements_have_no_order(name: str) -> None:
    """If an element differs, or is missing, nothing is put in order."""
    first = shuffled(VALUES[name], 0)
    kept = orders.kept_order(first)
    assert kept is not None
    other = text_of(first[0])
    assert orders.in_order([other, *first[1:]], kept) is None
    assert orders.in_order(first[1:], kept) is None
    assert orders.in_order([*first, first[0]], kept) is None
    assert orders.in_order(dict.fromkeys(range(NUM)), kept) is None


@pytest.mark.parametrize("name", ["numbers", "names", "paths", "labeled"])
def test_what_is_sorted_is_not_kept(name: str) -> None:
    """A list in its natural order was not drawn."""
    assert orders.kept_order(VALUES[name]) is None
    assert orders.kept_order({i: i for i in range(NUM)}) is None


def test_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element costs at most 4 bytes, labels much less; of very long lists nothing is kept."""
    numbers = shuffled(list(range(10_000)), 0)
    kept: Any = orders.kept_order([f"/a/long/name/of/a/directory/{i}" for i in numbers])
    assert len(kept["values"]["order"]) < 4.1 * len(numbers)
    monkeypatch.setattr(orders, "_MAX_ELEMENTS", 9_999)
    assert orders.kept_order(numbers) is None
    monkeypatch.setattr(orders, "_MAX_ELEMENTS", 10_000)
    assert orders.kept_order(numbers) is not None
    monkeypatch.setattr(orders, "_MAX_CHARACTERS", 10_000)
    assert orders.kept_order(numbers) is None


def test_directory() -> None:
    """The common directory of all names is left out, but no part of a name."""
    assert directory_of(["/data/train/1.png", "/data/test/2.png"]) == "/data/"
    assert directory_of([("/data/train/1.png", 0), ("/data/train/11.png", 1)]) == "/data/train/"
    assert directory_of(["cat", "car"]) == ""
    assert directory_of([1, 2]) == ""
    assert directory_of(["/data/1.png"]) == "/data/"
    first = [f"/data/{i:02d}.png" for i in shuffled(list(range(NUM)), 0)]
    kept: Any = orders.kept_order(first)
    moved = sorted(name.replace("/data", "/mnt/else") for name in first)
    assert orders.in_order(moved, kept) == [name.replace("/data", "/mnt/else") for name in first]


@pytest.mark.parametrize("value", [nn.Linear(1, 1), print, torch.Generator(), list(range(10_000)), object()], ids=type)
def test_what_is_not_plain(value: Any) -> None:
    """A value whose text may differ in another process has no text."""
    with pytest.raises(NotPlainError):
        text_of(value)
    with pytest.raises(NotPlainError):
        orders.digest([value])
    assert orders.kept_order([value, value]) is None


def test_texts_tell_values_apart() -> None:
    """Numbers, their texts, and their types are different; sets have no order, mappings have one."""
    values = [1, 1.0, True, "1", None, [1], (1, 2), [[1], 2], {"a": 1}, {"a": [1]}, np.float32(1), torch.ones(1)]
    assert len({text_of(value) for value in values}) == len(values)
    assert text_of({"b", "a"}) == text_of({"a", "b"})
    assert text_of({"a": 1, "b": 2}) != text_of({"b": 2, "a": 1})
    assert text_of(float("nan")) == text_of(float("nan"))


def test_names_that_are_new_in_each_process() -> None:
    """A UUID in a mapping does not count, as it is new in each process; in a list it does; other texts always count."""
    one, other = ({"uuid": str(uuid.uuid4()), "key": uuid.uuid4(), "name": "a"} for _ in range(2))
    assert orders.digest(one) == orders.digest(other)
    assert orders.digest(one) != orders.digest({**other, "name": "b"})
    assert orders.digest(one) != orders.digest({**other, "uuid": "b"})
    assert orders.digest(list(one.values())) != orders.digest(list(other.values()))
    assert orders.digest({str(uuid.uuid4()): 1}) != orders.digest({str(uuid.uuid4()): 1})


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
def test_large_arrays_are_not_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array with more elements than the limit has no order, so it is neither read nor converted to a list."""
    value = make([2, 1, 0])
    monkeypatch.setattr(orders, "_MAX_ELEMENTS", 3)
    assert orders.is_ordered(value)
    monkeypatch.setattr(orders, "_MAX_ELEMENTS", 2)
    assert not orders.is_ordered(value)


def test_corpus_on_a_disk(tmp_path: Path) -> None:
    """A memory-mapped file of 40 GB is skipped immediately."""
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(40 * 2**30)
    assert not orders.is_ordered(np.memmap(path, dtype=np.uint16, mode="r"))


def test_arrays_become_no_lists() -> None:
    """The numbers of an array are compared and put in order without a conversion to a list."""

    class Guarded(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            raise AssertionError("made a list")

    first, second = (np.array(shuffled(list(range(NUM)), seed)).view(Guarded) for seed in (0, 1))
    kept = orders.kept_order(first)
    assert kept is not None
    assert orders.digest(first) != orders.digest(second)
    assert orders.fill(second, orders.in_order(second, kept))
    assert orders.digest(first) == orders.digest(second)


def test_names_that_are_the_same_in_each_directory() -> None:
    """Files with one name in many directories are distinguished, even if the data has moved."""
    first, second = ([f"/data/case_{i}/volume.nii" for i in shuffled(list(range(NUM)), seed)] for seed in (0, 1))
    assert orders.digest(first) != orders.digest(second)
    moved = [name.replace("/data", "/mnt/else") for name in first]
    assert orders.digest(first) == orders.digest(moved)
    kept = orders.kept_order(first)
    assert kept is not None
    assert orders.in_order(second, kept) == first
    labeled = [(name, 0) for name in second]
    assert orders.digest(labeled) != orders.digest([(name, 0) for name in first])


def test_an_element_that_holds_itself_is_not_plain() -> None:
    """It has no text: the digest refuses it and does not loop."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlainError):
        orders.digest([loop])

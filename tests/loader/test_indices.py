"""Index batches come out of a checkpoint with the same values and the same types."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.loader.index_record import NotKept, pack_indices, unpack_indices

plain = st.integers() | st.floats(allow_nan=False) | st.text() | st.booleans() | st.none()
batches = st.lists(
    st.lists(st.integers()) | st.recursive(plain, lambda inner: st.lists(inner) | st.tuples(inner, inner), max_leaves=8)
)


def safe(state: Any) -> Any:
    """Return `state` as it comes out of a checkpoint that was loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def typed(value: Any) -> Any:
    """Return `value` with all its types, for a comparison that distinguishes 1, True, and 1.0."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), value


@given(given_batches=batches)
def test_plain_indices_come_back(given_batches: list[Any]) -> None:
    """Integers, strings, flags, and any nesting of tuples and lists of them come back with the same types."""
    assert typed(unpack_indices(safe(pack_indices(given_batches)))) == typed(given_batches)


@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True])])
def test_tensors_come_back(value: torch.Tensor) -> None:
    """Tensors keep their dtype and shape."""
    [found] = unpack_indices(safe(pack_indices([value])))
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert torch.equal(found, value)


@pytest.mark.parametrize("value", [np.int64(3), np.array([1, 2], dtype=np.int32), np.array([], dtype=np.uint8)])
def test_arrays_and_numpy_numbers_come_back(value: Any) -> None:
    """NumPy's arrays and numbers keep their types."""
    [found] = unpack_indices(safe(pack_indices([value])))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.tolist() == value.tolist()


def test_two_dimensional_empty_and_mixed_batches_come_back() -> None:
    """A batch may mix kinds; an empty batch stays an empty list."""
    given_batches = [[], [1, True], [(1, torch.tensor(2))], (3, [4])]
    assert typed(unpack_indices(safe(pack_indices(given_batches)))[:2]) == typed(given_batches[:2])
    assert unpack_indices(pack_indices(given_batches))[3] == (3, [4])


def test_dicts_and_bytes_come_back() -> None:
    """A dict of plain values is the same, in its order; bytes are bytes."""
    [found] = unpack_indices(safe(pack_indices([[{"video": "a.mp4", 3: (1, 2)}, b"x"]])))
    assert typed(found) == typed([{"video": "a.mp4", 3: (1, 2)}, b"x"])
    assert list(found[0]) == ["video", 3]


class Clip(NamedTuple):
    """A part of a video."""

    video: str
    start: int


@pytest.mark.parametrize("index", [{2}, Clip("a.mp4", 3), object(), True.__class__, lambda: 1])
def test_batch_that_holds_an_object_is_not_kept(index: Any) -> None:
    """A batch that would come back as something else, or not at all, is left to the sampler; only its size is kept."""
    found = unpack_indices(safe(pack_indices([[1, index, 5], [3]])))
    assert found == [NotKept(3), [3]]
    assert len(found[0]) == 3

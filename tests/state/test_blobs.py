"""Bytes travel as uint8 tensors."""

from __future__ import annotations

import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_faulttolerant.state.blobs import BlobInterner, blob_to_tensor, tensor_to_blob, unpack_blobs

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@given(blob=st.binary(max_size=300))
def test_tensor_holds_the_bytes(blob: bytes) -> None:
    """Any bytes, none included, become a uint8 tensor of their length and come back."""
    tensor = blob_to_tensor(blob)
    assert tensor.dtype == torch.uint8
    assert tensor.tolist() == list(blob)
    assert tensor_to_blob(tensor) == blob


def test_bytes_of_a_view_are_those_that_it_shows() -> None:
    """A tensor that is not contiguous gives the bytes of its elements in order, and all bytes of wide elements."""
    tensor = torch.arange(6, dtype=torch.uint8).reshape(2, 3).T
    assert tensor_to_blob(tensor) == bytes([0, 3, 1, 4, 2, 5])
    assert tensor_to_blob(torch.tensor([1, 258], dtype=torch.int16)) == b"\x01\x00\x02\x01"


def test_tensor_is_a_copy() -> None:
    """Changing the tensor leaves the bytes, which may be keys somewhere, as they are."""
    blob = b"abc"
    blob_to_tensor(blob).zero_()
    assert blob == b"abc"


@given(state=nested)
def test_nested_state_comes_back_through_a_safe_file(state: object) -> None:
    """Any nesting of dicts, lists and plain values loads with ``weights_only=True`` and is the same again."""
    file = io.BytesIO()
    torch.save(BlobInterner().pack(state), file)
    file.seek(0)
    assert unpack_blobs(torch.load(file, weights_only=True)) == state


def test_equal_bytes_are_stored_once() -> None:
    """Equal bytes become one tensor, so that the file holds them once."""
    interner = BlobInterner()
    blob = bytes(range(256)) * 64
    packed = interner.pack({"a": blob, "b": [bytes(blob)]})
    assert packed["a"] is packed["b"][0]
    once, twice = io.BytesIO(), io.BytesIO()
    torch.save({"a": packed["a"]}, once)
    torch.save(packed, twice)
    assert twice.tell() < once.tell() + len(blob) / 2


def test_other_tensors_pass_unchanged() -> None:
    """Only uint8 tensors are bytes: floats and flags stay the tensors that they are."""
    state = {"weights": torch.ones(2), "flags": [torch.tensor([True])]}
    assert unpack_blobs(BlobInterner().pack(state)) == state


def test_tensors_of_bytes_stay_tensors() -> None:
    """A uint8 tensor that is part of the state comes back as a tensor of its shape, beside bytes."""
    state = {"mask": torch.tensor([[1, 0], [2, 255]], dtype=torch.uint8), "blob": b"ab", "list": [torch.ones(2)]}
    found = unpack_blobs(BlobInterner().pack(state))
    assert found["blob"] == b"ab"
    assert found["mask"].dtype == torch.uint8
    assert found["mask"].tolist() == [[1, 0], [2, 255]]

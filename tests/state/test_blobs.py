"""Bytes are stored in one uint8 tensor."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state.packing import POOL, pack_blobs, tensor_to_blob, unpack_blobs
from tests.damage import bytes_of
from tests.state.objects.round_trips import through_a_file

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


def test_bytes_of_a_view_are_those_that_it_shows() -> None:
    """A non-contiguous tensor yields the bytes of its elements in order, and all bytes of wide elements."""
    tensor = torch.arange(6, dtype=torch.uint8).reshape(2, 3).T
    assert tensor_to_blob(tensor) == bytes([0, 3, 1, 4, 2, 5])
    assert tensor_to_blob(torch.tensor([1, 258], dtype=torch.int16)) == b"\x01\x00\x02\x01"


@given(state=nested)
def test_nested_state_comes_back_through_a_safe_file(state: object) -> None:
    """Any nesting of dicts, lists and plain values loads with ``weights_only=True`` and is equal again."""
    assert through_a_file(state) == state


def size(state: object) -> int:
    """Return the length of a file of `state`."""
    return len(bytes_of(state))


def test_equal_bytes_are_stored_once() -> None:
    """The file holds equal bytes once, and similar bytes in hardly more space."""
    blob = random.Random(0).randbytes(10_000)
    once = size(pack_blobs({"a": blob}))
    assert size(pack_blobs({"a": blob, "b": [bytes(blob)]})) < once + 100
    assert size(pack_blobs({"a": blob, "b": [b"!" + blob[:5000] + b"?" + blob[5000:]]})) < once + 300


def test_many_bytes_cost_one_record() -> None:
    """Twenty short blobs cost little more than one: they are not separate tensors."""
    one, twenty = ({str(i): bytes([i, 1]) for i in range(number)} for number in (1, 20))
    assert size(pack_blobs(twenty)) - size(pack_blobs(one)) < 20 * 40


def test_tensors_pass_unchanged() -> None:
    """Tensors stay as they are, even those of uint8."""
    state = {"weights": torch.ones(2), "flags": [torch.tensor([True])], "image": torch.ones(3, dtype=torch.uint8)}
    assert unpack_blobs(pack_blobs(state)) == state


@pytest.mark.parametrize("state", [{POOL: 1}, {"part": [{"blob": 3}]}])
def test_names_that_the_pool_needs_are_refused(state: dict[str, object]) -> None:
    """A state that looks like a packed one is an error, not another state."""
    with pytest.raises(ValueError, match="A state can't h"):
        pack_blobs(state)

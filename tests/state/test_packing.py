"""Bytes are stored in one uint8 tensor, and a state as its difference from another one."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state.packing import (
    POOL,
    difference,
    digests_of,
    pack_blobs,
    patched,
    tensor_to_blob,
    unpack_blobs,
)
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


# Differences

_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=3))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=8,
)
_STATES = st.dictionaries(st.sampled_from("abcd"), _VALUES, max_size=4)


def _without_order_of_keys(state: Any) -> str:
    return repr(state)  # dicts print in their order, so it is compared too


@given(reference=_STATES, state=_STATES)
def test_state_comes_back(reference: dict[str, Any], state: dict[str, Any]) -> None:
    """The second state comes back from the first and the difference, in its order, whatever the two hold."""
    delta = difference(state, digests_of(reference))
    assert _without_order_of_keys(patched(reference, delta)) == _without_order_of_keys(state)


def test_what_is_equal_is_not_kept() -> None:
    """Of a state that differs in one leaf, only that leaf is kept."""
    reference = {"a": {"x": torch.arange(3), "y": b"abc"}, "b": [1, 2]}
    state = {"a": {"x": torch.arange(3), "y": b"abd"}, "b": [1, 2]}
    delta = difference(state, digests_of(reference))
    assert delta == {"keys": ["a", "b"], "own": {"a": {"keys": ["x", "y"], "own": {"y": [b"abd"]}}}}


@pytest.mark.parametrize(
    "pair",
    [
        (1, True), (1, 1.0), ([1], (1, 1)), (b"1", "1"), (0.0, -0.0), (None, "None"), ([[1], [2]], [[1, 2], []]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2), torch.zeros(1, 2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])), ([b"a", b"b"], [b"ab", b""]), ({}, []),
    ],
)  # fmt: skip
def test_values_that_look_alike_are_told_apart(pair: tuple[Any, Any]) -> None:
    """Two values of different types, shapes or bits are never taken for equal."""
    one, other = pair
    assert digests_of({"a": one}) != digests_of({"a": other})


def test_same_bits_are_equal_wherever_they_lie() -> None:
    """A tensor equals a contiguous copy of it, a NaN itself, and a method that of another object, pickled or not."""
    value = torch.tensor([[1.0, float("nan")], [2.0, 3.0]]).t()
    assert digests_of({"a": value}) == digests_of({"a": value.contiguous()})
    assert digests_of({"a": threading.Event().set}) == digests_of({"a": threading.Event().set})


def test_what_the_reference_has_lost_is_left_out() -> None:
    """A part that was equal, and that the reference no longer has, is left out: it comes from elsewhere."""
    delta = difference({"a": 1, "b": 2}, digests_of({"a": 1, "b": 3}))
    assert patched({}, delta) == {"b": 2}

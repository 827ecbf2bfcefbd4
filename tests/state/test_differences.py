"""A state is kept as its difference from another one, and comes back whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state.packing import difference, digests_of, patched

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

"""Sums of bits distinguish tensors that have drifted."""

from __future__ import annotations

import pytest
import torch

from lightning_faulttolerant.state.tensors import quick_sums, sums_of_bits

TENSORS = {
    "float": torch.linspace(0, 1, 7),
    "double": torch.linspace(0, 1, 6, dtype=torch.float64).reshape(2, 3).t(),
    "half": torch.linspace(0, 1, 9).bfloat16(),
    "complex": torch.tensor([1 + 2j, 3j]),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "odd place": torch.linspace(0, 1, 9)[1:6],
    "empty": torch.empty(0),
}


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "empty"])
def test_last_bit_of_one_element_is_seen(name: str) -> None:
    """A change of one bit of any element changes the sum of its tensor and of no other."""
    tensor = TENSORS[name]
    other = tensor.clone()
    bits = other.view(torch.uint8) if other.dim() and other.is_contiguous() else None
    if bits is None:
        other += 1
    else:
        bits[-1] ^= 1
    before, after = sums_of_bits(TENSORS), sums_of_bits({**TENSORS, name: other})
    assert {n for n in TENSORS if before[n] != after[n]} == {name}
    assert before == sums_of_bits({n: each.clone() for n, each in TENSORS.items()})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("width", [1, 3, 64, 127, 254, 1016])
def test_rows_that_change_places_are_seen(dtype: torch.dtype, width: int) -> None:
    """Rows of any width that change places have other sums, although the tensor holds the same elements."""
    tensor = torch.randn(600, width).mul(50).to(dtype)
    before = quick_sums(tensor).clone()
    for one, other in ((0, 1), (0, 599), (7, 401), (598, 599)):
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert torch.equal(swapped, tensor) or not torch.equal(quick_sums(swapped), before)
    assert not torch.equal(quick_sums(-tensor), before)
    assert torch.equal(quick_sums(tensor.clone()), before)


@pytest.mark.parametrize("name", TENSORS)
def test_sums_of_each_kind(name: str) -> None:
    """Small tensors of each kind have sums, and copies have the same sums."""
    tensor = TENSORS[name]
    assert torch.equal(quick_sums(tensor), quick_sums(tensor.clone()))
    other = tensor.flip(0) if tensor.dim() else tensor + 1
    assert torch.equal(other, tensor) or not torch.equal(quick_sums(other), quick_sums(tensor))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(257 * 256,), (257 * 512,), (2**16,), (2**17,), (512, 257), (512, 514)])
def test_changes_of_many_elements_are_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The quick sums, modulo 2**64, differ if elements are negated, also in even numbers, doubled, or moved by one."""
    tensor = torch.randn(shape).mul(50).add(400).to(dtype)  # none is zero
    before = quick_sums(tensor)
    for other in (-tensor, 2 * tensor, tensor.roll(1), tensor.roll(257)):
        assert not torch.equal(quick_sums(other), before)
    for flipped in (slice(2), slice(1, 4, 2), slice(None, None, 2)):
        other = tensor.clone()
        other[..., flipped] *= -1
        assert not torch.equal(quick_sums(other), before)

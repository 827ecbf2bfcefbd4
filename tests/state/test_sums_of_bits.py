"""Sums of bits tell tensors apart that have drifted."""

from __future__ import annotations

import pytest
import torch

from lightning_faulttolerant.state.tensors import sums_of_bits

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
    """One bit of one element, wherever, changes the sum of its tensor and of no other."""
    tensor = TENSORS[name]
    other = tensor.clone()
    bits = other.view(torch.uint8) if other.dim() and other.is_contiguous() else None
    if bits is None:
        other += 1
    else:
        bits[-1] ^= 1
    before, behind = sums_of_bits(TENSORS), sums_of_bits({**TENSORS, name: other})
    assert {n for n in TENSORS if before[n] != behind[n]} == {name}


def test_copies_have_the_same_sums() -> None:
    """What is equal has equal sums, however it lies in memory."""
    assert sums_of_bits(TENSORS) == sums_of_bits({name: tensor.clone() for name, tensor in TENSORS.items()})

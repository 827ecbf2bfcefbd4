from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_faulttolerant.loader.sample_digest import sample_digest

SAMPLES = {
    "tensor": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
    "another type of tensor": (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
    "another shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "16 bits": (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
    "complex": (torch.tensor([1j]), torch.tensor([2j])),
    "gradient": (torch.tensor([1.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)),
    "not contiguous": (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(3, 2)),
    "array": (np.arange(3), np.arange(3) + 1),
    "numbers": ((1, 2.0, None), (1, 2.5, None)),
    "text": ({"text": "a"}, {"text": "b"}),
    "nested": ({"x": [torch.ones(2)]}, {"x": [torch.zeros(2)]}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_digest_tells_samples_apart(name: str) -> None:
    """The same sample has the same digest each time, another one another."""
    sample, other = SAMPLES[name]
    assert sample_digest(sample) == sample_digest(sample)
    assert sample_digest(sample) != sample_digest(other)


@pytest.mark.parametrize("sample", [torch.empty(0), torch.ones(2).to_sparse(), torch.empty(2, device="meta"), object()])
def test_samples_without_numbers_have_a_digest(sample: object) -> None:
    """Of a sample that has none, or none that can be read, only its kind counts."""
    assert sample_digest(sample) == sample_digest(sample)


def test_digest_of_a_copy_is_that_of_the_sample() -> None:
    """Where the numbers lie in memory does not matter: a slice of every second one has the digest of its copy."""
    numbers = torch.arange(20.0)[::2]
    assert sample_digest(numbers) == sample_digest(numbers.clone())

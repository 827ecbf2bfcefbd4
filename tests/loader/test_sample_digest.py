from __future__ import annotations

import types
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nested import nested_tensor

from lightning_faulttolerant.loader import digests
from lightning_faulttolerant.loader.digests import sample_digest


@dataclass(slots=True)
class Graph:
    """A batch of a custom class."""

    nodes: torch.Tensor


# torch warns that nested tensors are a prototype.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    RAGGED = [nested_tensor([torch.ones(2), end]) for end in (torch.ones(3), torch.zeros(3))]

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
    "last of many": ([*range(1000)], [*range(999), 0]),
    "last of a large tensor": (torch.zeros(1_000_001), torch.cat([torch.zeros(1_000_000), torch.ones(1)])),
    "middle of a large array": (np.zeros(1_000_001), np.eye(1, 1_000_001, 500_000)[0]),
    "order of a large tensor": (torch.arange(100_000), torch.arange(100_000).flip(0)),
    "end of a text": ("a" * 10_000, "a" * 9_999 + "b"),
    "array of objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "attribute": (types.SimpleNamespace(x=torch.ones(2)), types.SimpleNamespace(x=torch.zeros(2))),
    "data class": (Graph(nodes=torch.ones(2)), Graph(nodes=torch.zeros(2))),
    "set": ({1, 2}, {1, 3}),
    "sparse": (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    "ragged": (RAGGED[0], RAGGED[1]),
    "where one list ends": (["a", ["b"]], ["a", "b"]),
    "nested": ({"x": [torch.ones(2)]}, {"x": [torch.zeros(2)]}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_digest_tells_samples_apart(name: str) -> None:
    """The same sample always has the same digest, and another sample has another one."""
    sample, other = SAMPLES[name]
    assert sample_digest(sample) == sample_digest(sample)
    assert sample_digest(sample) != sample_digest(other)


@pytest.mark.parametrize("sample", [torch.empty(0), torch.empty(2, device="meta"), object()])
def test_samples_without_numbers_have_a_digest(sample: object) -> None:
    """For a sample without numbers, or without readable ones, only its kind counts."""
    assert sample_digest(sample) == sample_digest(sample)


def test_digest_of_a_copy_is_that_of_the_sample() -> None:
    """The memory layout does not matter: a slice of every second number has the digest of its copy."""
    numbers = torch.arange(20.0)[::2]
    assert sample_digest(numbers) == sample_digest(numbers.clone())


def test_digest_of_an_object_that_holds_itself_ends() -> None:
    """An object that can be reached from itself is read once."""
    ring: list[object] = [1]
    ring.append(ring)
    assert sample_digest(ring) == sample_digest(ring)


def test_digest_continues_from_the_one_before() -> None:
    """A running digest distinguishes the same samples in another order."""
    assert sample_digest("b", sample_digest("a")) != sample_digest("a", sample_digest("b"))


def test_which_object_comes_again() -> None:
    """If objects occur twice, the digest shows which one does."""
    one, other = [1], [2]
    assert sample_digest([one, other, one]) != sample_digest([one, other, other])
    assert sample_digest([one, other, one]) == sample_digest([third := [1], [2], third])


@pytest.mark.parametrize("dtype", sorted(digests._PLAIN_DTYPES, key=str))
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (70_000,)])
def test_the_short_way_has_the_digest_of_the_long_one(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of earlier versions hold digests: those of small tensors stay the same, as do those of views."""
    tensor = torch.arange(max(1, torch.Size(shape).numel()) + 1).to(dtype)
    views = [tensor[1:][: torch.Size(shape).numel()].reshape(shape), tensor[:2], tensor[::2], tensor[:1].expand(3)]
    if dtype.is_complex:
        views += [tensor.conj(), tensor.conj().imag]
    samples = [view for view in views for view in (view, (view, {"a": view}))]
    found = [sample_digest(sample, 7) for sample in samples]
    assert any(digests._plain(view) for view in views) or dtype.is_complex
    monkeypatch.setattr(digests, "_plain", lambda value: None)
    assert [sample_digest(sample, 7) for sample in samples] == found


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_no_short_way_without_plain_memory() -> None:
    """A tensor whose memory is not its content, or that has none, does not take the short way."""
    complex_one = torch.randn(3, dtype=torch.complex64)
    tensors = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.eye(3).to_mkldnn(),
        torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)]),
        torch._efficientzerotensor(3),
        torch.empty(3, device="meta"),
        complex_one.conj(),
        complex_one[:1].conj().imag,  # contiguous, with the sign not in its memory
        torch.ones(3, 3).t()[:2],
    ]
    assert [digests._plain(tensor) for tensor in tensors] == [None] * len(tensors)

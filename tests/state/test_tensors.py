"""Buffers and flags obey the state law; a change of a tensor is never missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_faulttolerant.state.tensors import (
    TensorMarks,
    buffers_replaced,
    buffers_state,
    flags_state,
    kinds_of_buffers,
    load_buffers,
    load_flags,
    make_room,
    quick_sums,
    sums_of_bits,
)
from tests.state.objects.round_trips import through_a_file


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", None)


def make_module(seed: int = 0) -> nn.Module:
    """Return a module with parameters, batch statistics and buffers of both kinds."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), Counter())


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare two states bit by bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def test_buffers_come_back_in_place() -> None:
    """Loaded buffers have the saved values and remain the same tensors, so that views of them stay valid."""
    saved, fresh = make_module(0), make_module(1)
    saved[1](saved[0](torch.randn(5, 3)))
    saved[3].lost += 7
    lost = fresh[3].lost
    assert load_buffers(fresh, through_a_file(buffers_state(saved))) == []
    assert_equal(buffers_state(fresh), buffers_state(saved))
    assert fresh[3].lost is lost


def test_buffers_of_another_shape_are_named_and_left() -> None:
    """A buffer that is missing or has another shape is returned by name, and nothing is broadcast into it."""
    module = make_module()
    state = {**buffers_state(module), "3.lost": torch.ones(1, dtype=torch.int64), "gone": torch.ones(1)}
    assert sorted(load_buffers(module, state)) == ["3.lost", "gone"]
    assert module[3].lost.tolist() == [0, 0, 0]


class Positions(nn.Module):
    """Creates a table when it first sees rows, and a longer one for longer rows, as rotary embeddings do."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.register_buffer("table", None if length is None else torch.zeros(length), persistent=False)

    def forward(self, length: int) -> None:
        self.register_buffer("table", torch.arange(length, dtype=torch.float64), persistent=False)
        self.register_buffer("late", torch.ones(length), persistent=False)


def grown(saved: nn.Module, fresh: nn.Module) -> list[str]:
    """Train `saved` and load its buffers into `fresh`; return the buffers without a place."""
    began, here = kinds_of_buffers(saved), kinds_of_buffers(fresh)
    saved[0](5)
    state = through_a_file(buffers_state(saved, persistent=False))
    make_room(fresh, state, began=began, here=here)
    return load_buffers(fresh, state)


@pytest.mark.parametrize("length", [None, 3, 5])
def test_buffers_that_training_has_made_or_grown_have_room(length: int | None) -> None:
    """A buffer that was ``None``, missing, shorter or of another type when both fits began is as it was saved."""
    saved, fresh, other = (nn.Sequential(Positions(number)) for number in (length, length, 4))
    assert grown(saved, fresh) == []
    assert_equal(buffers_state(fresh), buffers_state(saved))
    assert fresh[0].table.dtype == torch.float64
    assert fresh.state_dict() == {}
    assert grown(nn.Sequential(Positions(3)), other) == ["0.table"]
    assert other[0].table.tolist() == [0.0] * 4


def test_flags_come_back() -> None:
    """Evaluation mode of each module and freezing of each parameter are as saved, in both directions."""
    saved, fresh = make_module(), make_module()
    saved[1].eval()
    saved[0].weight.requires_grad_(False)
    fresh[2].eval()
    fresh[2].bias.requires_grad_(False)
    load_flags(fresh, through_a_file(flags_state(saved)))
    assert flags_state(fresh) == flags_state(saved)
    assert flags_state(fresh) == {"evaluating": ["1"], "untracked": [], "frozen": ["0.weight"]}
    saved.training = False  # a parent's mode is not its children's
    load_flags(fresh, flags_state(saved))
    assert (fresh.training, fresh[0].training) == (False, True)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: m[0].weight.requires_grad_(False).mul_(1.5),
    ".data in place": lambda m: m[0].weight.data.mul_(1.5),
    ".data of one element": lambda m: m[0].weight.data.view(-1)[3:4].add_(1e-6),
    ".data turned round": lambda m: m[0].weight.data.neg_(),
    ".data in another order": lambda m: m[0].weight.data.copy_(m[0].weight.data.flip(0)),
    ".data replaced by an equal one": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    ".data replaced": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone().add_(1)),
    "parameter replaced": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "buffer in place": lambda m: m[3].lost.add_(1),
    "buffer replaced by one over the same storage": lambda m: setattr(m[3], "lost", m[3].lost.detach()),
    "parameter added": lambda m: m.append(nn.Linear(1, 1)),
    "parameter removed": lambda m: m.pop(2),
}


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str) -> None:
    """Every change, replacement, addition, or removal of a tensor is noticed."""
    module = make_module()
    marks = TensorMarks(tensors_of(module))
    assert marks.unmoved(tensors_of(module))
    CHANGES[change](module)
    assert not marks.unmoved(tensors_of(module))


def test_change_that_the_sums_of_bits_miss_is_seen() -> None:
    """An in-place exchange of elements with equal sums changes the version."""
    tensor = torch.arange(508.0)
    marks = TensorMarks([tensor])
    tensor.copy_(tensor.roll(127))
    assert torch.equal(tensor.reshape(4, 127).sum(0), torch.arange(508.0).reshape(4, 127).sum(0))
    assert not marks.unmoved([tensor])


def test_replaced_buffers_do_not_disturb_a_backward_pass() -> None:
    """Inside the block they have the other values; after it, their own, and a pending backward pass accepts them."""
    module = nn.Module()
    module.register_buffer("scale", torch.tensor([2.0, 3.0]))
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * module.scale).sum()
    with buffers_replaced(module, {"scale": torch.tensor([7.0, 8.0]), "gone": torch.ones(1)}):
        assert module.scale.tolist() == [7.0, 8.0]
    assert module.scale.tolist() == [2.0, 3.0]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 3.0]


# Sums of bits, which tell tensors apart that have drifted

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

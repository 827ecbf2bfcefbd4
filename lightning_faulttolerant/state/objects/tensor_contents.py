"""The content of a tensor: create a new tensor with it, or restore it into an existing one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_faulttolerant.errors import NotExactError


class NothingThereError(Exception):
    """An object that a state refers to does not exist any more."""


class _LostGraph(torch.autograd.Function):
    """Stands for the operations that computed a tensor before the run was interrupted."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Any) -> object:
        raise NotExactError(
            "A gradient would flow back through a tensor from before the interruption. A checkpoint has the tensor, "
            "but not its graph. Detach it, or compute it again from its batch."
        )


def new_tensor(kind: str, data: Tensor, device: str, needs_grad: bool | str, *grad: Tensor) -> Tensor:
    """Return a new tensor: its kind, data, device, whether it needs a gradient (or had a graph), and its gradient."""
    tensor = data.detach().clone().to(_device(device))
    if needs_grad == "graph":
        with torch.enable_grad():
            found: Tensor = _LostGraph.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]  # torch's
        return found
    tensor = nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
    tensor.requires_grad_(bool(needs_grad))
    for one in grad:
        tensor.grad = one.detach().clone().to(tensor.device)
    return tensor


def _device(name: str) -> torch.device:
    """Return the device of this name, or the CPU if it does not exist."""
    device = torch.device(name)
    if device.type == "cpu" or device.type == "meta":
        return torch.device("cpu")
    module = getattr(torch, device.type, None)
    is_there = module is not None and module.is_available() and (device.index or 0) < module.device_count()
    return device if is_there else torch.device("cpu")


@torch.no_grad()
def fill_tensor(tensor: Any, content: Sequence[Any]) -> None:
    """Restore an existing tensor in place, with the content that `new_tensor` takes.

    Raises:
        NothingThereError: If the existing object is of another kind.
    """
    data, needs_grad = content[1], content[3]
    if not isinstance(tensor, Tensor):
        raise NothingThereError(f"a {type(tensor).__name__} is there in place of a tensor")
    is_same_kind = tensor.shape == data.shape and tensor.dtype == data.dtype
    if is_same_kind and not _overlaps(tensor):
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(data)
    else:
        tensor.data = data.detach().clone().to(tensor.device)
    if tensor.is_leaf and needs_grad != "graph" and tensor.requires_grad != needs_grad:
        tensor.requires_grad_(bool(needs_grad))
    if tensor.is_leaf and (tensor.grad is not None or len(content) > 4):
        tensor.grad = content[4].detach().clone().to(tensor.device) if len(content) > 4 else None


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` share memory, like those of an expanded one."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

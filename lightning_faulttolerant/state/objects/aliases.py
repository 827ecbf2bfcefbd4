"""Tensors that share their memory with another one: a view of a weight, two names of one buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.objects.graph import Graph
from lightning_faulttolerant.state.objects.marks import held, is_readable

_MAX_RATIO = 4  # the base of a view is carried with it, if it is at most this many times as large


class Aliases:
    """Finds the tensors that new tensors share their memory with.

    Args:
        graph: The objects that the fit began with.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Any, Tensor] | None = None
        self._new: dict[Any, Tensor] = {}

    def base_of(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """Return a tensor whose memory contains all of `tensor`, and the offset there, in elements.

        Candidates are the tensors that the fit began with, and those of earlier calls.
        """
        if type(tensor) is not Tensor or not is_readable(tensor) or not tensor.numel():
            return None
        key = _key(tensor)
        if self._known is None:
            tensors = (one for one in map(held, self._graph.things.values()) if isinstance(one, Tensor))
            self._known = {_key(one): one for one in tensors if is_readable(one) and one.numel()}
        for other in (self._known.get(key), self._new.get(key), _whole_of(tensor)):
            offset = None if other is None or other is tensor else _offset_in(other, tensor)
            if other is not None and offset is not None:
                return other, offset
        self._new.setdefault(key, tensor)
        return None

    def forget(self, values: Iterable[Any]) -> None:
        """Forget tensors that are not carried after all."""
        gone = {id(value) for value in values}
        self._new = {key: tensor for key, tensor in self._new.items() if id(tensor) not in gone}


def _key(tensor: Tensor) -> Any:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _whole_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view is a part of, unless that is much larger."""
    whole = tensor._base
    is_part = whole is not None and tensor.numel() < whole.numel() <= _MAX_RATIO * tensor.numel()
    return whole if is_part else None


def _offset_in(other: Tensor, tensor: Tensor) -> int | None:
    """Return the offset of `tensor` in `other`, in elements; ``None`` if `other` does not contain all of it."""
    if (
        other.dtype != tensor.dtype
        or not is_readable(other)
        or not other.is_contiguous()
        or _key(other) != _key(tensor)
    ):
        return None
    offset = int(tensor.storage_offset() - other.storage_offset())
    end = offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return offset if offset >= 0 and end < other.numel() else None


def alias_of(base: Tensor, shape: list[int], stride: list[int], offset: int) -> Tensor:
    """Return the tensor at this place of `base`, sharing its memory."""
    with torch.no_grad():
        return base.detach().as_strided(shape, stride, base.storage_offset() + offset)

"""Copy a checkpoint into memory of its own, so that it can be written while the original changes."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_CONTAINERS = (dict, OrderedDict, list, tuple)
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_NO_DEEPCOPY = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@final
class Staging:
    """Copies checkpoints one after the other, into the same memory where their tensors have the same sizes.

    Memory that is used for the first time costs a page fault every 4 KiB, which takes longer than the copy itself.
    Storages that tensors share are copied once, and the copies share the copy. What lies on a GPU is copied into
    page-locked memory, all of it at once.

    Example:
        >>> staging = Staging()
        >>> weight = torch.zeros(2)
        >>> staged = staging.copy({"weight": weight, "tied": weight})
        >>> weight += 1
        >>> staged["weight"], staged["tied"] is staged["weight"]
        (tensor([0., 0.]), True)
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}

    @torch.no_grad()
    def copy(self, checkpoint: Any) -> Any:
        """Return a copy that shares nothing with the original. It takes the memory of the copy before, which is lost.

        Args:
            checkpoint: Dicts, lists and tuples of tensors and plain values; other objects are copied by ``deepcopy``.
        """
        copied = _Copied(self._free)
        memo: dict[Any, Any] = {}
        for tensor in _tensors(checkpoint):
            if id(tensor) not in memo:
                memo[id(tensor)] = copied.tensor(tensor, memo)
        # Tensors within other objects share storages with those outside, as torch's own __deepcopy__ lets them.
        memo["torch"] = dict(copied.storages)
        whole = copy.deepcopy(checkpoint, memo)
        copied.wait()
        self._free = copied.taken
        return whole

    def reserve(self, checkpoint: Any) -> Callable[[], None]:
        """Return what makes the memory for copies of a checkpoint like this one; it may be called in another thread.

        Args:
            checkpoint: Only the sizes in it are kept.
        """
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in _tensors(checkpoint) if _is_plain(t)}
        sizes = [(storage.nbytes(), _is_on_gpu(storage)) for storage in storages.values()]

        def reserve() -> None:
            self._free = {}
            try:
                for num_bytes, pinned in sizes:
                    memory = _make_bytes(num_bytes, pinned=pinned).fill_(0)
                    self._free.setdefault((num_bytes, pinned), []).append(memory.untyped_storage())
            except (RuntimeError, MemoryError) as error:
                # Nothing is lost by it. If there is too little memory for the copy too, that will say so.
                self._free = {}
                _logger.debug("No memory could be reserved for copies: %s", error)

        return reserve

    def clear(self) -> None:
        """Give the memory back, once what was copied into it is not used any more."""
        self._free = {}


class _Copied:
    """What of one checkpoint is copied already."""

    def __init__(self, free: dict[tuple[int, bool], list[torch.UntypedStorage]]) -> None:
        self._free = free
        self._devices: set[torch.device] = set()
        self.taken: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, original: Tensor, memo: dict[Any, Any]) -> Tensor:
        tensor = original.detach()
        if _is_plain(tensor):
            storage = self._storage(tensor.untyped_storage())
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
            new = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, *place)
        elif tensor.layout in _NO_DEEPCOPY or tensor.is_nested:
            new = tensor.to("cpu", copy=True)
        else:
            memo["torch"] = self.storages
            new = copy.deepcopy(tensor, memo)
        if type(original) is nn.Parameter:
            new = nn.Parameter(new, original.requires_grad)
        elif original.requires_grad:
            new.requires_grad_()
        if original.__dict__:  # torch.save writes the attributes of a tensor, too
            vars(new).update(copy.deepcopy(original.__dict__, memo))
        return new

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        number = storage._cdata  # by which torch.save, too, tells one storage from another
        if number not in self.storages:
            is_on_gpu = _is_on_gpu(storage)
            new = self._memory(storage.nbytes(), pinned=is_on_gpu)
            new.copy_(storage, non_blocking=is_on_gpu)
            if is_on_gpu:
                self._devices.add(storage.device)
            self.storages[number] = new
        return self.storages[number]

    def _memory(self, num_bytes: int, *, pinned: bool) -> torch.UntypedStorage:
        free = self._free.get((num_bytes, pinned))
        memory = free.pop() if free else _make_memory(num_bytes, pinned=pinned)
        self.taken.setdefault((num_bytes, pinned), []).append(memory)
        return memory

    def wait(self) -> None:
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def _make_memory(num_bytes: int, *, pinned: bool) -> torch.UntypedStorage:
    return _make_bytes(num_bytes, pinned=pinned).untyped_storage()


def _make_bytes(num_bytes: int, *, pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _is_on_gpu(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cuda"


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but a storage with offset, sizes and strides."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    seen = set() if seen is None else seen
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        yield value
    elif kind in _CONTAINERS and id(value) not in seen:  # shared, or a list that holds itself
        seen.add(id(value))
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors(child, seen)

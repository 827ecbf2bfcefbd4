"""Memory that the main process of a loader shares with its workers for their batches.

torch creates a file in memory for each tensor of a batch, and both processes map it. For large batches, its new pages
take longer than the copy into them. Here, the main process shares memory with its workers, and its pages exist already.
The main process frees a part when the last tensor, array, or view of its batch is gone, which Python's reference counts
tell exactly. A worker never waits: without a free part, its batch takes torch's way. A forked child has the tensors of
its parent, but not its reference counts. So the parts whose batches a fork copies are not used again before the child
has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

_ALIGNMENT = 64
_FREE, _IN_USE = 0, 1
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Stored:
    """An array of a batch in shared memory.

    Args:
        dtype: Its type, in NumPy's notation.
        shape: Its shape.
        offset: Where it begins in its part of the memory, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


@final
class BatchMemory:
    """The memory of one iterator's workers. Create it before they are forked.

    Args:
        num_workers: The number of workers.
        batches_per_worker: How many batches of one worker may be in it at a time.
        batch_bytes: The largest size of a batch.

    Raises:
        OSError: If the system does not have so much memory.
    """

    def __init__(self, *, num_workers: int, batches_per_worker: int, batch_bytes: int) -> None:
        self._batches_per_worker = batches_per_worker
        self._num_bytes = _up(batch_bytes, mmap.PAGESIZE)
        num_parts = num_workers * batches_per_worker
        self._begin = _up(num_parts, mmap.PAGESIZE)  # before it, each part has a byte that says if it is in use
        self._pages = mmap.mmap(-1, self._begin + num_parts * self._num_bytes)
        self._kind = type("_Part", (ctypes.c_uint8 * self._num_bytes,), {})  # unlike an array, it has weak references
        self._handed_out: set[int] = set()
        self._kept: Counter[int] = Counter()  # how many children have a part, too
        self.number = next(_numbers)
        """Its number in this process and in the workers."""
        _all[self.number] = self

    def part_of(self, worker: int) -> WorkerPart | None:
        """Return a free part for the next batch of a worker; in that worker."""
        first = worker * self._batches_per_worker
        for part in range(first, first + self._batches_per_worker):
            if self._pages[part] == _FREE:
                return WorkerPart(self, part)
        return None

    def bytes_of(self, part: int) -> Any:
        """Return the memory of a part, as an object of the buffer protocol."""
        return self._kind.from_buffer(self._pages, self._begin + part * self._num_bytes)  # type: ignore[attr-defined]

    def use(self, part: int) -> None:
        """Note that a part holds a batch."""
        self._pages[part] = _IN_USE

    @property
    def has_handed_out(self) -> bool:
        """Whether batches are in use."""
        return bool(self._handed_out)

    def hand_out(self, part: int) -> Any:
        """Return the memory of a part in the main process. The part is free again when the last reference is gone."""
        memory = self.bytes_of(part)
        self._handed_out.add(part)
        weakref.finalize(memory, self._free, part).atexit = False
        return memory

    def _free(self, part: int) -> None:
        self._handed_out.discard(part)
        if part not in self._kept:  # in a child, all that it has are kept
            self._pages[part] = _FREE

    def keep_for_child(self) -> set[int]:
        """Note that a child is about to have all batches that are in use, too; return their parts."""
        self._kept.update(self._handed_out)
        return set(self._handed_out)

    def leave_to_parent(self, parts: set[int]) -> None:
        """Note that a child that had these parts has ended."""
        self._kept -= Counter(parts)
        for part in parts - self._handed_out - self._kept.keys():
            self._pages[part] = _FREE


_all: weakref.WeakValueDictionary[int, BatchMemory] = weakref.WeakValueDictionary()

# The children that have batches of this process: a pipe that ends with each, and its parts by the memory's number.
_Child = tuple[int, dict[int, set[int]]]
_children: list[_Child] = []
_ends_of_children: list[int] = []


def _keep_before_fork() -> None:
    parts = {number: memory.keep_for_child() for number, memory in list(_all.items()) if memory.has_handed_out}
    if parts:
        with contextlib.suppress(OSError):  # without a pipe, they are kept for good
            end, end_of_child = os.pipe()
            os.set_blocking(end, False)
            _children.append((end, parts))
            _ends_of_children.append(end_of_child)


def _close_after_fork(ends: list[int]) -> None:
    while ends:
        os.close(ends.pop())


def _forget_in_child() -> None:
    _close_after_fork([end for end, _ in _children])
    _children.clear()
    _ends_of_children.clear()  # they stay open


def free_parts_of_ended_children() -> None:
    """Free the parts that were kept for children that have ended since."""
    for _ in range(len(_children)):
        if not _children:  # another thread is looking
            return
        end, parts = child = _children.pop(0)
        try:
            os.read(end, 1)
        except BlockingIOError:
            _children.append(child)
            continue
        os.close(end)
        for number, of_memory in parts.items():
            if (memory := _all.get(number)) is not None:
                memory.leave_to_parent(of_memory)


os.register_at_fork(
    before=_keep_before_fork,
    after_in_parent=functools.partial(_close_after_fork, _ends_of_children),
    after_in_child=_forget_in_child,
)


@final
class WorkerPart:
    """The part of the memory that a worker's next batch is written to.

    Args:
        memory: The memory.
        part: The number of the part.
    """

    def __init__(self, memory: BatchMemory, part: int) -> None:
        self._memory = memory
        self._part = part
        self._bytes = np.frombuffer(memory.bytes_of(part), np.uint8)
        self._end = 0

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], Stored] | None:
        """Return a new array in this part, and its description; ``None`` if there is no room."""
        begin, shape = _up(self._end, _ALIGNMENT), tuple(shape)
        end = begin + int(np.prod(shape)) * dtype.itemsize
        if end > len(self._bytes) or end == begin:
            return None
        self._end = end
        return self._bytes[begin:end].view(dtype).reshape(shape), Stored(dtype.str, shape, begin)

    def batch(self, columns: Mapping[str, object]) -> object:
        """Return the batch, as an object that becomes a dict of tensors in the main process."""
        if not self._end:
            return dict(columns)
        self._memory.use(self._part)
        return _SentBatch(self._memory.number, self._part, columns)


@final
class _SentBatch:
    """A batch on its way to the main process."""

    def __init__(self, memory: int, part: int, columns: Mapping[str, object]) -> None:
        self._sent = (memory, part, dict(columns))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._sent


def _received(memory: int, part: int, columns: dict[str, object]) -> dict[str, object]:
    """Return a batch in the main process: each array is a tensor in the memory of the part."""
    handed_out = _all[memory].hand_out(part)
    return {name: _tensor(handed_out, value) if isinstance(value, Stored) else value for name, value in columns.items()}


def _tensor(memory: Any, stored: Stored) -> torch.Tensor:
    dtype = np.dtype(stored.dtype)
    count = int(np.prod(stored.shape))
    return torch.from_numpy(np.frombuffer(memory, dtype, count, stored.offset).reshape(stored.shape))


def _up(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-number // multiple) * multiple

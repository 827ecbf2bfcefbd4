"""The loader of a streaming data set: it counts the samples that it hands out, and its state contains the count.

It collates as torch's `default_collate` does, faster for dicts of integers and arrays.

torch creates a file in memory for each tensor of a batch, and both processes map it. For large batches, its new pages
take longer than the copy into them. Here, the main process shares memory with its workers, and its pages exist already.
The main process frees a part when the last tensor, array, or view of its batch is gone, which Python's reference counts
tell exactly. A worker never waits: without a free part, its batch takes torch's way. A forked child has the tensors of
its parent, but not its reference counts. So the parts whose batches a fork copies are never used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import multiprocessing
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming.dataset import StreamingDataset
from lightning_faulttolerant.streaming.epochs import Channel, Drawn, IterationStart

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
        self._kept: set[int] = set()
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

    def keep_for_child(self) -> None:
        """Note that a child is about to have all batches that are in use, too: their parts are never used again."""
        self._kept |= self._handed_out


_all: weakref.WeakValueDictionary[int, BatchMemory] = weakref.WeakValueDictionary()


def _keep_before_fork() -> None:
    for memory in list(_all.values()):
        memory.keep_for_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_before_fork)


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


_BATCHES_IN_USE = 2  # of one worker: besides those fetched ahead, the one that is used, and the next one


class StreamingDataLoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` for a `StreamingDataset`, resumable in the middle of an epoch.

    A batch counts once it is handed out in the main process; batches that workers have fetched ahead don't count. The
    state is the same on every rank, and may be loaded with a different number of ranks or workers.

    An iteration that is left early is over: the next one is the whole next epoch. To continue in the same epoch, load
    the loader's own state: ``loader.load_state_dict(loader.state_dict())``.

    Args:
        *args: Arguments of ``torch.utils.data.DataLoader``.
        **kwargs: Arguments of ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: If the data set is not a `StreamingDataset`.
        ValueError: If batches have another size than the data set's, or may come in any order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.collate_fn is default_collate:
            self.collate_fn = collate  # the same batches, faster
        if not isinstance(self.dataset, StreamingDataset):
            raise TypeError(
                f"StreamingDataLoader needs a StreamingDataset, not a {type(self.dataset).__name__}: other data sets "
                "can't start at any position. Use ResumableDataLoader for them."
            )
        given, own = self.dataset.batch_size, self.batch_size or 1
        if given not in (None, own):
            raise ValueError(
                f"The data set has batch_size={given}, but the loader creates batches of {own}. Workers would take "
                "turns at the wrong samples. Pass the same size to both, or none to the data set."
            )
        if self.num_workers > 1 and not getattr(self, "in_order", True):
            raise ValueError(
                "in_order=False yields batches in the order in which workers finish them, so their number does not "
                "tell which samples were consumed. Use in_order=True."
            )
        self._channel = Channel(is_shared=self.persistent_workers)
        is_own = type(self.dataset).__iter__ is not StreamingDataset.__iter__
        self._uneven = torch.zeros(1, dtype=torch.uint8).share_memory_() if is_own else None  # type: ignore[no-untyped-call]
        self._batches: _Place | None = None

    def __iter__(self) -> Any:
        return _CountedBatches(self)

    def make_batches(self) -> tuple[Iterator[object], _Place]:
        """Create torch's iterator for the next iteration, and the object that keeps its position."""
        dataset = self.dataset
        assert isinstance(dataset, StreamingDataset)
        start = dataset.begin_epoch(batch_size=self.batch_size or 1, drop_last=self.drop_last)
        # Only our own collate sees the samples, and it copies their contents.
        are_lent = self.collate_fn is collate and self._uneven is None
        start = replace(start, are_lent=are_lent)
        self._channel.tell(start)
        with dataset.told_by(self._channel, is_read_here=not self.num_workers), self._collating(are_lent=are_lent):
            batches = super().__iter__()
        self._batches = _Place(dataset, start, drop_last=self.drop_last)
        return batches, self._batches

    @contextlib.contextmanager
    def _collating(self, *, are_lent: bool) -> Iterator[None]:
        """Let an iterator that is created in the block share the memory of its batches, or count what it draws."""
        own, memory = self.collate_fn, self._new_memory() if are_lent and self.num_workers else None
        if memory is not None:
            self.collate_fn = SharedCollate(memory)  # torch's iterator keeps it, and with it the memory
        elif self._uneven is not None:
            self.collate_fn = _CountingCollate(own, self.dataset, self._uneven, is_batched=self.batch_size is not None)
        try:
            yield
        finally:
            self.collate_fn = own

    def _new_memory(self) -> BatchMemory | None:
        context = self.multiprocessing_context or multiprocessing.get_context()
        if context.get_start_method() != "fork":
            return None
        assert isinstance(self.dataset, StreamingDataset)
        batch_bytes = self.dataset.bytes_of_samples(self.batch_size or 1)
        per_worker = (self.prefetch_factor or 0) + _BATCHES_IN_USE
        with contextlib.suppress(OSError):
            return BatchMemory(num_workers=self.num_workers, batches_per_worker=per_worker, batch_bytes=batch_bytes)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out; below 1 kB, the same on every rank.

        Raises:
            StreamingError: If the position is unknown, because an iterator was moved without the loader's knowledge, or
                because the data set's own ``__iter__`` filters, packs, or multiplies samples.
        """
        dataset = self.dataset
        assert isinstance(dataset, StreamingDataset)
        if self._batches is not None and dataset.book.has_begun:
            if self._uneven is not None and self._uneven[0] and self._batches.is_inside:
                raise StreamingError(
                    f"{type(dataset).__name__}.__iter__ does not yield one sample for each sample that it reads, so "
                    "the number of batches does not tell where it is. A resume would repeat or lose samples. Use "
                    "ResumableDataLoader, which is exact with it, or filter and pack in collate_fn."
                )
            return self._batches.state_dict()
        return dataset.state_at(*dataset.book.place)

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True) -> None:
        """Let the next iteration begin at the position of a state, even if one was created but no batch requested yet.

        Args:
            state_dict: A state of this class, of the data set, or of the original library.
            strict: Whether other data, or another order, is an error. Otherwise it is a warning.

        Raises:
            ValueError: If it is not a state of a streaming data set.
            FingerprintMismatchError: If it was saved with other data, or in another order.
        """
        assert isinstance(self.dataset, StreamingDataset)
        self.dataset.load_state_dict(state_dict, strict=strict)


class _Place:
    """The position of one iteration. It counts steps of the plan, which have known sizes, and reads no batches."""

    def __init__(self, dataset: StreamingDataset, start: IterationStart, *, drop_last: bool) -> None:
        self._dataset = dataset
        self._start = start
        self._step = start.batch_size * start.world.num_ranks
        self._least = self._step if drop_last else 1
        deal = dataset.deal(start, start.world)
        self._num_planned = deal.num_samples // start.batch_size if drop_last else deal.num_steps
        self.num_put = dataset.book.num_put
        self.num_batches = 0
        self._is_over = False

    @property
    def is_inside(self) -> bool:
        """Whether the position is neither the beginning nor the end of the iteration."""
        return self.num_batches > 0 and not self._is_over

    @property
    def is_left(self) -> bool:
        """Whether a state was loaded since this iteration began."""
        return self._dataset.book.num_put != self.num_put

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data set after the batches that were handed out."""
        if self._dataset.book.is_moved:
            raise StreamingError(
                "A state was loaded into the iterator of this data set, so the loader doesn't know its position."
                " Load the loader's state instead, or leave both to FaultTolerance."
            )
        if self._is_over:
            return self._dataset.state_at(self._start.epoch + 1, 0)
        sample = self._start.sample + self.num_batches * self._step
        return self._dataset.state_at(self._start.epoch, sample, least=self._least)

    def check_end(self) -> None:
        """Raise StreamingError if the iteration ends before all planned batches were handed out."""
        self._is_over = True
        is_own = type(self._dataset).__iter__ is not StreamingDataset.__iter__
        if is_own or self._dataset.book.is_moved or self.num_batches == self._num_planned:
            return
        raise StreamingError(
            f"Epoch {self._start.epoch} ended after {self.num_batches} batches, and {self._num_planned} were planned"
            f" from sample {self._start.sample} on: batches were lost or made twice between data set and loader."
        )


class _CountedBatches(Iterator[Any]):
    """Yields the batches of torch's iterator, and counts them."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._loader = loader
        self._batches, self._place = loader.make_batches()

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._place.is_left:
            self._begin_again()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._place.check_end()
            raise
        self._place.num_batches += 1
        return batch

    def _begin_again(self) -> None:
        if self._place.num_batches:
            raise StreamingError(
                f"A state was loaded after {self._place.num_batches} batches of this iteration. It is where the next"
                " iteration begins: make a new iterator, by iter() or a new for loop."
            )
        self._batches, self._place = self._loader.make_batches()


class _CountingCollate:
    """Collates, and notes when samples of a data set's own ``__iter__`` are not those that it has drawn, one by one."""

    def __init__(self, collate_fn: Any, dataset: Any, uneven: torch.Tensor, *, is_batched: bool) -> None:
        self._collate, self._dataset, self._uneven, self._is_batched = collate_fn, dataset, uneven, is_batched
        self._drawn: Drawn | None = None
        self._num_passed = 0

    def __call__(self, samples: Any) -> Any:
        info = get_worker_info()
        dataset: Any = self._dataset if info is None else info.dataset
        drawn = dataset.book.drawn
        if drawn is not self._drawn:
            self._drawn, self._num_passed = drawn, 0
        self._num_passed += len(samples) if self._is_batched else 1
        if self._num_passed != drawn.num_taken:
            self._uneven[0] = 1
        return self._collate(samples)


def collate(samples: Sequence[Any]) -> Any:
    """Return what ``default_collate(samples)`` returns: the same types, dtypes, and values, in new memory.

    Args:
        samples: The samples, at least one.
    """
    return _collated(samples, None)


@final
class SharedCollate:
    """`collate` of workers that share memory with their main process. Its batches become dicts there.

    Args:
        memory: The memory.
    """

    def __init__(self, memory: BatchMemory) -> None:
        self._memory = memory

    def __call__(self, samples: Sequence[Any]) -> object:
        """Return a batch for torch to send."""
        info = get_worker_info()
        part = None if info is None or type(samples[0]) is not dict else self._memory.part_of(info.id)
        return collate(samples) if part is None else part.batch(_collated(samples, part))


def _collated(samples: Sequence[Any], part: WorkerPart | None) -> Any:
    first = samples[0]
    if type(first) is not dict:
        return default_collate(samples)  # type: ignore[arg-type]
    return {name: _column([sample[name] for sample in samples], part) for name in first}


def _column(values: list[Any], part: WorkerPart | None) -> Any:
    """Return the batch of one column."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        if kind is int:
            return _integers(values, part)
        if kind is np.ndarray:
            return _stacked(values, part) if _alike(values) else default_collate(_own(values))
    return default_collate(values)


def _integers(values: list[int], part: WorkerPart | None) -> object:
    try:
        numbers = np.array(values, dtype=np.int64)
    except OverflowError:
        return default_collate(values)  # raises in its own words
    stored = None if part is None else part.array(numbers.shape, numbers.dtype)
    if stored is None:
        return torch.from_numpy(numbers)
    stored[0][:] = numbers
    return stored[1]


def _stacked(arrays: list[np.ndarray[Any, Any]], part: WorkerPart | None) -> object:
    """Return the arrays stacked, as np.stack does, which takes three times as long for many small ones."""
    length, *rest = arrays[0].shape
    stored = None if part is None else part.array((len(arrays), length, *rest), arrays[0].dtype)
    if stored is not None:
        np.concatenate(arrays, out=stored[0].reshape(len(arrays) * length, *rest))
        return stored[1]
    num_elements = len(arrays) * arrays[0].size
    batch = torch.from_numpy(np.empty(0, arrays[0].dtype))
    if get_worker_info() is None:
        batch = batch.new_empty(num_elements)
    else:
        # As default_collate does: in memory that the main process sees, so that the batch is not copied there.
        storage = batch._typed_storage()._new_shared(num_elements, device=batch.device)  # type: ignore[no-untyped-call]
        batch = batch.new(storage).resize_(num_elements)
    np.concatenate(arrays, out=batch.numpy().reshape(len(arrays) * length, *rest))
    return batch.reshape(len(arrays), length, *rest)


def _alike(arrays: list[np.ndarray[Any, Any]]) -> bool:
    """Whether these are arrays of numbers that can be stacked."""
    first = arrays[0]
    if not first.ndim or first.dtype.kind not in "biufc" or not first.dtype.isnative:
        return False
    dtype, shape = first.dtype, first.shape
    return all(array.shape == shape and array.dtype == dtype for array in arrays)


def _own(arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return them as writable arrays: torch warns about others."""
    return [array if array.flags.writeable else array.copy() for array in arrays]

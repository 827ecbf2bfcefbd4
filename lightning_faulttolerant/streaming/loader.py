"""The loader of a streaming data set: it counts the samples that it hands out, and its state contains the count.

It collates as torch's `default_collate` does, faster for dicts of integers and arrays.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming.batch_memory import BatchMemory, WorkerPart, free_parts_of_ended_children
from lightning_faulttolerant.streaming.dataset import StreamingDataset
from lightning_faulttolerant.streaming.epochs import Channel, IterationStart, NumDrawn

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
        free_parts_of_ended_children()
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
                f"A state was loaded after {self._place.num_batches} batches of this iteration. It takes"
                " effect in the next iteration only: make a new iterator, by iter() or a new for loop."
            )
        self._batches, self._place = self._loader.make_batches()


class _CountingCollate:
    """Collates, and notes when samples of a data set's own ``__iter__`` are not those that it has drawn, one by one."""

    def __init__(self, collate_fn: Any, dataset: Any, uneven: torch.Tensor, *, is_batched: bool) -> None:
        self._collate, self._dataset, self._uneven, self._is_batched = collate_fn, dataset, uneven, is_batched
        self._drawn: NumDrawn | None = None
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

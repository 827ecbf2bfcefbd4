"""Write in the background while the work continues: a copy of the checkpoint, and a thread that writes it.

The thread lives as long as its job, so there is never an idle thread to shut down. A process that is forked during a
job has no writer: threads are not forked.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_CONTAINERS = (dict, OrderedDict, list, tuple)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_NO_DEEPCOPY = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _Layout(NamedTuple):
    """The properties that two tensors must share for one to take the other's memory."""

    dtype: torch.dtype
    num_bytes: int
    """The size of the storage; the tensor may be a part of it."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_on_gpu: bool


@final
class Staging:
    """Memory for copies of checkpoints, one after the other; it is reused if their tensors have the same sizes.

    Memory that is used for the first time costs a page fault every 4 KiB, which takes longer than the copy itself.
    Storages that tensors share are copied once, and the copies share the copy. Tensors on a GPU are copied into
    page-locked memory, with one wait for all of them.

    Example:
        >>> staging = Staging()
        >>> weight = torch.zeros(2)
        >>> staged = staging.copy({"weight": weight, "tied": weight})
        >>> weight += 1
        >>> staged["weight"], staged["tied"] is staged["weight"]
        (tensor([0., 0.]), True)
    """

    def __init__(self) -> None:
        self._free: dict[_Layout, list[Tensor]] = {}

    @torch.no_grad()
    def copy(self, checkpoint: object) -> Any:
        """Return a copy that shares nothing with the original. It takes the memory of the previous copy, which is lost.

        Args:
            checkpoint: Dicts, lists and tuples of tensors and plain values; other objects are copied by ``deepcopy``.
        """
        copied = _Copied(self._free)
        memo: dict[object, object] = {}
        for tensor in _tensors(checkpoint):
            if id(tensor) not in memo:
                memo[id(tensor)] = copied.tensor(tensor, memo)
        # Tensors within other objects share storages with those outside, which torch's own __deepcopy__ supports.
        memo["torch"] = dict(copied.storages)
        whole = _copy(checkpoint, memo)
        copied.wait()
        self._free = copied.taken
        return whole

    def reserve(self, checkpoint: object) -> Callable[[], None]:
        """Return a function that allocates the memory for copies of a similar checkpoint; any thread may call it.

        Args:
            checkpoint: Only the sizes in it are kept.
        """
        plain = (tensor for tensor in _tensors(checkpoint) if _is_plain(tensor))
        firsts: dict[int, _Layout] = {}
        for tensor in plain:
            storage = tensor.untyped_storage()
            firsts.setdefault(storage._cdata, _layout(tensor, storage))

        def reserve() -> None:
            self._free = {}
            try:
                for layout in firsts.values():
                    new = _make(layout)
                    torch.empty(0, dtype=torch.uint8, device="cpu").set_(new.untyped_storage()).fill_(0)
                    self._free.setdefault(layout, []).append(new)
            except (RuntimeError, MemoryError) as error:
                # Nothing is lost. If there is too little memory for the copy too, the copy reports it.
                self._free = {}
                _logger.debug("No memory could be reserved for copies: %s", error)

        return reserve

    def clear(self) -> None:
        """Release the memory, once the last copy is not used any more."""
        self._free = {}


class _Copied:
    """The parts of one checkpoint that are already copied."""

    def __init__(self, free: dict[_Layout, list[Tensor]]) -> None:
        self._free = free
        self._devices: set[torch.device] = set()
        self.taken: dict[_Layout, list[Tensor]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, original: Tensor, memo: dict[Any, Any]) -> Tensor:
        tensor = original.detach()
        if _is_plain(tensor):
            new = self._plain(tensor)
        elif tensor.layout in _NO_DEEPCOPY or tensor.is_nested:
            new = tensor.to("cpu", copy=True)
        else:
            memo["torch"] = self.storages
            new = copy.deepcopy(tensor, memo)
        if type(original) is nn.Parameter:
            return _with_attributes(nn.Parameter(new, original.requires_grad), original, memo)
        if original.requires_grad:
            new = new.detach().requires_grad_()
        return _with_attributes(new, original, memo)

    def _plain(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        layout = _layout(tensor, storage)
        number = storage._cdata  # torch.save, too, tells storages apart by it
        known = self.storages.get(number)
        if known is not None:
            return _view(known, layout)
        free = self._free.get(layout)
        new = free.pop() if free else _make(layout)
        self.taken.setdefault(layout, []).append(new)
        if layout.is_on_gpu:
            self._devices.add(storage.device)
        self.storages[number] = memory = new.untyped_storage()
        if tensor.is_contiguous() and tensor.nbytes == layout.num_bytes:
            new.copy_(tensor, non_blocking=layout.is_on_gpu)
        else:
            memory.copy_(storage, non_blocking=layout.is_on_gpu)
        return new

    def wait(self) -> None:
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def _copy(value: Any, memo: dict[Any, Any]) -> object:
    """Copy like ``deepcopy``, but in a third of the time for the usual types in a checkpoint."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if kind is dict or kind is OrderedDict:
        copied: Any = kind()
        memo[id(value)] = copied
        for key, child in value.items():
            copied[key if type(key) in _ATOMS else _copy(key, memo)] = _copy(child, memo)
        if kind is OrderedDict:  # a module's state_dict has an attribute, "_metadata"
            vars(copied).update(_copy(vars(value), memo))
        return copied
    if kind is list:
        copied = memo[id(value)] = []
        copied += [_copy(child, memo) for child in value]
        return copied
    return copy.deepcopy(value, memo)


def _layout(tensor: Tensor, storage: torch.UntypedStorage) -> _Layout:
    offset, is_on_gpu = int(tensor.storage_offset()), tensor.is_cuda
    return _Layout(tensor.dtype, storage.nbytes(), offset, tensor.shape, tensor.stride(), is_on_gpu)


def _make(layout: _Layout) -> Tensor:
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=layout.is_on_gpu)
    return _view(memory.untyped_storage(), layout)


def _view(memory: torch.UntypedStorage, layout: _Layout) -> Tensor:
    empty = torch.empty(0, dtype=layout.dtype, device="cpu")
    return empty.set_(memory, layout.offset, layout.shape, layout.stride)


def _with_attributes(new: Tensor, original: Tensor, memo: dict[Any, Any]) -> Tensor:
    if original.__dict__:  # torch.save writes them too
        new = new if type(new) is nn.Parameter else new.detach().requires_grad_(original.requires_grad)
        vars(new).update(copy.deepcopy(original.__dict__, memo))
    return new


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is only a storage with offset, sizes and strides."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    seen = set() if seen is None else seen
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        yield value
    elif kind in _CONTAINERS and id(value) not in seen:  # shared, or a list that contains itself
        seen.add(id(value))
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors(child, seen)


_LETS_GO_ON_SECONDS = 0.001


class _Job:
    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.is_done = threading.Event()
        self._is_taken = threading.Lock()

    def take(self) -> bool:
        """Return True to the first caller: the thread that does the job, or the caller that gives it up before that."""
        return self._is_taken.acquire(blocking=False)


@final
class BackgroundWriter:
    """A writer that does one job at a time in a thread.

    The interpreter does not exit before a running job is done.

    Args:
        name: The name of the thread.

    Example:
        >>> writer = BackgroundWriter("example")
        >>> written = []
        >>> writer.start(lambda: written.append("a file"))
        >>> writer.wait()
        >>> written, writer.take_error()
        (['a file'], None)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._job: _Job | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job of this process is running."""
        job = self._job
        return job is not None and job.process_id == os.getpid() and not job.is_done.is_set()

    def start(self, job: Callable[[], object]) -> None:
        """Start a job.

        Args:
            job: An error that it raises is kept for ``take_error``.

        Raises:
            RuntimeError: If the previous job is still running, or the system has no thread left.
        """
        if self.is_busy:
            raise RuntimeError(f"The writer {self._name!r} already has a job. Wait for it.")
        this = _Job()
        thread = threading.Thread(target=self._run, args=(this, job), name=self._name)
        try:
            self._job = this
            thread.start()
        except BaseException:  # a signal handler may raise at any moment, with the thread begun or not
            if this.take():
                this.is_done.set()  # nothing else will: a waiter would wait forever
            raise

    def wait(self) -> None:
        """Wait until no job is running. A signal handler that raises breaks the wait, not the job."""
        if self.is_busy and self._job is not None:
            self._job.is_done.wait()

    def take_error(self) -> BaseException | None:
        """Return the error of the last job, once, unchanged and with its traceback."""
        error, self._error = self._error, None
        return error

    def _run(self, this: _Job, job: Callable[[], object]) -> None:
        if not this.take():
            return
        # Otherwise this thread keeps the interpreter for up to 5 ms while the thread that started it waits to continue.
        time.sleep(_LETS_GO_ON_SECONDS)
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - kept for take_error
            self._error = error
        finally:
            this.is_done.set()

"""Save an object atomically, at once or in the background while the work continues.

The path of a file holds the old content or the new one, never a part of either. Nothing here draws from the global
generators of ``random``, NumPy or torch: a draw would change the training.

In the background, a thread writes a copy of the checkpoint. The thread lives as long as its job, so there is never an
idle thread to shut down. A process that is forked during a job has no writer: threads are not forked.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, final

import torch

from lightning_faulttolerant.storage.store import open_writer


def atomic_torch_save(
    obj: object, f: str | bytes | os.PathLike[str] | IO[bytes], *, fsync: bool = True, **torch_save_kwargs: object
) -> None:
    """Save an object like ``torch.save``; a crash at any moment leaves the old file or the new one.

    The object is streamed, not copied. Each record gets the CRC32 that ``verify_file`` checks.

    Args:
        obj: Any object that ``torch.save`` can write.
        f: A path, a URL that fsspec understands, or a binary file that is open for writing. If the path is a symbolic
            link, the link's target is replaced, not the link. At a URL, the object becomes visible when it is complete.
            An open file is written to directly: a crash may lose its old content, and only its owner can close it.
        fsync: Wait until the bytes are on the disk, so that they also survive a power loss. An open file without a
            descriptor, such as a ``BytesIO``, is flushed.
        torch_save_kwargs: Keywords of ``torch.save``: ``pickle_module``, ``pickle_protocol``, and its private ones.

    Raises:
        OSError: If the file can't be written. If `f` is a path, the old file still exists.
        ValueError: If the path is a device, a pipe or a socket, or if torch's old file format is requested.
        TypeError: If `f` is a text file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     atomic_torch_save({"step": 3}, f"{directory}/a.ckpt")
        ...     torch.load(f"{directory}/a.ckpt", weights_only=True)
        {'step': 3}
    """
    if isinstance(f, (str, bytes, os.PathLike)):
        with open_writer(os.fsdecode(f), fsync=fsync) as file:
            save_to_file(obj, file, **torch_save_kwargs)
        return
    save_to_file(obj, f, **torch_save_kwargs)
    if fsync:
        _fsync_open_file(f)


def save_to_file(obj: object, file: IO[bytes], **torch_save_kwargs: Any) -> None:
    """Write an object with ``torch.save``, each record with the CRC32 that ``verify_file`` checks.

    Args:
        obj: Any object that ``torch.save`` can write.
        file: Open for writing.
        torch_save_kwargs: Keywords of ``torch.save``.

    Raises:
        OSError: If a write fails, or the file takes no more bytes.
        ValueError: If torch's old file format is requested.
        TypeError: If it is a text file.
    """
    if not torch_save_kwargs.get("_use_new_zipfile_serialization", True):
        raise ValueError(
            "_use_new_zipfile_serialization=False requests torch's old file format, which has no checksums. Damage "
            "would never be detected. Leave it out, or call torch.save itself."
        )
    if isinstance(file, io.TextIOBase):
        raise TypeError(
            f"{file!r} is a text file, but a checkpoint is bytes. Open it with mode 'wb', or give its path."
        )
    whole: Any = WholeWriter(file) if hasattr(file, "write") else file  # torch refuses an object that is not a file
    with _crc32_forced(), _first_error_shown():
        torch.save(obj, whole, **torch_save_kwargs)


def atomic_write_bytes(data: bytes, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
    """Write a small file atomically; a crash at any moment leaves the old file or the new one.

    Args:
        data: The whole content.
        path: A path or a URL. If it is a symbolic link, the link's target is replaced, not the link.
        fsync: Wait until the bytes are on the disk.

    Raises:
        OSError: If the file can't be written; the old file still exists.
        ValueError: If the path is a device, a pipe or a socket.
    """
    with open_writer(path, fsync=fsync) as file:
        WholeWriter(file).write(data)


@final
class WholeWriter:
    """A file that writes all the bytes it gets, or raises: torch ignores what ``write`` returns.

    Args:
        file: Open for writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write all of `data`, and return its length.

        Raises:
            OSError: If the file takes no more bytes.
        """
        view = memoryview(data).cast("B")
        num_done = 0
        while num_done < len(view):
            num_written = self._file.write(view[num_done:])
            if num_written is None and not isinstance(self._file, io.RawIOBase):
                break  # a user's class that returns no count; a raw file returns None if it can't take any bytes
            if not num_written:
                reason = f"The file accepted only {num_done} of {len(view)} bytes"
                raise OSError(errno.EIO, reason, getattr(self._file, "name", None))
            num_done += num_written
        return len(view)

    def flush(self) -> None:
        """Flush the file, if it can be flushed."""
        if hasattr(self._file, "flush"):
            self._file.flush()


def _fsync_open_file(file: IO[bytes]) -> None:
    try:
        descriptor = file.fileno()
    except (AttributeError, OSError):  # not a file of the operating system
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a pipe has nothing to wait for
            raise


@contextlib.contextmanager
def _crc32_forced() -> Iterator[None]:
    # The option came with torch 2.6. It is thread-local since 2.12, and was global before. torch.save reads it when it
    # begins. Before 2.12, overlapping saves in two threads could reset it for one another. This affects only users who
    # switched it off, and verify_file then reports it.
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _first_error_shown() -> Iterator[None]:
    # When a write fails, or a signal handler raises during it, torch.save closes its zip, fails at that and raises
    # "RuntimeError: unexpected pos". That would hide "No space left on device", a Ctrl-C and our own TrainingStopped.
    surrounding = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        first = error.__context__
        if first is None or first is surrounding or "unexpected pos" not in str(error):
            raise
        raise first from None


_logger = logging.getLogger(__name__)

_CONTAINERS = (dict, OrderedDict, list, tuple)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
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
        self._free: dict[_Layout, list[torch.Tensor]] = {}

    @torch.no_grad()
    def copy(self, checkpoint: object) -> Any:
        """Return a copy that shares nothing with the original. It takes the memory of the previous copy, which is lost.

        Args:
            checkpoint: Dicts, lists and tuples of tensors and plain values; other objects are copied by ``deepcopy``.
        """
        copied = _Copied(self._free)
        memo: dict[object, object] = {}
        for _, tensor in tensors_in(checkpoint):
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
        plain = (tensor for _, tensor in tensors_in(checkpoint) if _is_plain(tensor))
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

    def __init__(self, free: dict[_Layout, list[torch.Tensor]]) -> None:
        self._free = free
        self._devices: set[torch.device] = set()
        self.taken: dict[_Layout, list[torch.Tensor]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, original: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        tensor = original.detach()
        if _is_plain(tensor):
            new = self._plain(tensor)
        elif tensor.layout in _NO_DEEPCOPY or tensor.is_nested:
            new = tensor.to("cpu", copy=True)
        else:
            memo["torch"] = self.storages
            new = copy.deepcopy(tensor, memo)
        if type(original) is torch.nn.Parameter:
            return _with_attributes(torch.nn.Parameter(new, original.requires_grad), original, memo)
        if original.requires_grad:
            new = new.detach().requires_grad_()
        return _with_attributes(new, original, memo)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
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


def _layout(tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Layout:
    offset, is_on_gpu = int(tensor.storage_offset()), tensor.is_cuda
    return _Layout(tensor.dtype, storage.nbytes(), offset, tensor.shape, tensor.stride(), is_on_gpu)


def _make(layout: _Layout) -> torch.Tensor:
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=layout.is_on_gpu)
    return _view(memory.untyped_storage(), layout)


def _view(memory: torch.UntypedStorage, layout: _Layout) -> torch.Tensor:
    empty = torch.empty(0, dtype=layout.dtype, device="cpu")
    return empty.set_(memory, layout.offset, layout.shape, layout.stride)


def _with_attributes(new: torch.Tensor, original: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    if original.__dict__:  # torch.save writes them too
        new = new if type(new) is torch.nn.Parameter else new.detach().requires_grad_(original.requires_grad)
        vars(new).update(copy.deepcopy(original.__dict__, memo))
    return new


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only a storage with offset, sizes and strides."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def tensors_in(
    value: Any, path: tuple[Any, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors in plain containers, each with the keys on the way to it."""
    seen = set() if seen is None else seen
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        yield path, value
    elif kind in _CONTAINERS and id(value) not in seen:  # shared, or a list that contains itself
        seen.add(id(value))
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(child, (*path, key), seen)


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

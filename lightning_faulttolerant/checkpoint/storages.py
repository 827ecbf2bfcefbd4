"""The parts of a ``torch.save`` file: the pickle, and the storages with the values of its tensors."""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor

Path = tuple[str | int | None, ...]

_serialization: Any = torch.serialization

_PROTOCOL = 2  # torch.serialization.DEFAULT_PROTOCOL
_PIECE_BYTES = 8 * 1024 * 1024
_CONTAINERS = (dict, OrderedDict, list, tuple)
_TENSORS = (Tensor, torch.nn.Parameter)

_PyBUF_READ = 0x100
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def pickled(value: object) -> tuple[bytes, dict[str, torch.UntypedStorage]]:
    """Return the pickle that ``torch.save`` writes, and the storages that it refers to, by their keys.

    Args:
        value: Anything that ``torch.save`` can write.

    Raises:
        RuntimeError: As ``torch.save``, if tensors of different types share memory.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.storages


@final
class _Pickler(pickle.Pickler):
    """Pickles like ``torch.serialization._save``, which can't leave the values of a tensor out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a storage in the pickle, and ``None`` for everything else."""
        typed: Any = value
        storage: Any = value
        if isinstance(value, torch.storage.TypedStorage):
            storage, dtype, num_values = typed._untyped_storage, typed.dtype, typed._size()
            kind = getattr(torch, typed._pickle_storage_type())
        elif torch.is_storage(value):
            dtype, num_values = torch.uint8, value.nbytes()
            kind = _serialization.normalize_storage_type(type(value))
        else:
            return None
        address = 0 if storage.device.type == "meta" else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[key] = storage
        return "storage", kind, key, _serialization.location_tag(storage), num_values


def paths_of(value: object) -> dict[int, Path]:
    """Return the place of each storage that a tensor in plain containers has: the keys on the way to the first one.

    Args:
        value: Dicts, lists, and tuples are searched.

    Returns:
        The places by ``storage._cdata``, by which ``torch.save`` tells storages apart.
    """
    found: dict[int, Path] = {}
    for path, tensor in _tensors(value, (), set()):
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta":
            found.setdefault(tensor.untyped_storage()._cdata, path)
    return found


def _tensors(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Tensor]]:
    kind = type(value)
    if kind in _TENSORS:
        yield path, value
    elif kind in _CONTAINERS and id(value) not in seen:
        seen.add(id(value))
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            if type(key) in (str, int):
                yield from _tensors(child, (*path, key), seen)


def bytes_of(storage: torch.UntypedStorage) -> list[memoryview]:
    """Return the content of a storage on the CPU, in pieces. It must outlive them.

    It reads by address: ``Tensor.numpy`` needs NumPy, which torch does not require.

    Args:
        storage: The storage.
    """
    num_bytes, address = storage.nbytes(), storage.data_ptr()
    begins = range(0, num_bytes, _PIECE_BYTES)
    return [_memory(address + begin, min(_PIECE_BYTES, num_bytes - begin), _PyBUF_READ) for begin in begins]


def on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage itself if it is on the CPU, else a copy there."""
    if storage.device.type == "cpu":
        return storage
    copied: Any = storage
    return copied.cpu()  # type: ignore[no-any-return]


def copy_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the content of a storage as a tensor of bytes in its own memory, on the CPU.

    Args:
        storage: On any device.
    """
    flat = _flat(on_cpu(storage))
    return flat.clone() if storage.device.type == "cpu" else flat


def is_equal(storage: torch.UntypedStorage, copy: Tensor) -> bool:
    """Return whether a storage has the same bytes as an earlier copy of it. Each byte is compared.

    Args:
        storage: On any device.
        copy: The result of `copy_of`.
    """
    if storage.nbytes() != copy.numel():
        return False
    if storage.device.type != "cuda":
        return _are_equal(_flat(on_cpu(storage)), copy)
    flat = _flat(storage)
    room = torch.empty(min(_PIECE_BYTES, len(flat)), dtype=torch.uint8, device="cpu", pin_memory=True)
    for begin in range(0, len(flat), _PIECE_BYTES):
        piece = flat[begin : begin + _PIECE_BYTES]
        if not _are_equal(room[: len(piece)].copy_(piece), copy[begin : begin + _PIECE_BYTES]):
            return False
    return True


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Compare two tensors of bytes, of the same length and on the CPU. It is twice as fast as ``torch.equal``."""
    compare = _memcmp()
    if compare is None:
        return torch.equal(left, right)
    return compare(left.data_ptr(), right.data_ptr(), len(left)) == 0


@functools.cache
def _memcmp() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):  # Windows has it elsewhere
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return cast("Callable[[int, int, int], int]", found)

"""Autosaves that contain only the tensors that changed, and refer to a base for the others.

Whether a tensor has changed is decided by its bytes: each is compared with a copy in memory of what the base contains.
Version counters don't see writes through ``.data``, a NumPy view, or DLPack, and no hash is as fast as the comparison.

The first saves of a process write the bases, later ones only when it pays. Each autosave refers to one base, and no
base to another one. Consecutive autosaves refer to different bases with the same tensors: a file that goes bad on the
disk costs one autosave.

So the parts of a ``torch.save`` file are written apart: the pickle, and the storages with the values of its tensors.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, cast, final

import torch

from lightning_faulttolerant.checkpoint.archive import RecordWriter
from lightning_faulttolerant.checkpoint.autosave_files import base_name, new_key
from lightning_faulttolerant.checkpoint.joined_file import REFERENCES, Place, References
from lightning_faulttolerant.checkpoint.saving import WholeWriter, tensors_in
from lightning_faulttolerant.checkpoint.schema import KEY
from lightning_faulttolerant.checkpoint.verify import read_back
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.store import Store, is_url

Path = tuple[str | int | None, ...]

_serialization: Any = torch.serialization

_PROTOCOL = 2  # torch.serialization.DEFAULT_PROTOCOL
_PIECE_BYTES = 8 * 1024 * 1024


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
    for path, tensor in tensors_in(value):
        is_stored = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"
        if is_stored and all(type(key) in (str, int) for key in path):
            found.setdefault(tensor.untyped_storage()._cdata, path)
    return found


def bytes_of(storage: torch.UntypedStorage) -> list[memoryview]:
    """Return the content of a storage on the CPU, in pieces. It must outlive them.

    It reads by address: ``Tensor.numpy`` needs NumPy, which torch does not require.

    Args:
        storage: The storage.
    """
    num_bytes, address = storage.nbytes(), storage.data_ptr()
    pieces = ((begin, min(_PIECE_BYTES, num_bytes - begin)) for begin in range(0, num_bytes, _PIECE_BYTES))
    return [memoryview((ctypes.c_ubyte * size).from_address(address + begin)).cast("B") for begin, size in pieces]


def on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage itself if it is on the CPU, else a copy there."""
    if storage.device.type == "cpu":
        return storage
    copied: Any = storage
    return copied.cpu()  # type: ignore[no-any-return]


def copy_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the content of a storage as a tensor of bytes in its own memory, on the CPU.

    Args:
        storage: On any device.
    """
    flat = _flat(on_cpu(storage))
    return flat.clone() if storage.device.type == "cpu" else flat


def is_equal(storage: torch.UntypedStorage, copy: torch.Tensor) -> bool:
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


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare two tensors of bytes, of the same length and on the CPU. It is twice as fast as ``torch.equal``."""
    return _memcmp()(left.data_ptr(), right.data_ptr(), len(left)) == 0


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None).memcmp
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return cast("Callable[[int, int, int], int]", found)


MIN_BYTES = 1024
"""A reference to a smaller storage saves next to nothing."""

# Most optimizers change their states at each step. What does not change comes into a later base.
_NOT_IN_FIRST_BASE = ("optimizer_states",)
# It may contain bytes that a trusted resume unpickles. They stay in the file whose permissions are checked.
_NEVER_IN_BASE = (KEY,)
_WITHIN_OBJECTS = None  # no key of a container that is searched
_TEXT = "Tensors that the autosaves next to this file refer to. They can't be loaded without it."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Base:
    """A base that this process has written.

    Args:
        key: The key in its name.
        mark: What its file looked like when it was complete.
        places: Where each storage is in it that has not changed yet.
    """

    key: str
    mark: tuple[int, ...] | None
    places: dict[Path, Place]

    @property
    def name(self) -> str:
        return base_name(self.key)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Increment:
    """What is to be written for one autosave."""

    pickle: bytes
    storages: Mapping[str, torch.UntypedStorage]
    """The storages that the file itself contains, by their keys."""
    paths: Mapping[str, Path]
    """The places of those of them that could be in a base."""
    references: References | None
    base: str | None
    """The key of the base that it refers to; ``None`` if it is a plain file."""
    num_bytes_of_new_base: int
    sums: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """The length and the checksum of each of the storages in `paths`, once written."""

    def write(self, file: IO[bytes]) -> None:
        """Write the file.

        Args:
            file: Open for writing.

        Raises:
            OSError: If it can't be written.
        """
        writer = RecordWriter(WholeWriter(file))
        writer.add("data.pkl", [memoryview(self.pickle)])
        writer.add("byteorder", [memoryview(sys.byteorder.encode())])
        if self.references is not None:
            writer.add(REFERENCES, [memoryview(self.references.encoded())])
        for key, storage in self.storages.items():
            here = on_cpu(storage)  # it must outlive its bytes
            record = writer.add(f"data/{key}", bytes_of(here))
            if key in self.paths:
                self.sums[self.paths[key]] = record.num_bytes, record.crc32
        writer.end()


def _paths(checkpoint: dict[str, Any], storages: Mapping[str, torch.UntypedStorage]) -> dict[str, Path]:
    """Return the place of each storage that may be in a base, by its key.

    Those within objects, such as a library's own tensors, have no place: they are numbered. If the numbers change, they
    differ from what the base contains under them, and are written.
    """
    places = paths_of({name: value for name, value in checkpoint.items() if name not in _NEVER_IN_BASE})
    excluded = paths_of({name: checkpoint[name] for name in _NEVER_IN_BASE if name in checkpoint})
    paths: dict[str, Path] = {}
    numbers = itertools.count()
    for key, storage in storages.items():
        if storage.nbytes() < MIN_BYTES or (storage._cdata in excluded and storage._cdata not in places):
            continue
        paths[key] = places.get(storage._cdata) or (_WITHIN_OBJECTS, next(numbers))
    return paths


@final
class Increments:
    """Knows what is in the bases of a series, and decides when to write another one.

    Args:
        store: The directory of the series.
        check: Called before a base is published; raises if the directory is no longer ours.
        num_bases: How many bases the autosaves refer to in turn, at least 1.
    """

    def __init__(self, store: Store, check: Callable[[], None], *, num_bases: int) -> None:
        self._store = store
        self._check = check
        self._num_bases = num_bases
        self._copies: dict[Path, torch.Tensor] = {}
        """The bytes of each storage that has not changed since the first of the bases was written."""
        self._bases: list[_Base] = []
        """Those that autosaves may refer to, the one of the next autosave first. None has more than the copies."""
        self.own: set[str] = set()
        """The names of the bases that this process has written."""
        self._has_begun = False
        self._sums: dict[Path, tuple[int, int]] = {}
        """What the last autosave held itself, although it could be in a base."""
        self._repeated: set[Path] = set()
        """Those of them that were the same in the autosave before."""
        self._num_repeated_bytes = 0
        """How many bytes would have been saved so far if they were in a base."""

    @property
    def bases(self) -> frozenset[str]:
        """The names of the bases that the next autosaves may refer to."""
        return frozenset(base.name for base in self._bases)

    def prepare(self, checkpoint: dict[str, Any]) -> Increment:
        """Compare a checkpoint with the bases, and write another one first if one is missing, or if that pays.

        Args:
            checkpoint: A dict that ``torch.save`` can write.

        Raises:
            OSError: If the base can't be written.
            DamagedCheckpointError: If the base does not read back as it was written. It is deleted then.
            RunInUseError: If another process has taken over the directory.
        """
        data, storages = pickled(checkpoint)
        paths = _paths(checkpoint, storages)
        known = {path: storages[key] for key, path in paths.items()}
        self._forget_changed(known)
        self._choose(known)
        num_bytes = self._add_base() if self._copies and len(self._bases) < self._num_bases else 0
        base = self._bases[0] if self._bases else None
        based = {} if base is None else {key: base.places[p] for key, p in paths.items() if p in base.places}
        references = None
        if base is not None:
            references = References(base=base.name, records={f"data/{key}": place for key, place in based.items()})
        return Increment(
            pickle=data,
            storages={key: storage for key, storage in storages.items() if key not in based},
            paths={key: path for key, path in paths.items() if key not in based},
            references=references,
            base=None if base is None else base.key,
            num_bytes_of_new_base=num_bytes,
        )

    def note_written(self, increment: Increment) -> None:
        """Note that an autosave is written and verified. The next one refers to another base."""
        self._bases = [*self._bases[1:], *self._bases[:1]]
        self._repeated = {path for path, found in increment.sums.items() if self._sums.get(path) == found}
        self._num_repeated_bytes += sum(increment.sums[path][0] for path in self._repeated)
        self._sums = increment.sums

    def _forget_changed(self, known: Mapping[Path, torch.UntypedStorage]) -> None:
        for path in list(self._copies):
            if path not in known or not is_equal(known[path], self._copies[path]):
                # The copy last: a signal handler may raise in between, and only what has a copy is compared.
                for base in self._bases:
                    base.places.pop(path, None)
                del self._copies[path]
        # One that was deleted or replaced is written again.
        self._bases = [base for base in self._bases if base.places and self._is_there(base)]

    def _choose(self, known: Mapping[Path, torch.UntypedStorage]) -> None:
        """Copy what is to be in new bases: at first almost everything, later what has stopped changing, if it pays."""
        chosen: set[Path]
        if not self._has_begun:
            chosen = {path for path in known if path[0] not in _NOT_IN_FIRST_BASE}
        else:
            chosen = {*self._copies, *(path for path in self._repeated if path in known)}
            num_bytes = self._num_bases * sum(known[path].nbytes() for path in chosen)
            # As in the ski rental problem: buy when the rent has cost as much.
            if not self._repeated or self._num_repeated_bytes < num_bytes:
                return
        self._copies |= {path: copy_of(known[path]) for path in chosen if path not in self._copies}
        self._bases, self._has_begun = [], True
        self._repeated, self._num_repeated_bytes = set(), 0

    def _add_base(self) -> int:
        """Write a base from the copies, and return its size.

        It then contains what the copies contain, even if somebody changes the tensors meanwhile.
        """
        key, places = new_key(), {}
        name = base_name(key)
        with self._store.writer(name) as file:
            writer = RecordWriter(WholeWriter(file))
            writer.add("data.pkl", [memoryview(pickle.dumps(_TEXT, protocol=2))])
            for index, (path, copy) in enumerate(self._copies.items()):
                record = writer.add(f"data/{index}", bytes_of(copy.untyped_storage()))
                places[path] = Place(offset=record.content_offset, num_bytes=record.num_bytes, crc32=record.crc32)
            writer.end()
            num_bytes = file.tell()
            self._check()
            damage = None if is_url(self._store.url) else read_back(file)
            if damage is not None:
                raise DamagedCheckpointError(
                    f"{self._store.path(name)} does not read back as it was written: {damage} Earlier autosaves were "
                    "kept. Check the disk, or save to another one."
                ) from damage
        self.own.add(name)
        self._bases.insert(0, _Base(key=key, mark=self._mark(name), places=places))
        return num_bytes

    def _is_there(self, base: _Base) -> bool:
        return base.mark is not None and base.mark == self._mark(base.name)

    def _mark(self, name: str) -> tuple[int, ...] | None:
        """Return what tells a file from another one under its name; ``None`` if there is none."""
        try:
            if is_url(self._store.url):
                return (self._store.size(name),)
            status = os.stat(self._store.path(name))
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

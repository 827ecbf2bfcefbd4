"""Checkpoints of strategies that shard: from an object store through our store, and without running code of others.

A strategy takes a local path only. So on each rank it gets a stand-in, an empty temporary directory. Within a block,
the files that ``torch.distributed.checkpoint`` writes into it or reads from it are in the store instead. Only the file
with everything outside the shards is in both.

torch loads the index of the shards, ``.metadata``, with ``pickle.load``, and values in the shards that are not tensors
with ``weights_only=False``. Both can run any code that the writer of a file has put there. Within a block, torch
unpickles only what can't run code.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO, Any, Final, final

import torch
from lightning.pytorch.strategies import Strategy

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.manifest import FileEntry
from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.storage.store import Store, local_copy, open_file, open_store
from lightning_faulttolerant.trainer.process import TRUST_VARIABLE
from lightning_faulttolerant.trainer.ranks.compat import files_of_shards

_TEMPORARY = ".tmp"
_PREFIX = "lightning_faulttolerant-"
_PIECE_BYTES = 1024 * 1024


def send_checkpoint(strategy: Strategy, checkpoint: dict[str, object], url: str) -> dict[str, FileEntry]:
    """Let a strategy save a checkpoint below a URL. A collective.

    Args:
        strategy: A strategy that shards.
        checkpoint: Lightning's checkpoint of this rank.
        url: The directory in the object store.

    Returns:
        Sizes and checksums of the files that this rank has written.

    Raises:
        OSError: If a file can't be sent.
        DamagedCheckpointError: If a file did not arrive as it was sent.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as stand_in:
        files = StoredFiles(open_store(url), stand_in)
        with files_of_shards(files), _own_path(strategy, stand_in):
            strategy.save_checkpoint(checkpoint, stand_in)
        metadata = os.path.join(stand_in, METADATA_NAME)
        if os.path.exists(metadata):  # on rank 0
            with open(metadata, "rb") as original, files.open_writer(metadata) as sent:
                shutil.copyfileobj(original, sent, _PIECE_BYTES)
        return files.written


@contextlib.contextmanager
def fetched(strategy: Strategy, url: str) -> Iterator[None]:
    """Within the block, let a strategy that loads a checkpoint by its path load it from a URL.

    Args:
        strategy: The strategy.
        url: A checkpoint: a file, or a directory of shards.

    Raises:
        OSError: If the checkpoint can't be read.
    """
    load = strategy.load_checkpoint
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as stand_in:
        path = os.path.join(stand_in, METADATA_NAME)
        if _fetch(f"{url.rstrip('/')}/{METADATA_NAME}", path):
            local = stand_in
        else:
            _fetch(url, path)
            local = path
        files = StoredFiles(open_store(url), stand_in)

        def load_fetched(_: object, **arguments: Any) -> object:
            with files_of_shards(files), _own_path(strategy, local):
                return load(local, **arguments)

        with replaced(strategy, "load_checkpoint", load_fetched):
            yield


@contextlib.contextmanager
def _own_path(strategy: Strategy, path: str) -> Iterator[None]:
    """Within the block, let a rank use its own local path: strategies take that of rank 0."""
    broadcast = strategy.broadcast

    def keep_path(value: object, *arguments: Any, **more: Any) -> object:
        return value if value == path else broadcast(value, *arguments, **more)

    with replaced(strategy, "broadcast", keep_path):
        yield


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Within the block, let an object have another method or value."""
    own = vars(owner)
    before = own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


def _fetch(url: str, path: str) -> bool:
    """Copy a file to this machine, unless the store does not have it."""
    try:
        original = local_copy(url)
    except (FileNotFoundError, IsADirectoryError):
        return False
    with original, open(path, "wb") as copy:
        shutil.copyfileobj(original, copy, _PIECE_BYTES)
    return True


@final
class StoredFiles:
    """The files of a local directory that are in an object store instead.

    Args:
        store: The directory in the object store.
        directory: The local directory, which stays empty.
    """

    def __init__(self, store: Store, directory: str) -> None:
        self._store = store
        self._directory = directory
        self._begun: dict[str, bytes] = {}
        self.written: dict[str, FileEntry] = {}
        """The files that were written here."""

    @contextlib.contextmanager
    def open_writer(self, path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
        """Open a file for writing that appears, whole, when the block ends; a temporary one waits for its name."""
        name = self._name(path)
        if name.endswith(_TEMPORARY):
            buffer = io.BytesIO()
            yield buffer
            self._begun[name] = buffer.getvalue()
            return
        with self._store.writer(name) as file, _SummedFile(file) as summed:
            yield summed  # type: ignore[misc]
        self.written[name] = FileEntry(size_bytes=summed.tell(), crc32=summed.crc32)

    def open_reader(self, path: str | os.PathLike[str]) -> IO[bytes]:
        """Open a file for reading; only the parts that are read are transferred."""
        return open_file(self._store.path(self._name(path)), whole=True)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a temporary file its name."""
        content = self._begun.pop(self._name(path))
        with self.open_writer(new_path) as file:
            file.write(content)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file was written here. The directory is new, so no other file is in the way."""
        return self._name(path) in self.written

    def _name(self, path: str | os.PathLike[str]) -> str:
        return os.path.relpath(path, self._directory).replace(os.sep, "/")


class _SummedFile(io.RawIOBase):
    """A file that notes size and checksum of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._num_bytes = 0
        self.crc32 = 0
        self._nothing = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._num_bytes

    def fileno(self) -> int:
        # torch syncs the files that it writes, and all disks of the machine if a file has no descriptor.
        return self._nothing.fileno()

    def close(self) -> None:
        self._nothing.close()
        super().close()


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)
"""What the index of real shards refers to: none of it runs code that its arguments name."""

_REFUSED: Final = re.compile(r"GLOBAL ([\w.]+)")
"""The name in torch's error."""


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


@contextlib.contextmanager
def safely_unpickled(path: str, reason: str) -> Iterator[None]:
    """Within the block, let ``torch.distributed.checkpoint`` unpickle only plain values and its own metadata.

    Args:
        path: The directory of shards, for messages.
        reason: Why it is not trusted.

    Raises:
        UnsafeCheckpointError: If the shards hold something else. None of it is unpickled.
    """
    from torch.distributed.checkpoint import filesystem  # noqa: PLC0415, RUF100 - takes a second to import
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415, RUF100
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: PLC0415, RUF100

    refusals: list[UnsafeCheckpointError] = []

    def refusal(what: str, problem: str) -> UnsafeCheckpointError:
        refused = UnsafeCheckpointError(
            f"{path} is not trusted: {reason}. torch would unpickle {what}, which can run any code: {problem}. If you "
            f"trust everyone who can write there, pass FaultTolerance(trust_autosaves=True) or set {TRUST_VARIABLE}=1."
        )
        refusals.append(refused)
        return refused

    def load(file: IO[bytes]) -> object:
        try:
            return _SafeUnpickler(file).load()
        except pickle.UnpicklingError as error:
            raise refusal("its index .metadata", str(error)) from error

    def load_bytes(planner: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = _REFUSED.search(str(error))
            problem = f"it refers to {named[1]}" if named else "weights_only=True refuses it"
            raise refusal(f"the value {read_item.dest_index.fqn}", problem) from error
        value.seek(0)
        real_load_bytes(planner, read_item, value)

    real_pickle, real_load_bytes = filesystem.pickle, DefaultLoadPlanner.load_bytes  # type: ignore[attr-defined]
    filesystem.pickle = SimpleNamespace(**{**vars(pickle), "load": load})  # type: ignore[assignment, attr-defined]
    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[assignment, method-assign]
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch wraps exceptions, or keeps only their text
        of_ranks = [found for found, _ in getattr(error, "failures", {}).values()]
        refusals += [found for found in of_ranks if isinstance(found, UnsafeCheckpointError)]
        if not refusals:
            raise
        raise refusals[0] from error
    finally:
        filesystem.pickle = real_pickle  # type: ignore[attr-defined]
        DefaultLoadPlanner.load_bytes = real_load_bytes  # type: ignore[method-assign]

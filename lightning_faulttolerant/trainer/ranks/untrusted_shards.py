"""Shards that others may have written: within a block, torch unpickles only what can't run code.

torch loads the index of the shards, ``.metadata``, with ``pickle.load``, and values in the shards that are not tensors
with ``weights_only=False``. Both can run any code that the writer of a file has put there.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO, Any, Final

import torch

from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.trainer.settings.environment import TRUST_VARIABLE

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
    def find_class(self, module: str, name: str) -> Any:
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

    def load(file: IO[bytes]) -> Any:
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

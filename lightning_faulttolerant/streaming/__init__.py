"""Streaming data sets that resume immediately: read, write, order, and cache shards. Works without Lightning."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from lightning_faulttolerant.streaming.dataset import StreamingDataset
    from lightning_faulttolerant.streaming.format.output import merge_index
    from lightning_faulttolerant.streaming.format.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
    from lightning_faulttolerant.streaming.loader import StreamingDataLoader
    from lightning_faulttolerant.streaming.sharded import LocalDataset
    from lightning_faulttolerant.streaming.shards import Stream

__all__ = [
    "CSVWriter",
    "JSONWriter",
    "LocalDataset",
    "MDSWriter",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TSVWriter",
    "XSVWriter",
    "merge_index",
]

# The modules of this package import each other through it: importing a name here immediately would be a cycle.
_LAZY = {
    "CSVWriter": "lightning_faulttolerant.streaming.format.writer",
    "JSONWriter": "lightning_faulttolerant.streaming.format.writer",
    "LocalDataset": "lightning_faulttolerant.streaming.sharded",
    "MDSWriter": "lightning_faulttolerant.streaming.format.writer",
    "Stream": "lightning_faulttolerant.streaming.shards",
    "StreamingDataLoader": "lightning_faulttolerant.streaming.loader",
    "StreamingDataset": "lightning_faulttolerant.streaming.dataset",
    "TSVWriter": "lightning_faulttolerant.streaming.format.writer",
    "XSVWriter": "lightning_faulttolerant.streaming.format.writer",
    "merge_index": "lightning_faulttolerant.streaming.format.output",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


# Most runs have no stream. These functions don't load the modules, which would take 20 ms of each start.


def is_stream(value: object) -> TypeGuard[StreamingDataset]:
    """Return whether `value` is a ``StreamingDataset``."""
    return _is_subclass(type(value), "StreamingDataset")


def is_plain_stream(value: object) -> bool:
    """Return whether `value` is a ``StreamingDataset``, and its class does not replace ``__iter__``."""
    return is_stream(value) and type(value).__iter__ is _loaded("StreamingDataset").__iter__


def is_loader_class(kind: type) -> bool:
    """Return whether a class is ``StreamingDataLoader``, or derived from it."""
    return _is_subclass(kind, "StreamingDataLoader")


def _is_subclass(kind: type, name: str) -> bool:
    base = _loaded(name)
    return base is not None and issubclass(kind, base)


def _loaded(name: str) -> Any:
    return getattr(sys.modules.get(_LAZY[name]), name, None)

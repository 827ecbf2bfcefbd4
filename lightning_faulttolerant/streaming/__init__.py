"""Streaming data sets that resume immediately: read, write, order, and cache shards. Works without Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

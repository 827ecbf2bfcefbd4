"""Durable files: atomic writing, verifying, the series of autosaves and the lock of a run's directory.

This layer knows only bytes and paths, not Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_faulttolerant.checkpoint.atomic import atomic_torch_save, atomic_write_bytes
    from lightning_faulttolerant.checkpoint.atomic_file import atomic_writer
    from lightning_faulttolerant.checkpoint.contents import verify_directory, write_manifest
    from lightning_faulttolerant.checkpoint.lock import RunLock
    from lightning_faulttolerant.checkpoint.manifest import read_manifest
    from lightning_faulttolerant.checkpoint.outcome import Verification
    from lightning_faulttolerant.checkpoint.series import AutosaveSeries
    from lightning_faulttolerant.checkpoint.store import is_url, open_file, open_store
    from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths, verify_file, verify_path

__all__ = [
    "AutosaveSeries",
    "RunLock",
    "Verification",
    "atomic_torch_save",
    "atomic_write_bytes",
    "atomic_writer",
    "is_url",
    "load_file",
    "open_file",
    "open_store",
    "read_manifest",
    "unsafe_paths",
    "verify_directory",
    "verify_file",
    "verify_path",
    "write_manifest",
]

# Loaded on first use: some need torch, which takes a second to import. The command line works without it.
_LAZY = {
    "AutosaveSeries": "series",
    "RunLock": "lock",
    "Verification": "outcome",
    "atomic_torch_save": "atomic",
    "atomic_write_bytes": "atomic",
    "atomic_writer": "atomic_file",
    "is_url": "store",
    "load_file": "verify",
    "open_file": "store",
    "open_store": "store",
    "read_manifest": "manifest",
    "unsafe_paths": "verify",
    "verify_directory": "contents",
    "verify_file": "verify",
    "verify_path": "verify",
    "write_manifest": "contents",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

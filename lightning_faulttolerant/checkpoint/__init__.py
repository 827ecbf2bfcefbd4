"""Checkpoints on disk: formats, the series of autosaves, verification, trust. Knows torch and files, not Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_faulttolerant.checkpoint.contents import verify_directory, write_manifest
    from lightning_faulttolerant.checkpoint.manifest import Verification, read_manifest
    from lightning_faulttolerant.checkpoint.saving import atomic_torch_save, atomic_write_bytes
    from lightning_faulttolerant.checkpoint.series import AutosaveSeries
    from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths, verify_file, verify_path
    from lightning_faulttolerant.storage.local import atomic_writer
    from lightning_faulttolerant.storage.lock import RunLock
    from lightning_faulttolerant.storage.store import is_url, open_file, open_store

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
    "AutosaveSeries": "lightning_faulttolerant.checkpoint.series",
    "RunLock": "lightning_faulttolerant.storage.lock",
    "Verification": "lightning_faulttolerant.checkpoint.manifest",
    "atomic_torch_save": "lightning_faulttolerant.checkpoint.saving",
    "atomic_write_bytes": "lightning_faulttolerant.checkpoint.saving",
    "atomic_writer": "lightning_faulttolerant.storage.local",
    "is_url": "lightning_faulttolerant.storage.store",
    "load_file": "lightning_faulttolerant.checkpoint.verify",
    "open_file": "lightning_faulttolerant.storage.store",
    "open_store": "lightning_faulttolerant.storage.store",
    "read_manifest": "lightning_faulttolerant.checkpoint.manifest",
    "unsafe_paths": "lightning_faulttolerant.checkpoint.verify",
    "verify_directory": "lightning_faulttolerant.checkpoint.contents",
    "verify_file": "lightning_faulttolerant.checkpoint.verify",
    "verify_path": "lightning_faulttolerant.checkpoint.verify",
    "write_manifest": "lightning_faulttolerant.checkpoint.contents",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

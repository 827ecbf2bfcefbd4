"""Durable files: atomic writing, verifying, the series of autosaves and the lock of a run's directory.

This layer knows bytes and paths, and nothing of Lightning.
"""

from __future__ import annotations

from lightning_faulttolerant.checkpoint.atomic import atomic_torch_save, atomic_write_bytes
from lightning_faulttolerant.checkpoint.atomic_file import atomic_writer
from lightning_faulttolerant.checkpoint.lock import RunLock
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.store import is_url, open_file, open_store
from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths, verify_file

__all__ = [
    "AutosaveSeries",
    "RunLock",
    "atomic_torch_save",
    "atomic_write_bytes",
    "atomic_writer",
    "is_url",
    "load_file",
    "open_file",
    "open_store",
    "unsafe_paths",
    "verify_file",
]

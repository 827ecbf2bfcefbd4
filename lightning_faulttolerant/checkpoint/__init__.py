"""Durable files: atomic writing, verifying, the series of autosaves and the lock of a run's directory.

This layer knows bytes and paths, and nothing of Lightning.
"""

from __future__ import annotations

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

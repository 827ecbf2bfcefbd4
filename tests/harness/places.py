"""The location of the tests' files: in memory if there is room, except for tests that are about disks.

In memory a file is synced without delay. A killed process leaves the same behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 6 << 30
_PREFIX = "tests-"
_ON_DISK = "TESTS_ON_DISK"


def make_directory() -> Path:
    """Create a directory for the temporary files of this process and its children, in memory if there is room."""
    _remove_abandoned()
    on_disk = tempfile.gettempdir()
    try:
        has_room = shutil.disk_usage(_MEMORY).free >= _NEEDED_BYTES
    except OSError:
        has_room = False
    directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY if has_room else on_disk))
    os.environ[_ON_DISK] = on_disk
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    return directory


def on_disk() -> str:
    """Return the original directory for temporary files."""
    return os.environ.get(_ON_DISK, tempfile.gettempdir())


def _remove_abandoned() -> None:
    """Remove the directories of killed suites."""
    for directory in _MEMORY.glob(f"{_PREFIX}*"):
        process_id = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", process_id).exists():
            shutil.rmtree(directory, ignore_errors=True)

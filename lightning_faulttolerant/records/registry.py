"""The registry: where each unfinished run keeps its autosaves, in a place that stays the same from start to start.

Each run has its own small file, so processes never wait for each other. The place is the directory in which the process
was started, or the one that ``PL_FAULT_TOLERANT_REGISTRY`` names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_faulttolerant.records.runs import Command, command_from

VARIABLE = "PL_FAULT_TOLERANT_REGISTRY"
FOLDER = ".lightning_faulttolerant"
_SUFFIX = ".json"
_TRIES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredRun:
    """An unfinished run.

    Args:
        run_id: The name of its directory.
        directory: That directory, as an absolute path or a URL.
        command: The command that first started it.
        began: When it began, in seconds since 1970.
    """

    run_id: str
    directory: str
    command: Command
    began: float


class Registry:
    """The unfinished runs that were started in one place.

    Args:
        directory: The directory of the registry; created when the first run is added.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def add(self, entry: RegisteredRun) -> None:
        """Add a run, or replace its entry.

        Raises:
            OSError: If the registry can't be written to.
        """
        for _ in range(_TRIES):
            # Another process may remove the directory, which was empty, at any moment.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self._write(entry)
                return
        self._write(entry)

    def _write(self, entry: RegisteredRun) -> None:
        if not self.directory.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / ".gitignore").write_text("*\n")
        path = self._path_of(entry.directory)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(json.dumps(asdict(entry)).encode("utf-8", "surrogateescape"))
        os.replace(temporary, path)

    def remove(self, directory: str) -> None:
        """Remove the run of a directory, if it is registered."""
        with contextlib.suppress(OSError):
            self._path_of(directory).unlink()
        with contextlib.suppress(OSError):
            if [path.name for path in self.directory.iterdir()] == [".gitignore"]:
                (self.directory / ".gitignore").unlink()
                self.directory.rmdir()

    def entries(self) -> list[RegisteredRun]:
        """Return all runs, the oldest first; files that can't be read are skipped."""
        try:
            paths = sorted(self.directory.glob(f"*{_SUFFIX}"))
        except OSError:
            return []
        found = (_read(path) for path in paths)
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.began)

    def _path_of(self, directory: str) -> Path:
        digest = hashlib.blake2b(directory.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        return self.directory / f"{digest}{_SUFFIX}"


def _read(path: Path) -> RegisteredRun | None:
    try:
        found = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
        return RegisteredRun(**{**found, "command": command_from(found["command"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def registry_at(directory: str) -> Registry:
    """Return the registry for runs that are started in a directory, or the one that the variable names.

    Args:
        directory: The directory, as an absolute path.
    """
    named = os.environ.get(VARIABLE)
    return Registry(os.path.abspath(os.path.expanduser(named)) if named else os.path.join(directory, FOLDER))

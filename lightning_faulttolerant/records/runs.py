"""The record of a run, next to its autosaves: the command that started it, how each fit started, and its parent.

It is kept in ``<dirpath>/<run_id>/run.json``, here or in an object store, as long as the run has autosaves.

The registry names the directory of each unfinished run. Each run has its own small file there, so processes never wait
for each other. The place is the directory in which the process was started, or the one that
``PL_FAULT_TOLERANT_REGISTRY`` names.

What the command ``batch`` requests of the script's processes: the directory of their run, and nothing else.

The request is a path in the environment. The first process writes the directory there, and all processes end before
they read, train, or save anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_faulttolerant.records.lines import parse_json, read_json

FILE_NAME = "run.json"
RUN_ID_VARIABLE = "PL_FAULT_TOLERANT_RUN_ID"
RESUME_FROM_VARIABLE = "PL_FAULT_TOLERANT_RESUME_FROM"
"""Where a branch begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command that a run was started with.

    Args:
        script: The absolute path of the script, or a word for a process without one.
        arguments: The arguments after the script.
        task: The number of the task in a job array, with the variable that holds it, or ``""``.
        words: The whole command, to type it again.
        directory: The directory in which it was typed.
        run_id: The value of ``PL_FAULT_TOLERANT_RUN_ID``, or ``""``.
        content: A checksum of the script, or ``""`` if it has no file.
        resume_from: Where the branch begins, if the run is one; else ``""``.
    """

    script: str = ""
    arguments: tuple[str, ...] = ()
    task: str = ""
    words: tuple[str, ...] = ()
    directory: str = ""
    run_id: str = ""
    content: str = ""
    resume_from: str = ""

    @property
    def name(self) -> str:
        """The name of the script without its directory."""
        return os.path.basename(self.script)

    def is_alike(self, other: Command) -> bool:
        """Return whether another command is the same, with the same script in another directory."""
        own, theirs = ((one.name, one.arguments, one.task, one.content, one.resume_from) for one in (self, other))
        return own == theirs

    def line(self, *, here: str = "") -> str:
        """Return the line to type.

        Args:
            here: The working directory to type it in; by default that of the command.
        """
        there = "" if not here or os.path.realpath(here) == os.path.realpath(self.directory) else self.directory
        change = f"cd {shlex.quote(there)} && " if there else ""
        variables = {RUN_ID_VARIABLE: self.run_id, RESUME_FROM_VARIABLE: self.resume_from}
        variable = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items() if value)
        return f"{change}{variable}{shlex.join(self.words)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FitRecord:
    """How a fit started.

    Args:
        start: Its start fingerprint, as returned by `StartFingerprint.state_dict`.
        is_finished: Whether it has finished.
    """

    start: Mapping[str, Any] = field(default_factory=dict)
    is_finished: bool = False

    @property
    def is_evaluation(self) -> bool:
        """Whether it is a ``validate``, ``test``, or ``predict``."""
        return "function" in self.start.get("core", {})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The record of a run.

    Args:
        run_id: The name of its directory.
        command: The command that first started it.
        began: When it began, in seconds since 1970.
        fits: Its fits, by number.
    """

    run_id: str = ""
    command: Command = Command()
    began: float = 0.0
    fits: Mapping[int, FitRecord] = field(default_factory=dict)

    def with_fit(self, number: int, fit: FitRecord) -> RunRecord:
        """Return the record with one fit added or replaced."""
        return replace(self, fits={**self.fits, number: fit})

    def to_json(self) -> bytes:
        """Return the content that `record_from_json` reads."""
        return json.dumps(asdict(self), sort_keys=True).encode("utf-8", "surrogateescape")


def record_from_json(content: bytes) -> RunRecord | None:
    """Return the record that `RunRecord.to_json` wrote; ``None`` if it is something else, or from a newer version."""
    try:
        found = parse_json(content.decode("utf-8", "surrogateescape"))
        fits = {int(number): FitRecord(**fit) for number, fit in found.pop("fits").items()}
        return RunRecord(**{**found, "command": command_from(found["command"]), "fits": fits})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def command_from(found: Mapping[str, Any]) -> Command:
    """Return a command from the result of ``asdict``.

    Raises:
        TypeError: If it is something else.
    """
    return Command(**{**found, "arguments": tuple(found["arguments"]), "words": tuple(found["words"])})


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
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # not through a link
            file.write(json.dumps(asdict(entry)).encode("utf-8", "surrogateescape"))
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
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            found = read_json(file)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """What a branch begins from.

    Args:
        run_id: The run id of the parent.
        directory: The directory of the parent, as an absolute path or a URL.
        autosave: The name of the autosave.
        epoch: Its epoch, from 0.
        batch: How many batches of the epoch were done.
        global_step: How many optimizer steps were done.
        changed: A line for each setting that differs from the parent's.
    """

    run_id: str
    directory: str
    autosave: str
    epoch: int
    batch: int
    global_step: int
    changed: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, object]:
        """Return the parent as plain values."""
        return {**asdict(self), "changed": list(self.changed)}

    @property
    def place(self) -> str:
        """Where the branch begins, in words."""
        return f"step {self.global_step} (batch {self.batch} of epoch {self.epoch})"


def parent_from(state: object) -> Parent | None:
    """Return the parent that `Parent.state_dict` describes, or ``None`` if it is something else.

    Args:
        state: Any value that was read from a file.
    """
    if not isinstance(state, Mapping):
        return None
    texts = {name: state.get(name) for name in ("run_id", "directory", "autosave")}
    numbers = {name: state.get(name) for name in ("epoch", "batch", "global_step")}
    if not all(isinstance(text, str) for text in texts.values()) or not all(type(n) is int for n in numbers.values()):
        return None
    lines = state.get("changed")
    changed = tuple(line for line in lines if isinstance(line, str)) if isinstance(lines, (list, tuple)) else ()
    return Parent(**texts, **numbers, changed=changed)  # type: ignore[arg-type]  # checked above

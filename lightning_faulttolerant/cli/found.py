"""Find the checkpoints below a directory or URL, recognize our autosaves by their names, and read our part of them.

Our part of a described checkpoint may hold anything: values of the wrong form count as missing.
"""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from lightning_faulttolerant.checkpoint.autosave_files import (
    AUTOSAVE_NAME,
    KEPT_FOLDER,
    METADATA_NAME,
    SUPERSEDED_NAME,
    is_kept,
    sequence_of,
)
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.cli.text import remote_errors
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.history import DEFAULT_FOLDER, FINISHED
from lightning_faulttolerant.records.incidents import INCIDENTS_FOLDER, step_of_incident
from lightning_faulttolerant.records.runs import RegisteredRun, Registry, registry_at
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store

KEY = "lightning_faulttolerant"


def mapping(value: object, *names: str) -> Mapping[Any, Any]:
    """Return the mapping at a place in nested mappings, or an empty one.

    Args:
        value: The outermost mapping.
        names: Keys on the way to the place.
    """
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def own_mapping(rank: object, *names: str) -> Mapping[object, object]:
    """Return what a rank other than rank 0 holds at a place, without values equal to rank 0's (`state.differences`).

    Args:
        rank: The state of that rank.
        names: Keys on the way to the place.
    """
    for number, name in enumerate(names):
        rank = mapping(rank, "own").get(name)
        if isinstance(rank, list):  # everything here is the rank's own
            return mapping(rank[0] if rank else None, *names[number + 1 :])
    own = mapping(rank, "own")
    return {key: value[0] for key, value in own.items() if isinstance(value, list) and value}


def whole_number(value: object) -> int | None:
    """Return an integer of ordinary size, or None.

    Args:
        value: Anything.
    """
    return value if type(value) is int and abs(value) < 1 << 63 else None


def part_of(content: object) -> Mapping[object, object] | None:
    """Return our part of a checkpoint, or None if it has none.

    Args:
        content: The described checkpoint.
    """
    part = content.get(KEY) if isinstance(content, Mapping) else None
    return part if isinstance(part, Mapping) else None


def step_of(content: object) -> int | None:
    """Return the number of optimizer steps.

    Args:
        content: The described checkpoint.
    """
    step = whole_number(mapping(part_of(content), "position").get("global_step"))
    return whole_number(mapping(content).get("global_step")) if step is None else step


def epoch_of(content: object) -> int | None:
    """Return the epoch of the run, from 0.

    Args:
        content: The described checkpoint.
    """
    epoch = whole_number(mapping(part_of(content), "position").get("epoch"))
    return whole_number(mapping(content).get("epoch")) if epoch is None else epoch


def batch_of(content: object) -> int | None:
    """Return the number of consumed batches in the epoch; without our part, Lightning's count of finished batches.

    Args:
        content: The described checkpoint.
    """
    batch = whole_number(mapping(part_of(content), "position").get("batch"))
    if batch is not None:
        return batch
    progress = mapping(content, "loops", "fit_loop", "epoch_loop.batch_progress", "current")
    return whole_number(progress.get("completed"))


def is_finished(content: object) -> bool:
    """Return whether the autosave marks its fit or evaluation as finished.

    Args:
        content: The described checkpoint.
    """
    where = mapping(part_of(content), "position").get("where")
    return where in (FINISHED, "after validate", "after test", "after predict")


def world_size_of(content: object) -> int | None:
    """Return the number of ranks of the run; None if our part does not contain it.

    Args:
        content: The described checkpoint.
    """
    return whole_number(mapping(part_of(content)).get("world_size"))


AUTOSAVE = "autosave"
SET_ASIDE = "set aside"
SUPERSEDED = "superseded"
KEPT = "kept"
INCIDENT = "incident"
CHECKPOINT = "checkpoint"
DIRECTORY = "directory"

# The names that AtomicDirectory gives to directories that it renames.
_DIRECTORY_ASIDE = re.compile(r".+_checkpoint_\d+(_force)?\.(damaged|uncommitted)(-\d+)?")
_SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A checkpoint that was found. Its contents have not been read.

    Args:
        folder: The directory that contains it, as a path or URL.
        name: Its name in that directory.
        num_bytes: Size of the file.
        saved_at: Time of the save in seconds since 1970; None if the store does not report it.
        is_link: Whether it is a symbolic link.
        is_directory: Whether it is a directory with a manifest. Its size is then that of all its files.
    """

    folder: str
    name: str
    num_bytes: int
    saved_at: float | None
    is_link: bool = False
    is_directory: bool = False

    @property
    def path(self) -> str:
        """The whole path or URL."""
        return f"{self.folder.rstrip('/')}/{self.name}"

    @property
    def kind(self) -> str:
        """The kind of file, judged by its name and directory."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        if match is None and self.is_directory:
            return SET_ASIDE if _DIRECTORY_ASIDE.fullmatch(self.name) else DIRECTORY
        if match is None:
            return INCIDENT if self.is_incident else CHECKPOINT
        if match["damaged"]:
            return SET_ASIDE
        if is_kept(self.name) and (_name_of(self.folder) == KEPT_FOLDER or is_superseded(self.folder)):
            return KEPT
        return SUPERSEDED if is_superseded(self.folder) else AUTOSAVE

    @property
    def is_autosave(self) -> bool:
        """Whether it has the name of an autosave (a file or a directory of shards), set aside or not."""
        return AUTOSAVE_NAME.fullmatch(self.name) is not None

    @property
    def is_incident(self) -> bool:
        """Whether it is the state that the flight recorder has written for an incident."""
        is_there = _name_of(self.folder) == INCIDENTS_FOLDER or is_superseded(self.folder)
        return is_there and step_of_incident(self.name) is not None

    @property
    def sequence(self) -> int:
        """The number of an autosave in its series; 0 for any other file."""
        return sequence_of(self.name)

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch and batch in the name of an autosave."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        return (int(match["epoch"]), int(match["batch"])) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The files below a directory, sorted by folder and age, and the problems of reading it."""

    files: list[FoundFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def by_folder(self) -> dict[str, list[FoundFile]]:
        """Return the files of each folder."""
        folders: dict[str, list[FoundFile]] = {}
        for file in self.files:
            folders.setdefault(file.folder, []).append(file)
        return folders


def open_checkpoint(path: str, *, whole: bool = False) -> IO[bytes]:
    """Open a checkpoint file for reading, seekable.

    Args:
        path: Path or URL.
        whole: Whether it will be read completely, from beginning to end.

    Raises:
        OSError: If the file can't be read, or is a device or a pipe: those have no end, or wait for a writer.
    """
    if not is_url(path):
        mode = os.stat(local_path(path)).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, 'Is a directory; "list" shows the checkpoints in it', path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)
    return open_file(path, whole=whole)


def content_path(path: str) -> str:
    """Return the file that describes a checkpoint. In a directory of shards, it holds everything outside the shards.

    Args:
        path: Path or URL.
    """
    if is_url(path):
        store = open_store(path)
        return store.path(METADATA_NAME) if {METADATA_NAME, MANIFEST_NAME} <= {*store.listing().files} else path
    if not os.path.isdir(local_path(path)):
        return path
    inner = os.path.join(local_path(path), METADATA_NAME)
    return inner if os.path.exists(inner) else path


def is_superseded(folder: str) -> bool:
    """Return whether a folder holds a series of autosaves that was set aside.

    Args:
        folder: Path or URL.
    """
    return SUPERSEDED_NAME.fullmatch(_name_of(folder)) is not None


def _name_of(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def find_checkpoints(directory: str) -> Found:
    """Find all checkpoint files below a directory. Skip hidden directories and links to directories.

    Args:
        directory: Path or URL.

    Raises:
        NotADirectoryError: If it is a file.
        FileNotFoundError: If the local directory does not exist. Object stores have no directories: the result is then
            empty.
        OSError: If it can't be read.
    """
    problems: list[str] = []
    files = list(_remote(directory) if is_url(directory) else _local(local_path(directory), problems))
    files.sort(key=lambda file: (_natural(file.folder), file.sequence, file.saved_at or 0.0, file.name))
    return Found(files=files, problems=problems)


def _local(directory: str, problems: list[str]) -> Iterator[FoundFile]:
    if not stat.S_ISDIR(os.stat(directory).st_mode):
        raise NotADirectoryError(f"{directory} is a file, not a directory")
    os.scandir(directory).close()  # raises if access is denied; os.walk would find nothing and report no error

    def note(error: OSError) -> None:
        # A file that a continuing run has just deleted is not a problem. A broken link is one.
        if not isinstance(error, FileNotFoundError) or os.path.islink(error.filename):
            problems.append(str(error))

    for folder, folders, names in os.walk(directory, onerror=note):
        is_shards = AUTOSAVE_NAME.fullmatch(os.path.basename(folder)) is not None and bool(names)
        if MANIFEST_NAME in names or is_shards:
            folders.clear()
            try:
                yield _local_directory(folder)
            except OSError as error:
                note(error)
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in filter(_is_checkpoint, names):
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError as error:
                note(error)
                continue
            if stat.S_ISREG(status.st_mode):
                yield FoundFile(
                    folder=folder,
                    name=name,
                    num_bytes=status.st_size,
                    saved_at=status.st_mtime,
                    is_link=os.path.islink(path),
                )


def _local_directory(folder: str) -> FoundFile:
    parent, name = os.path.split(folder.rstrip("/"))
    if name in ("", ".", ".."):
        parent, name = os.path.split(os.path.abspath(folder))
    statuses = [os.lstat(os.path.join(inner, file)) for inner, _, files in os.walk(folder) for file in files]
    return FoundFile(
        folder=parent or ".",
        name=name,
        num_bytes=sum(status.st_size for status in statuses),
        saved_at=_committed_at(folder),
        is_directory=True,
    )


def _committed_at(folder: str) -> float:
    try:
        return os.stat(os.path.join(folder, MANIFEST_NAME)).st_mtime
    except FileNotFoundError:  # removed by another process
        return os.stat(folder).st_mtime


def _remote(url: str) -> Iterator[FoundFile]:
    from lightning_faulttolerant.storage.file_systems import file_system

    with remote_errors(url):
        fs, root = file_system(url)
        fs.invalidate_cache()
        found: dict[str, dict[str, object]] = fs.find(root, detail=True)
    if root in found:
        raise NotADirectoryError(f"{url} is a file, not a directory")
    infos = {path.removeprefix(root.rstrip("/")).lstrip("/"): info for path, info in found.items()}
    committed = [path.removesuffix(MANIFEST_NAME) for path in infos if path.rpartition("/")[2] == MANIFEST_NAME]
    for start in committed:
        folder, name = _split(url, start)
        yield FoundFile(
            folder=folder,
            name=name,
            num_bytes=sum(_size(info) for path, info in infos.items() if path.startswith(start)),
            saved_at=_saved_at(infos[start + MANIFEST_NAME]),
            is_directory=True,
        )
    for path, info in infos.items():
        folder, name = _split(url, path)
        if _is_checkpoint(name) and not any(path.startswith(start) for start in committed):
            yield FoundFile(folder=folder, name=name, num_bytes=_size(info), saved_at=_saved_at(info))


def _split(url: str, path: str) -> tuple[str, str]:
    folder, _, name = f"{url.rstrip('/')}/{path}".rstrip("/").rpartition("/")
    return folder, name


def _size(info: dict[str, Any]) -> int:
    return int(info.get("size") or 0)


def _is_checkpoint(name: str) -> bool:
    return not name.startswith(".") and (name.endswith(_SUFFIX) or AUTOSAVE_NAME.fullmatch(name) is not None)


def _saved_at(info: dict[str, object]) -> float | None:
    """Return the time of a save from a file system's info. Each file system has its own name for the field."""
    for name in ("LastModified", "mtime", "updated", "modified", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
            except ValueError:
                continue
    return None


def _natural(folder: str) -> list[tuple[int, str]]:
    """Return a sort key that puts fit-10 after fit-9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", folder)]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedRun:
    """A run of the registry.

    Args:
        entry: Its entry in the registry.
        newest: Its newest autosave.
    """

    entry: RegisteredRun
    newest: FoundFile


def registry_here() -> Registry:
    """Return the registry of the runs started in this directory, or the one that the environment variable names."""
    return registry_at(os.getcwd())


def unfinished_runs(registry: Registry) -> Iterator[UnfinishedRun]:
    """Yield the runs that have autosaves. A run without its directory has none.

    Args:
        registry: The registry with the runs.
    """
    for entry in registry.entries():
        try:
            found = find_checkpoints(entry.directory).files
            files = [file for file in found if file.is_autosave and file.kind != KEPT]
        except (OSError, CheckpointError):
            continue
        if files:
            yield UnfinishedRun(entry=entry, newest=max(files, key=lambda file: (file.saved_at or 0.0, file.sequence)))


def meant(name: str | None) -> str:
    """Return what a person means: this directory by nothing, a run by its name, else a path or URL by itself.

    Args:
        name: What was typed.

    Raises:
        FileNotFoundError: If there is neither a run nor a path with this name.
        CheckpointError: If several runs have this name.
    """
    if name is None:
        return "."
    entries = [entry for entry in registry_here().entries() if entry.run_id == name]
    if len(entries) > 1:
        names = "".join(f"\n  {entry.directory}" for entry in entries)
        raise CheckpointError(f"There are {len(entries)} runs with the id {name}. Pass the directory of one:{names}")
    if entries:
        return entries[0].directory
    if is_url(name) or os.path.lexists(local_path(name)):
        return name
    path = os.path.abspath(os.path.join(DEFAULT_FOLDER, name))
    if name and os.path.isdir(path):
        return path
    reason = 'No such file or directory, and no run has this name; "list" shows the runs of this directory'
    raise FileNotFoundError(errno.ENOENT, reason, name)


def checkpoint_meant(name: str | None) -> str:
    """Return the checkpoint that a person means: the newest one, if it is a run or a directory.

    Args:
        name: What was typed.

    Raises:
        FileNotFoundError: If there is none.
        OSError: If something can't be read.
    """
    path = meant(name)
    if content_path(path) != path:
        return path
    try:
        files = [file for file in find_checkpoints(path).files if file.kind not in (SET_ASIDE, SUPERSEDED, INCIDENT)]
    except (NotADirectoryError, CheckpointError):
        return path
    if not files:
        raise FileNotFoundError(errno.ENOENT, "No checkpoints are there", path)
    return max(files, key=lambda file: (file.saved_at or 0.0, file.sequence)).path

"""Find the checkpoints and runs that a person means, recognize our autosaves by their names, and read our part of them.

Our part of a described checkpoint may hold anything: values of the wrong form count as missing.
"""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from lightning_faulttolerant.checkpoint.autosave_files import (
    AUTOSAVE_NAME,
    KEPT_FOLDER,
    METADATA_NAME,
    SUPERSEDED_NAME,
    fit_number,
    is_kept,
    sequence_of,
)
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.cli.text import reason_of, remote_errors, safe
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.history import FILE_NAME
from lightning_faulttolerant.records.incidents import INCIDENTS_FOLDER, step_of_incident
from lightning_faulttolerant.records.runs import Registry, registry_at
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store, split_path

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
_SHARDED = {METADATA_NAME, ".metadata"}  # the files of a directory that Lightning's strategies save


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
    def content_path(self) -> str:
        """The file that describes it. In a directory of shards, it holds everything outside the shards."""
        has_inner = self.is_directory and METADATA_NAME in open_store(self.path).names()
        return f"{self.path}/{METADATA_NAME}" if has_inner else self.path

    @property
    def kind(self) -> str:
        """The kind of file, judged by its name and directory."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        if match is None and self.is_directory:
            return SET_ASIDE if _DIRECTORY_ASIDE.fullmatch(self.name) else DIRECTORY
        if match is None:
            is_beside = _name_of(self.folder) == INCIDENTS_FOLDER or is_superseded(self.folder)
            return INCIDENT if is_beside and step_of_incident(self.name) is not None else CHECKPOINT
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
    def age(self) -> tuple[float, int]:
        """The time of the save, and the number of an autosave in its series; the larger, the newer."""
        return self.saved_at or 0.0, sequence_of(self.name)

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch and batch in the name of an autosave."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        return (int(match["epoch"]), int(match["batch"])) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found below a directory.

    Args:
        path: Its path or URL.
        files: The checkpoints, sorted by folder and age.
        histories: The directories of the runs with a history.
        problems: What could not be read, and why.
        is_one: Whether it is not a directory with checkpoints, but one itself.
    """

    path: str
    files: list[FoundFile]
    histories: list[str]
    problems: list[str]
    is_one: bool

    def by_folder(self) -> dict[str, list[FoundFile]]:
        """Return the files of each folder."""
        folders: dict[str, list[FoundFile]] = {}
        for file in self.files:
            folders.setdefault(file.folder, []).append(file)
        return folders

    @property
    def why_nothing(self) -> str:
        """The end of a sentence that says that nothing was found."""
        is_memory = self.path.startswith("memory://")
        return "; only the process that writes to memory:// can read it" if is_memory else ""

    def print_problems(self) -> None:
        """Print what could not be read."""
        for problem in self.problems:
            print(safe(problem), file=sys.stderr)

    def newest(self) -> FoundFile:
        """Return the newest checkpoint that a run can continue from, or the only one that the search was for.

        Raises:
            FileNotFoundError: If there is none.
        """
        files = [file for file in self.files if self.is_one or file.kind not in (SET_ASIDE, SUPERSEDED, INCIDENT)]
        if not files:
            more = '; "report" shows the history of the run' if self.histories else self.why_nothing
            raise FileNotFoundError(errno.ENOENT, f"No checkpoints are there{more}", self.path)
        return max(files, key=lambda file: file.age)

    def newest_of_runs(self) -> dict[str, FoundFile]:
        """Return the newest autosave of each run by the directory of the run, the newest run first."""
        newest: dict[str, FoundFile] = {}
        for file in sorted(self.files, key=lambda file: file.age, reverse=True):
            if file.kind == AUTOSAVE:
                newest.setdefault(real(run_directory(file.folder)), file)
        return newest


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
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "Not a regular file", path)
    return open_file(path, whole=whole)


def is_superseded(folder: str) -> bool:
    """Return whether a folder holds a series of autosaves that was set aside.

    Args:
        folder: Path or URL.
    """
    return SUPERSEDED_NAME.fullmatch(_name_of(folder)) is not None


def run_directory(folder: str) -> str:
    """Return the directory of the run that saves in a folder, which the run locks.

    Args:
        folder: Path or URL.
    """
    return folder.rstrip("/").rpartition("/")[0] if fit_number(_name_of(folder)) else folder


def _name_of(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def find_checkpoints(path: str) -> Found:
    """Find a checkpoint, or all below a directory. Skip hidden directories and links to directories.

    Args:
        path: Path or URL. A history stands for the directory of its run.

    Raises:
        FileNotFoundError: If the local path does not exist. Object stores have no directories: the result is then
            empty.
        OSError: If it can't be read.
    """
    folder, name = split_path(path)
    if name == FILE_NAME:
        path = folder or "."
    histories: list[str] = []
    problems: list[str] = []
    found = _remote(path, histories) if is_url(path) else _local(local_path(path), histories, problems)
    files = sorted(
        found, key=lambda file: (_natural(file.folder), sequence_of(file.name), file.saved_at or 0.0, file.name)
    )
    is_one = len(files) == 1 and real(files[0].path) == real(path)
    return Found(path=path, files=files, histories=histories, problems=problems, is_one=is_one)


def real(path: str) -> str:
    """Return the one name of a place that may have several.

    Args:
        path: Path or URL.
    """
    return path.rstrip("/") if is_url(path) else os.path.realpath(local_path(path))


def _local(path: str, histories: list[str], problems: list[str]) -> Iterator[FoundFile]:
    parent, base = os.path.split(path)
    is_file = not stat.S_ISDIR(os.stat(path).st_mode)
    if not is_file:
        os.scandir(path).close()  # raises if access is denied; os.walk would find nothing and report no error

    def note(error: OSError) -> None:
        # A file that a continuing run has just deleted is not a problem. A broken link is one.
        if not isinstance(error, FileNotFoundError) or os.path.islink(error.filename):
            problems.append(str(error))

    for folder, folders, names in [(parent or ".", [], [base])] if is_file else os.walk(path, onerror=note):
        is_shards = AUTOSAVE_NAME.fullmatch(os.path.basename(folder)) is not None and bool(names)
        if is_shards or MANIFEST_NAME in names or {*names} >= _SHARDED:
            folders.clear()
            try:
                yield _local_directory(folder)
            except OSError as error:
                note(error)
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        histories += [folder] if FILE_NAME in names else []
        for name in names if is_file else filter(_is_checkpoint, names):
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError as error:
                note(error)
                continue
            if stat.S_ISREG(status.st_mode) or is_file:
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


def _remote(url: str, histories: list[str]) -> Iterator[FoundFile]:
    from lightning_faulttolerant.storage.file_systems import file_system

    with remote_errors(url):
        fs, root = file_system(url)
        fs.invalidate_cache()
        found: dict[str, dict[str, object]] = fs.find(root, detail=True)
    infos = {path.removeprefix(root.rstrip("/")).lstrip("/"): info for path, info in found.items()}
    histories += [_split(url, path)[0] for path in infos if path.rpartition("/")[2] == FILE_NAME]
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
        if (not path or _is_checkpoint(name)) and not any(path.startswith(start) for start in committed):
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


def registry_here() -> Registry:
    """Return the registry of the runs started in this directory, or the one that the environment variable names."""
    return registry_at(os.getcwd())


def meant(name: str) -> str:
    """Return the run that has a name, else a path or URL by itself.

    Args:
        name: What was typed.

    Raises:
        FileNotFoundError: If there is neither a run nor a path with this name.
        CheckpointError: If several runs have this name.
    """
    directories = [entry.directory for entry in registry_here().entries() if entry.run_id == name]
    if not directories:
        if is_url(name) or os.path.lexists(local_path(name)):
            return name
        directories = [one for one in find_checkpoints(".").histories if _name_of(one) == name]
    if len(directories) > 1:
        names = "".join(f"\n  {directory}" for directory in directories)
        raise CheckpointError(
            f"There are {len(directories)} runs with the id {name}. Pass the directory of one:{names}"
        )
    if directories:
        return directories[0]
    reason = 'No such file or directory, and no run has this name; "list" shows the runs of this directory'
    raise FileNotFoundError(errno.ENOENT, reason, name)


def find_meant(name: str | None) -> Found:
    """Find what a person means: by nothing, the runs of this directory, wherever they keep their autosaves.

    Args:
        name: What was typed.

    Raises:
        OSError: If there is no such run or path, or it can't be read.
        CheckpointError: If several runs have this name.
    """
    if name is not None:
        return find_checkpoints(meant(name))
    here = find_checkpoints(".")
    known = {real(run) for run in (*here.histories, *map(run_directory, here.by_folder()))}
    for directory in [entry.directory for entry in registry_here().entries() if real(entry.directory) not in known]:
        try:
            there = find_checkpoints(directory)
        except FileNotFoundError:  # deleted
            continue
        except (OSError, CheckpointError) as error:
            here.problems.append(reason_of(error))
            continue
        here.files.extend(there.files)
        here.histories.extend(there.histories)
        here.problems.extend(there.problems)
    return here

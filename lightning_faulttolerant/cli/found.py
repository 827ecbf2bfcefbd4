"""Find the checkpoints below a directory or URL, and tell which of them are autosaves of ours, by their names."""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from lightning_faulttolerant.checkpoint.autosave_names import AUTOSAVE_NAME, METADATA_NAME, SUPERSEDED_NAME
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.store import is_url, local_path, open_file
from lightning_faulttolerant.cli.errors import remote_errors

AUTOSAVE = "autosave"
SET_ASIDE = "set aside"
SUPERSEDED = "superseded"
CHECKPOINT = "checkpoint"
DIRECTORY = "directory"

# As AtomicDirectory renames them.
_DIRECTORY_ASIDE = re.compile(r".+_checkpoint_\d+(_force)?\.(damaged|uncommitted)(-\d+)?")
_SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """A checkpoint that was found; nothing of it has been read.

    Args:
        folder: The directory that it lies in, as a path or URL.
        name: In that directory.
        num_bytes: Size of the file.
        saved_at: Seconds since 1970, None where the store does not say.
        is_link: Whether it is a symbolic link.
        is_directory: Whether it is a directory with a manifest; the size is that of all files in it.
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
        """What it is, as far as its name and directory say."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        if match is None and self.is_directory:
            return SET_ASIDE if _DIRECTORY_ASIDE.fullmatch(self.name) else DIRECTORY
        if match is None:
            return CHECKPOINT
        if match["damaged"]:
            return SET_ASIDE
        return SUPERSEDED if is_superseded(self.folder) else AUTOSAVE

    @property
    def is_autosave(self) -> bool:
        """Whether it has the name of an autosave, set aside or not: a file, or a directory of shards."""
        return AUTOSAVE_NAME.fullmatch(self.name) is not None

    @property
    def sequence(self) -> int:
        """The number of an autosave in its series, 0 of any other file."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        return int(match["sequence"]) if match else 0

    @property
    def place(self) -> tuple[int, int] | None:
        """Epoch and batch in the name of an autosave."""
        match = AUTOSAVE_NAME.fullmatch(self.name)
        return (int(match["epoch"]), int(match["batch"])) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What is below a directory: files in the order of their folders and age, and what could not be looked at."""

    files: list[FoundFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def by_folder(self) -> dict[str, list[FoundFile]]:
        """Return the files of each folder."""
        folders: dict[str, list[FoundFile]] = {}
        for file in self.files:
            folders.setdefault(file.folder, []).append(file)
        return folders


def open_checkpoint(path: str, *, whole: bool = False) -> IO[bytes]:
    """Open a file that is to be looked at, seekable.

    Args:
        path: Path or URL.
        whole: Whether all of it will be read, from its beginning to its end.

    Raises:
        OSError: If it can't be read, or is a device or a pipe: those have no end, or wait for somebody who writes.
    """
    if not is_url(path):
        mode = os.stat(local_path(path)).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, 'Is a directory; "list" shows the checkpoints in it', path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)
    return open_file(path, whole=whole)


def content_path(path: str) -> str:
    """Return the file that says what is in a checkpoint: of a directory of shards the one with all that is in none.

    Args:
        path: Path or URL.
    """
    if is_url(path) or not os.path.isdir(local_path(path)):
        return path
    inner = os.path.join(local_path(path), METADATA_NAME)
    return inner if os.path.exists(inner) else path


def is_superseded(folder: str) -> bool:
    """Return whether a folder is one into which a series of autosaves was set aside.

    Args:
        folder: Path or URL.
    """
    return SUPERSEDED_NAME.fullmatch(folder.rstrip("/").rpartition("/")[2]) is not None


def find_checkpoints(directory: str) -> Found:
    """Find all checkpoint files below a directory. Hidden directories and links to directories are passed over.

    Args:
        directory: Path or URL.

    Raises:
        NotADirectoryError: If it is a file.
        FileNotFoundError: If there is no such local directory; an object store has none, nothing is found there.
        OSError: If it can't be looked at.
    """
    problems: list[str] = []
    files = list(_remote(directory) if is_url(directory) else _local(local_path(directory), problems))
    files.sort(key=lambda file: (_natural(file.folder), file.sequence, file.saved_at or 0.0, file.name))
    return Found(files=files, problems=problems)


def _local(directory: str, problems: list[str]) -> Iterator[FoundFile]:
    if not stat.S_ISDIR(os.stat(directory).st_mode):
        raise NotADirectoryError(f"{directory} is a file, not a directory")
    os.scandir(directory).close()  # os.walk would find nothing where it may not look

    def note(error: OSError) -> None:
        # What a run that continues has deleted meanwhile is no problem; a link to nothing is one.
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
    except FileNotFoundError:  # somebody has taken it out
        return os.stat(folder).st_mtime


def _remote(url: str) -> Iterator[FoundFile]:
    from lightning_faulttolerant.checkpoint.stores.file_systems import file_system

    with remote_errors(url):
        fs, root = file_system(url)
        fs.invalidate_cache()
        found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
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


def _saved_at(info: dict[str, Any]) -> float | None:
    """Return the time in what a file system says of a file: each calls it by another name."""
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
    """Return a key that sorts fit-10 after fit-9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", folder)]

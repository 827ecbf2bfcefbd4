"""Count the steps of this process with the files below a directory, and make chosen ones fail, or lose the power there.

``FaultyFiles`` replaces ``open``, and the functions of ``os`` that change or list files, while its block runs. Then it
restores them exactly. Each system call of a file that is open for writing is a step.

After a power loss, only the content that a disk had to keep is left: the content of a file as of its last fsync, and a
name as of the last fsync of its directory.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import pathlib
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, final

from tests.file_faults import Fault, FaultySteps, Step

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Two blocks of one process would restore each other's functions if they ended out of order.
_BLOCKS: ContextVar[tuple[FaultyFiles, ...]] = ContextVar("blocks", default=())


@final
class FaultyFiles:
    """A context manager that counts the file-system steps below a directory, and applies a fault to chosen ones.

    It sees all threads of the process, and processes forked in the block. For a file that is open for writing, a step
    is a call that reaches the system: a small write that stays in Python's buffer is not a step, and the flush that
    empties the buffer is one "write".

    It does not see steps that don't go through Python: writers in other languages, such as ``torch.save(obj, path)``,
    which opens a path in C++ (``torch.save(obj, file)`` is seen); sqlite; processes started by ``exec``. Nor does it
    see ``io.FileIO`` called directly by a program, files that were open before the block, and functions that a module
    has imported under its own name (``from os import replace``).

    Args:
        directory: The steps below it count; it must exist, but the files below may come later.
        fault: Applied in the chosen steps, such as ``fail_with(errno.ENOSPC)``; None only counts.
        kind: Only steps of this kind, or of these kinds (see ``KINDS``), are chosen; all by default.
        at: The number of the chosen step among those of its kind, from 1; None for each of them.
        lasting: Whether each step of its kind from `at` on is chosen, as on a disk that is full and stays full.

    Example:
        >>> import errno, tempfile
        >>> from tests.faulty_files import FaultyFiles
        >>> from tests.file_faults import fail_with
        >>> directory = Path(tempfile.mkdtemp())
        >>> with FaultyFiles(directory) as files:
        ...     _ = (directory / "notes.txt").write_text("all is well")
        >>> [step.kind for step in files.steps]
        ['open', 'write', 'close']
        >>> with FaultyFiles(directory, fail_with(errno.ENOSPC), kind="write"):
        ...     _ = (directory / "notes.txt").write_text("all is well")
        Traceback (most recent call last):
            ...
        OSError: [Errno 28] No space left on device: ...
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        fault: Fault | None = None,
        *,
        kind: str | Collection[str] | None = None,
        at: int | None = None,
        lasting: bool = False,
    ) -> None:
        self._faulty = FaultySteps(fault, kind=kind, at=at, lasting=lasting)
        self._root = Path(os.path.realpath(directory))
        self._is_open = False
        self._replaced: list[tuple[object, str, object]] = []

    @property
    def steps(self) -> list[Step]:
        """The steps so far, including the chosen ones."""
        return self._faulty.steps

    def __enter__(self) -> FaultyFiles:
        if _BLOCKS.get():
            raise RuntimeError("A FaultyFiles or PowerLoss block is already open. Two at once would see each other.")
        _BLOCKS.set((self,))
        self._is_open = True
        for owner, name, ours in self._replacements():
            self._replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, ours)
        return self

    def __exit__(self, *error: object) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)
        _BLOCKS.set(())
        self._is_open = False

    def take(self, kind: str, path: Path, perform: Callable[..., object], *, num_bytes: int = 0) -> Any:
        """Count a step, and do it, or apply the fault to it."""
        return perform() if not self._is_open else self._faulty.take(kind, path, perform, num_bytes=num_bytes)

    def _place(self, file: object, dir_fd: int | None = None) -> Path | None:
        path = locate(file, dir_fd)
        return path if path is not None and (path == self._root or self._root in path.parents) else None

    def _replacements(self) -> Iterator[tuple[object, str, object]]:
        by_name = {
            **{name: self._of_one("unlink", getattr(os, name)) for name in ("unlink", "remove")},
            **{name: self._of_one(name, getattr(os, name)) for name in ("mkdir", "rmdir")},
            **{name: self._of_one("truncate", getattr(os, name)) for name in ("truncate", "ftruncate")},
            **{name: self._of_one("list", getattr(os, name)) for name in ("listdir", "scandir")},
            **{name: self._of_two("rename", getattr(os, name)) for name in ("replace", "rename")},
            **{name: self._of_two("link", getattr(os, name)) for name in ("link", "symlink")},
            **{name: self._sync(getattr(os, name)) for name in ("fsync", "fdatasync") if hasattr(os, name)},
            **{name: self._write(getattr(os, name)) for name in ("write", "pwrite") if hasattr(os, name)},
            "open": self._open_descriptor(os.open),
        }
        if hasattr(os, "sendfile"):  # shutil copies with it
            by_name["sendfile"] = self._of_one("write", os.sendfile)
        yield from ((os, name, ours) for name, ours in by_name.items())
        opens = self._open(builtins.open)
        yield builtins, "open", opens
        yield io, "open", opens
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps the functions of os here
        if accessor is not None:
            ours = {**by_name, "open": opens}
            yield from ((accessor, name, staticmethod(ours[name])) for name in sorted(set(ours) & set(vars(accessor))))

    def _of_one(self, kind: str, real: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement for a function with the path or the descriptor as its first argument."""

        @functools.wraps(real)
        def call(file: object = ".", *args: object, dir_fd: int | None = None, **options: object) -> object:
            options |= {} if dir_fd is None else {"dir_fd": dir_fd}
            place = self._place(file, dir_fd)
            perform = functools.partial(real, file, *args, **options)
            return perform() if place is None else self.take(kind, place, perform)

        return call

    def _of_two(self, kind: str, real: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement for a function of an old and a new path."""

        @functools.wraps(real)
        def call(source: object, target: object, *args: object, **options: Any) -> object:
            new = self._place(target, options.get("dst_dir_fd", options.get("dir_fd")))
            old = self._place(source, options.get("src_dir_fd")) if kind == "rename" else None
            perform = functools.partial(real, source, target, *args, **options)
            return perform() if (new or old) is None else self.take(kind, new or old or self._root, perform)

        return call

    def _sync(self, real: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(real)
        def call(descriptor: Any) -> object:
            place = self._place(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            kind = "fsync_directory" if place is not None and place.is_dir() else "fsync"
            perform = functools.partial(real, descriptor)
            return perform() if place is None else self.take(kind, place, perform)

        return call

    def _write(self, real: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(real)
        def call(descriptor: int, data: Any, *offset: int) -> object:
            place = self._place(descriptor)
            if place is None:
                return real(descriptor, data, *offset)
            view = memoryview(data).cast("B")

            def perform(num_bytes: int | None = None) -> object:
                return real(descriptor, view[:num_bytes], *offset)

            return self.take("write", place, perform, num_bytes=len(view))

        return call

    def _open_descriptor(self, real: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(real)
        def call(path: object, flags: int, *args: object, dir_fd: int | None = None, **options: object) -> object:
            options |= {} if dir_fd is None else {"dir_fd": dir_fd}
            place = self._place(path, dir_fd) if flags & _WRITING else None
            perform = functools.partial(real, path, flags, *args, **options)
            return perform() if place is None else self.take("open", place, perform)

        return call

    def _open(self, real: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(real)
        def call(file: object, mode: str = "r", *args: Any, **options: Any) -> object:
            writes = isinstance(mode, str) and bool(set("wxa+") & set(mode))
            place = self._place(file) if writes else None
            if place is None:
                return real(file, mode, *args, **options)
            return open_writable(functools.partial(self.take, path=place), file, mode, *args, **options)

        return call


def locate(file: Any, dir_fd: int | None = None) -> Path | None:
    """Return the path with links in its directories resolved, but not the last name; None if there is no path.

    Args:
        file: A path (str, bytes, ``PathLike``), or an open descriptor.
        dir_fd: The open directory that a relative path is relative to.
    """
    if isinstance(file, int):
        return _path_of(file)
    try:
        path = os.fsdecode(file)
    except TypeError:
        return None
    folder = _path_of(dir_fd) if dir_fd is not None else None
    path = os.path.join(folder or "", path)
    return Path(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(os.path.abspath(path)))


def _path_of(descriptor: int) -> Path | None:
    try:
        if sys.platform == "darwin":
            import fcntl

            return Path(os.fsdecode(fcntl.fcntl(descriptor, 50, bytes(1024)).rstrip(b"\0")))  # 50: F_GETPATH
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None


# Takes the kind of the step, the function that does it and, by name, ``num_bytes``.
Take = Callable[..., Any]


def open_writable(
    take: Take,
    file: object,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: object = None,
) -> IO[Any]:
    """Open a file like ``open``, with its arguments after the first, on top of a raw file that takes steps."""
    is_binary = "b" in mode
    if is_binary and not (encoding is None and errors is None and newline is None):
        raise ValueError("binary mode doesn't take an encoding, errors or newline argument")
    if not is_binary and buffering == 0:
        raise ValueError("can't have unbuffered text I/O")
    raw_mode = mode.replace("b", "").replace("t", "")
    raw: _Raw = take("open", perform=lambda: _Raw(take, file, raw_mode, closefd=closefd, opener=opener))
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else max(os.fstat(raw.fileno()).st_blksize, io.DEFAULT_BUFFER_SIZE)
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if is_binary:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    vars(text)["mode"] = mode  # like open
    return text


@final
class _Raw(io.FileIO):
    """The raw file that Python's buffers write to."""

    def __init__(self, take: Take, file: Any, mode: str, *, closefd: bool, opener: Any) -> None:
        self._take: Take | None = None  # a file that could not be opened is closed too
        super().__init__(file, mode, closefd=closefd, opener=opener)
        self._take = take

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")

        def perform(num_bytes: int | None = None) -> int:
            return super(_Raw, self).write(view[:num_bytes])

        num_written: int = self._take("write", perform=perform, num_bytes=len(view)) if self._take else perform()
        return num_written

    def truncate(self, size: int | None = None, /) -> int:
        def perform() -> int:
            return super(_Raw, self).truncate(size)

        new_size: int = self._take("truncate", perform=perform) if self._take else perform()
        return new_size

    def close(self) -> None:
        take, self._take = self._take, None
        try:
            if take is not None:
                take("close", perform=lambda: None)
        finally:
            super().close()


Kept = Literal["synced", "names", "removals"]


class PowerLost(BaseException):  # not an Exception: no program may catch it and continue
    """Raised in the program when the machine loses its power; ``PowerLoss`` catches it at the end of its block."""


@final
class PowerLoss:
    """A context manager that loses the power before a chosen step, or at the end of its block.

    Afterwards the directory holds what a disk kept. From the chosen step on, every step raises ``PowerLost`` and does
    nothing. At the end of the block, the files below the directory are set to the state of the disk. It sees the same
    steps as ``FaultyFiles``: a file written in another way counts as never synced.

    File systems may keep more than they must, and some of it without the rest. A protocol is safe if it survives all
    three modes:

    - ``"synced"``: only what was synced, file by file and directory by directory.
    - ``"names"``: all new names, renames and removals, but no unsynced content: such a file is empty.
    - ``"removals"``: like ``"synced"``, but deleted files are gone even if the directory was not synced.

    Args:
        directory: Its content at the start of the block counts as synced.
        at: The number of the first step (see ``FaultyFiles``) that does not happen; None: the end of the block.
        keeps: One of the three modes.

    Attributes:
        has_lost: Whether the power was lost at a step, not at the end of the block.

    Example:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> with PowerLoss(directory, keeps="names"):
        ...     _ = (directory / "notes.txt").write_text("never synced")
        >>> (directory / "notes.txt").read_text()
        ''
    """

    def __init__(self, directory: str | os.PathLike[str], *, at: int | None = None, keeps: Kept = "synced") -> None:
        if keeps not in ("synced", "names", "removals"):
            raise ValueError(f'keeps is {keeps!r}, but must be "synced", "names" or "removals".')
        self._root = Path(os.path.realpath(directory))
        self._at = at
        self._keeps: Kept = keeps
        self._files = FaultyFiles(directory, self._take)
        self._lock = threading.RLock()
        self._image: _Node | None = None

    @property
    def has_lost(self) -> bool:
        """Whether the power was lost at a step."""
        return self._image is not None

    @property
    def steps(self) -> list[Step]:
        """The steps up to the power loss; the last one is the step at which it happened."""
        return self._files.steps[: self._at]

    def __enter__(self) -> PowerLoss:
        self._disk = _Disk(self._root)
        self._files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._files.__exit__()
        image = self._image or self._disk.image(self._keeps)
        for path in self._root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        image.write_to(self._root)
        return isinstance(error, PowerLost)

    def _take(self, step: Step, carry_out: Callable[..., object]) -> object:
        with self._lock:  # one step at a time, so that the recorded state matches the done steps
            if self._image is None and self._at is not None and step.number >= self._at:
                self._image = self._disk.image(self._keeps)
            if self._image is not None:
                raise PowerLost(f"The power was lost at {step}")
            return self._disk.carry_out(step, carry_out)


@dataclass(eq=False)
class _Node:
    """A file, a directory or a link, as far as the disk has to keep it."""

    mode: int
    content: bytes = b""
    target: str = ""
    entries: dict[str, _Node] = field(default_factory=dict)
    unlinked: set[str] = field(default_factory=set)

    def write_to(self, path: Path) -> None:
        """Create it at a path; a directory may already exist."""
        if stat.S_ISDIR(self.mode):
            path.mkdir(exist_ok=True)
            for name, node in self.entries.items():
                node.write_to(path / name)
        elif stat.S_ISLNK(self.mode):
            path.symlink_to(self.target)
        else:
            path.write_bytes(self.content)


class _Disk:
    """Records what the disk has to keep. A node is identified by its inode as long as that has a name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._nodes: dict[int, _Node] = {}
        self._sync_all(root)

    def image(self, keeps: Kept) -> _Node:
        root = self._node(self._root)
        if keeps == "names":
            return self._as_named(self._root)
        return _without_unlinked(root) if keeps == "removals" else _copy(root)

    def carry_out(self, step: Step, carry_out: Callable[..., object]) -> Any:
        if step.kind in ("fsync", "fsync_directory"):  # recorded, not done: slow, and this is not the real disk
            return self._note(step)
        gone = _inode_that_goes(step)
        result = carry_out()
        if gone is not None:  # the next file may get its inode number
            self._nodes.pop(gone, None)
        self._note(step)
        return result

    def _note(self, step: Step) -> None:
        if step.kind in ("unlink", "rmdir"):
            self._node(step.path.parent).unlinked.add(step.path.name)
        elif step.kind == "fsync" and step.path.exists():
            self._node(step.path).content = step.path.read_bytes()
        elif step.kind == "fsync_directory":
            node = self._node(step.path)
            node.entries = {name: self._node(step.path / name) for name in os.listdir(step.path)}
            node.unlinked = set()

    def _node(self, path: Path) -> _Node:
        status = os.lstat(path)
        if status.st_ino not in self._nodes:
            target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
            self._nodes[status.st_ino] = _Node(mode=status.st_mode, target=target)
        return self._nodes[status.st_ino]

    def _sync_all(self, path: Path) -> _Node:
        node = self._node(path)
        if stat.S_ISDIR(node.mode):
            node.entries = {name: self._sync_all(path / name) for name in os.listdir(path)}
        elif stat.S_ISREG(node.mode):
            node.content = path.read_bytes()
        return node

    def _as_named(self, path: Path) -> _Node:
        node = self._node(path)
        is_directory = stat.S_ISDIR(node.mode)
        entries = {name: self._as_named(path / name) for name in os.listdir(path)} if is_directory else {}
        return _Node(mode=node.mode, content=node.content, target=node.target, entries=entries)


def _inode_that_goes(step: Step) -> int | None:
    if step.kind not in ("unlink", "rmdir", "rename") or not os.path.lexists(step.path):
        return None
    status = os.lstat(step.path)
    return status.st_ino if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) else None


def _copy(node: _Node) -> _Node:
    entries = {name: _copy(child) for name, child in node.entries.items()}
    return _Node(mode=node.mode, content=node.content, target=node.target, entries=entries)


def _without_unlinked(node: _Node) -> _Node:
    kept = {name: child for name, child in node.entries.items() if name not in node.unlinked}
    entries = {name: _without_unlinked(child) for name, child in kept.items()}
    return _Node(mode=node.mode, content=node.content, target=node.target, entries=entries)

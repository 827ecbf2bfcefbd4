"""A file system that fails: each step of this process with the files below a directory can fail, or lose the power.

A fault is a function of the step and of the function that carries it out; its return value or error is what the
program sees. Write your own if those here are not enough::

    def slow(step, carry_out):
        time.sleep(0.1)
        return carry_out()

``FaultyFiles`` applies one to chosen steps on a disk, ``FaultyURLs`` to those in a store, and ``PowerLoss`` leaves
what a disk had to keep.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import pathlib
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Literal, final

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from typing_extensions import Self

# "open": for writing. "write" and "truncate": of content. "close": of a file that was open for writing; some file
# systems report errors only there. "rename": also over an existing file. "link": a hard or a symbolic one.
KINDS = {"open", "write", "truncate", "close", "fsync", "fsync_directory", "rename", "unlink", "link", "mkdir", "rmdir"}
KINDS |= {"list"}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step.

    Args:
        number: The step's number in its block, from 1.
        kind: One of `KINDS`.
        path: The path of the step; for a rename or a link, the new name.
        num_bytes: The number of bytes in a write.
    """

    number: int
    kind: str
    path: Path
    num_bytes: int = 0


# ``carry_out()`` does the whole step. ``carry_out(n)`` writes only the first n bytes, if the step is a write.
CarryOut = Callable[..., Any]
Fault = Callable[[Step, CarryOut], object]


def fail_with(error_number: int) -> Fault:
    """Return a fault that raises an ``OSError`` of this number, such as ``errno.ENOSPC``, instead of doing the step."""

    def fail(step: Step, carry_out: CarryOut) -> object:
        raise OSError(error_number, os.strerror(error_number), str(step.path))

    return fail


def write_short(step: Step, carry_out: CarryOut) -> object:
    """Write only the first half of the data, and return the short count, as a system call may."""
    return carry_out((step.num_bytes + 1) // 2)


def lose(step: Step, carry_out: CarryOut) -> object:
    """Report the step as done without doing it."""
    return step.num_bytes if step.kind == "write" else None


def kill_before(step: Step, carry_out: CarryOut) -> Any:
    """Kill the process (SIGKILL) instead of doing the step: use it in a process started for that."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(step: Step, carry_out: CarryOut) -> Any:
    """Do the step, then kill the process (SIGKILL), even if the step failed: use it in a process started for that."""
    try:
        carry_out()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


class _Block:
    """A context manager that counts steps, and applies a fault to chosen ones.

    Args:
        fault: Applied in the chosen steps; None only counts.
        kind: Only steps of this kind, or of these kinds, are chosen; all by default.
        at: The number of the chosen step among those of its kind, from 1; None for each of them.
        lasting: Whether each step of its kind from `at` on is chosen, as on a disk that is full and stays full.

    Attributes:
        steps: The steps so far, including the chosen ones.
    """

    _inside = threading.local()
    _replaced: ClassVar[list[tuple[Any, str, object]]] = []

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        kind: str | Collection[str] | None = None,
        at: int | None = None,
        lasting: bool = False,
    ) -> None:
        self.steps: list[Step] = []
        self._fault = fault
        self._kinds = KINDS if kind is None else {kind} if isinstance(kind, str) else {*kind}
        assert self._kinds <= KINDS
        self._at = at
        self._lasting = lasting
        self._num_of_kinds = 0
        self._is_open = False
        self._lock = threading.RLock()  # a signal handler may take a step too

    def __enter__(self) -> Self:
        assert not self._replaced, "a block is already open, and two at once would see each other"
        for owner, name, ours in self._replacements():
            self._replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, ours)
        self._is_open = True
        return self

    def __exit__(self, *error: Any) -> bool | None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            delattr(owner, name) if original is None else setattr(owner, name, original)
        self._is_open = False
        return None

    def _replacements(self) -> Iterator[tuple[Any, str, object]]:
        """Yield the functions that take steps: their owner, their name, and what is to be there instead."""
        raise NotImplementedError

    def take(self, kind: str, path: Path, perform: CarryOut, *, num_bytes: int = 0) -> Any:
        """Count a step, and do it, or apply the fault to it; steps within a step are not counted."""
        if not self._is_open or getattr(self._inside, "is_set", False):
            return perform()
        with self._lock:
            step = Step(number=len(self.steps) + 1, kind=kind, path=path, num_bytes=num_bytes)
            self.steps.append(step)
            fault = self._fault if self._is_chosen(kind) else None
        self._inside.is_set = True
        try:
            return perform() if fault is None else fault(step, perform)
        finally:
            self._inside.is_set = False

    def _is_chosen(self, kind: str) -> bool:
        if kind not in self._kinds:
            return False
        self._num_of_kinds += 1
        return self._at is None or self._num_of_kinds == self._at or (self._lasting and self._num_of_kinds > self._at)


# On a disk.

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_KIND_OF = {
    **{name: name for name in ("open", "mkdir", "rmdir", "unlink", "rename", "link", "truncate", "fsync", "write")},
    "remove": "unlink",
    "replace": "rename",
    "symlink": "link",
    "ftruncate": "truncate",
    "fdatasync": "fsync",
    "listdir": "list",
    "scandir": "list",
    "pwrite": "write",
    "sendfile": "write",  # shutil copies with the last
}


class FaultyFiles(_Block):
    """A block of the steps below a directory of a disk.

    It replaces ``open``, and the functions of ``os`` that change or list files, and restores them exactly. It sees all
    threads of the process, and processes forked in the block. For a file that is open for writing, a step is a call
    that reaches the system: a small write that stays in Python's buffer is not a step, and the flush that empties the
    buffer is one "write".

    It does not see steps that don't go through Python: writers in other languages, such as ``torch.save(obj, path)``,
    which opens a path in C++ (``torch.save(obj, file)`` is seen); sqlite; processes started by ``exec``. Nor does it
    see ``io.FileIO`` called directly by a program, files that were open before the block, and functions that a module
    has imported under its own name (``from os import replace``).

    Args:
        directory: The steps below it count; it must exist, but the files below may come later.
        fault: Applied in the chosen steps; None only counts.
        options: As of the other blocks.
    """

    def __init__(self, directory: str | os.PathLike[str], fault: Fault | None = None, **options: Any) -> None:
        super().__init__(fault, **options)
        self._root = Path(os.path.realpath(directory))

    def _place(self, file: object, folder: int | None = None) -> Path | None:
        path = locate(file, folder)
        return path if path is not None and (path == self._root or self._root in path.parents) else None

    def _replacements(self) -> Iterator[tuple[Any, str, object]]:
        by_name = {name: self._replacement(kind, getattr(os, name)) for name, kind in _KIND_OF.items()}
        yield from ((os, name, ours) for name, ours in by_name.items())
        opens = self._open(builtins.open)
        yield from ((owner, "open", opens) for owner in (builtins, io))
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps the functions of os here
        if accessor is not None:
            ours = {**by_name, "open": opens}
            yield from ((accessor, name, staticmethod(ours[name])) for name in sorted(set(ours) & set(vars(accessor))))

    def _replacement(self, kind: str, real: CarryOut) -> CarryOut:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            new = args[1] if kind in ("rename", "link") else args[0] if args else "."
            place = self._place(new, options.get("dst_dir_fd", options.get("dir_fd")))
            if place is None and kind == "rename":
                place = self._place(args[0], options.get("src_dir_fd"))
            if place is None or (kind == "open" and not args[1] & _WRITING):
                return real(*args, **options)
            if real.__name__ not in ("write", "pwrite"):
                is_directory = kind == "fsync" and place.is_dir()
                return self.take(
                    "fsync_directory" if is_directory else kind, place, functools.partial(real, *args, **options)
                )
            view = memoryview(args[1]).cast("B")
            return self.take(kind, place, lambda size=None: real(args[0], view[:size], *args[2:]), num_bytes=len(view))

        return call

    def _open(self, real: CarryOut) -> CarryOut:
        @functools.wraps(real)
        def call(file: object, mode: str = "r", *args: Any, **options: Any) -> object:
            place = self._place(file) if set("wxa+") & set(mode) else None
            if place is None:
                return real(file, mode, *args, **options)
            return open_writable(functools.partial(self.take, path=place), file, mode, *args, **options)

        return call


def locate(file: Any, folder: int | None = None) -> Path | None:
    """Return the path of a file, with links in its directories resolved, but not the last name; None if there is none.

    Args:
        file: A path (str, bytes, ``PathLike``), an open file, or its descriptor.
        folder: The open directory that a relative path is relative to.
    """
    file = file.fileno() if hasattr(file, "fileno") else file
    if isinstance(file, int):
        with contextlib.suppress(OSError):
            return Path(os.readlink(f"/proc/self/fd/{file}"))
        return None
    try:
        beside = "" if folder is None else locate(folder) or ""
        path = os.path.abspath(os.path.join(beside, os.fsdecode(file)))
    except TypeError:
        return None
    return Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def open_writable(
    take: CarryOut,
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
    raw_mode = mode.replace("b", "").replace("t", "")
    raw: _Raw = take("open", perform=lambda: _Raw(take, file, raw_mode, closefd=closefd, opener=opener))
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else max(os.fstat(raw.fileno()).st_blksize, io.DEFAULT_BUFFER_SIZE)
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    vars(text)["mode"] = mode  # like open
    return text


@final
class _Raw(io.FileIO):
    """The raw file that Python's buffers write to."""

    def __init__(self, take: CarryOut, file: Any, mode: str, *, closefd: bool, opener: Any) -> None:
        self._take: CarryOut | None = None  # a file that could not be opened is closed too
        super().__init__(file, mode, closefd=closefd, opener=opener)
        self._take = take

    def write(self, data: Any, /) -> int:
        view, write = memoryview(data).cast("B"), super().write
        assert self._take is not None
        num_written: int = self._take("write", perform=lambda size=None: write(view[:size]), num_bytes=len(view))
        return num_written

    def truncate(self, size: int | None = None, /) -> int:
        assert self._take is not None
        new_size: int = self._take("truncate", perform=functools.partial(super().truncate, size))
        return new_size

    def close(self) -> None:
        take, self._take = self._take, None
        try:
            if take is not None:
                take("close", perform=lambda: None)
        finally:
            super().close()


class PowerLost(BaseException):  # not an Exception: no program may catch it and continue
    """Raised in the program when the machine loses its power; ``PowerLoss`` catches it at the end of its block."""


@dataclass(eq=False)
class _Node:
    """A file, a directory or a link, as far as the disk has to keep it."""

    mode: int
    content: bytes = b""
    target: str = ""
    entries: dict[str, _Node] = field(default_factory=dict)
    unlinked: set[str] = field(default_factory=set)


@final
class PowerLoss(FaultyFiles):
    """A block that loses the power before a chosen step, or at its end; then the directory has what a disk kept.

    What a disk must keep is the content of a file as of its last fsync, and a name as of the last fsync of its
    directory. From the chosen step on, every step raises ``PowerLost`` and does nothing. It sees the same steps as
    ``FaultyFiles``: a file written in another way counts as never synced.

    File systems may keep more than they must, and some of it without the rest. A protocol is safe if it survives all
    three modes:

    - ``"synced"``: only what was synced, file by file and directory by directory.
    - ``"names"``: all new names, renames and removals, but no unsynced content: such a file is empty.
    - ``"removals"``: like ``"synced"``, but deleted files are gone even if the directory was not synced.

    Args:
        directory: Its content at the start of the block counts as synced.
        at: The number of the first step that does not happen; None: the end of the block.
        keeps: One of the three modes.

    Attributes:
        has_lost: Whether the power was lost at a step, not at the end of the block.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        at: int | None = None,
        keeps: Literal["synced", "names", "removals"] = "synced",
    ) -> None:
        super().__init__(directory, self._do)
        self._first_lost = at
        self._keeps = keeps
        self._nodes: dict[int, _Node] = {}  # by the inode, as long as that has a name
        self.has_lost = False

    def __enter__(self) -> Self:
        self._sync_all(self._root)
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> bool:
        super().__exit__()
        with tempfile.TemporaryDirectory() as kept:
            self._restore(self._node(self._root), self._root, Path(kept))
            for path in self._root.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.copytree(kept, self._root, symlinks=True, dirs_exist_ok=True)
        return isinstance(error, PowerLost)

    def _do(self, step: Step, carry_out: CarryOut) -> object:
        with self._lock:  # one step at a time, so that the recorded state matches the done steps
            self.has_lost |= self._first_lost is not None and step.number >= self._first_lost
            if self.has_lost:
                raise PowerLost(f"The power was lost at {step}")
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
            node.entries, node.unlinked = self._named(step.path), set()

    def _node(self, path: Path) -> _Node:
        status = os.lstat(path)
        if status.st_ino not in self._nodes:
            target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
            self._nodes[status.st_ino] = _Node(mode=status.st_mode, target=target)
        return self._nodes[status.st_ino]

    def _named(self, path: Path) -> dict[str, _Node]:
        return {name: self._node(path / name) for name in os.listdir(path)}

    def _sync_all(self, path: Path) -> None:
        node = self._node(path)
        if stat.S_ISDIR(node.mode):
            node.entries = self._named(path)
            for name in node.entries:
                self._sync_all(path / name)
        elif stat.S_ISREG(node.mode):
            node.content = path.read_bytes()

    def _restore(self, node: _Node, path: Path, kept: Path) -> None:
        entries = self._named(path) if self._keeps == "names" else node.entries
        for name, child in entries.items():
            if self._keeps == "removals" and name in node.unlinked:
                continue
            if stat.S_ISDIR(child.mode):
                (kept / name).mkdir()
                self._restore(child, path / name, kept / name)
            elif stat.S_ISLNK(child.mode):
                (kept / name).symlink_to(child.target)
            else:
                (kept / name).write_bytes(child.content)


def _inode_that_goes(step: Step) -> int | None:
    if step.kind not in ("unlink", "rmdir", "rename") or not os.path.lexists(step.path):
        return None
    status = os.lstat(step.path)
    return status.st_ino if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) else None


# In a store.

_KIND_IN_STORE: dict[type, dict[str, str]] = {
    MemoryFileSystem: {"_open": "open", "ls": "list", "mv": "rename", "rm_file": "unlink", "pipe_file": "write"},
    MemoryFile: {"write": "write", "close": "close"},
}


@final
class FaultyURLs(_Block):
    """A block of the steps below ``memory://``, which then is as bad as a remote file system can be.

    A file is visible while it is written, and a move is more than one step. A "close" is the end of an upload. There is
    no fsync step, and as in an object store, no "mkdir" or "rmdir".
    """

    def _replacements(self) -> Iterator[tuple[Any, str, object]]:
        for owner, kinds in _KIND_IN_STORE.items():
            for name, kind in kinds.items():
                yield owner, name, self._replacement(kind, getattr(owner, name))

    def _replacement(self, kind: str, real: CarryOut) -> CarryOut:
        def call(of: Any, *args: Any, **options: Any) -> Any:
            path = Path(of.path if isinstance(of, MemoryFile) else args[kind == "rename"].removeprefix("memory:/"))
            perform = functools.partial(real, of, *args, **options)
            if kind == "open":
                if "r" in options["mode"]:
                    return perform()
                file = self.take(kind, path, perform)
                file.is_sent = False
                return file
            if kind == "close":
                is_sent, of.is_sent = getattr(of, "is_sent", True), True
                return perform() if is_sent else self.take(kind, path, perform)
            if kind != "write":
                return self.take(kind, path, perform)
            *place, data = args
            return self.take(
                kind, path, lambda size=None: real(of, *place, data[:size], **options), num_bytes=len(data)
            )

        return call

"""Count the steps of this process with the files below a directory, and make chosen ones fail.

``FaultyFiles`` replaces ``open``, and the functions of ``os`` that change or list files, while its block runs. Then it
restores them exactly.

Each system call of a file that is open for writing is a step.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, final

from lightning_faulttolerant.testing.faults import Fault, FaultySteps, Step

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Two blocks of one process would restore each other's functions if they ended out of order.
_blocks: list[FaultyFiles] = []


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
        >>> from lightning_faulttolerant.testing import FaultyFiles, fail_with
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
        self._replaced: list[tuple[Any, str, Any]] = []

    @property
    def steps(self) -> list[Step]:
        """The steps so far, including the chosen ones."""
        return self._faulty.steps

    def __enter__(self) -> FaultyFiles:
        if _blocks:
            raise RuntimeError("A FaultyFiles or PowerLoss block is already open. Two at once would see each other.")
        _blocks.append(self)
        for owner, name, ours in self._replacements():
            self._replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, ours)
        return self

    def __exit__(self, *error: object) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)
        _blocks.remove(self)

    def take(self, kind: str, path: Path, perform: Callable[..., Any], *, num_bytes: int = 0) -> Any:
        """Count a step, and do it, or apply the fault to it."""
        is_over = self not in _blocks
        return perform() if is_over else self._faulty.take(kind, path, perform, num_bytes=num_bytes)

    def _place(self, file: Any, dir_fd: int | None = None) -> Path | None:
        path = locate(file, dir_fd)
        return path if path is not None and (path == self._root or self._root in path.parents) else None

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
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

    def _of_one(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for a function with the path or the descriptor as its first argument."""

        @functools.wraps(real)
        def call(file: Any = ".", *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            options |= {} if dir_fd is None else {"dir_fd": dir_fd}
            place = self._place(file, dir_fd)
            perform = functools.partial(real, file, *args, **options)
            return perform() if place is None else self.take(kind, place, perform)

        return call

    def _of_two(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for a function of an old and a new path."""

        @functools.wraps(real)
        def call(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            new = self._place(target, options.get("dst_dir_fd", options.get("dir_fd")))
            old = self._place(source, options.get("src_dir_fd")) if kind == "rename" else None
            perform = functools.partial(real, source, target, *args, **options)
            return perform() if (new or old) is None else self.take(kind, new or old or self._root, perform)

        return call

    def _sync(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(descriptor: Any) -> Any:
            place = self._place(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            kind = "fsync_directory" if place is not None and place.is_dir() else "fsync"
            perform = functools.partial(real, descriptor)
            return perform() if place is None else self.take(kind, place, perform)

        return call

    def _write(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(descriptor: int, data: Any, *offset: int) -> Any:
            place = self._place(descriptor)
            if place is None:
                return real(descriptor, data, *offset)
            view = memoryview(data).cast("B")

            def perform(num_bytes: int | None = None) -> Any:
                return real(descriptor, view[:num_bytes], *offset)

            return self.take("write", place, perform, num_bytes=len(view))

        return call

    def _open_descriptor(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            options |= {} if dir_fd is None else {"dir_fd": dir_fd}
            place = self._place(path, dir_fd) if flags & _WRITING else None
            perform = functools.partial(real, path, flags, *args, **options)
            return perform() if place is None else self.take("open", place, perform)

        return call

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
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
    file: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
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

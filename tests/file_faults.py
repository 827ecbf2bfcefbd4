"""The steps of a program with its files, numbered, and the faults that can happen in them.

A fault is a function of the step and of the function that carries it out. Its return value or error is what the
program sees. Write your own if these are not enough::

    def slow(step, carry_out):
        time.sleep(0.1)
        return carry_out()

``faulty://`` is a remote file system in memory that counts its steps and makes chosen ones fail. It is as bad as a
remote one can be: a file is visible while it is written, and a move is more than one step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

# "open": for writing. "write" and "truncate": of content. "close": of a file that was open for writing; some file
# systems report errors only there. "rename": also over an existing file. "link": a hard or a symbolic one.
KINDS = (
    "open",
    "write",
    "truncate",
    "close",
    "fsync",
    "fsync_directory",
    "rename",
    "unlink",
    "link",
    "mkdir",
    "rmdir",
    "list",
)


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
Fault = Callable[[Step, Callable[..., object]], object]


def fail_with(error_number: int) -> Fault:
    """Return a fault that raises an ``OSError`` instead of doing the step.

    Args:
        error_number: Such as ``errno.ENOSPC`` (no space), ``EIO`` (bad disk), ``EACCES`` (not yours), ``EDQUOT``
            (quota), ``ESTALE`` (a network file system lost the file), ``EROFS`` (mounted read-only).
    """

    def fail(step: Step, carry_out: Callable[..., object]) -> object:
        raise OSError(error_number, os.strerror(error_number), str(step.path))

    return fail


def write_short(step: Step, carry_out: Callable[..., object]) -> object:
    """Write only the first half of the data, and return the short count, as a system call may."""
    _demand_kind(step, ("write",), "write_short")
    return carry_out((step.num_bytes + 1) // 2)


def lose(step: Step, carry_out: Callable[..., object]) -> object:
    """Report the step as done without doing it."""
    _demand_kind(step, _LOSABLE, "lose")
    return step.num_bytes if step.kind == "write" else None


def kill_before(step: Step, carry_out: Callable[..., object]) -> Any:
    """Kill the process (SIGKILL) instead of doing the step: use it in a process started for that."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(step: Step, carry_out: Callable[..., object]) -> Any:
    """Do the step, then kill the process (SIGKILL), even if the step failed: use it in a process started for that."""
    try:
        carry_out()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


_LOSABLE = ("write", "fsync", "fsync_directory", "rename", "unlink", "link", "mkdir", "rmdir")


def _demand_kind(step: Step, kinds: tuple[str, ...], fault: str) -> None:
    if step.kind not in kinds:
        raise ValueError(
            f"{fault} is not possible for a step of kind {step.kind!r}. Pass FaultyFiles a kind, one of: "
            f"{', '.join(kinds)}."
        )


_inside = threading.local()


@final
class FaultySteps:
    """The steps of one block.

    Args:
        fault: Applied in the chosen steps; None only counts.
        kind: Only steps of this kind, or of these kinds, are chosen; all by default.
        at: The number of the chosen step among those of its kind, from 1; None for each of them.
        lasting: Whether each step of its kind from `at` on is chosen.
    """

    def __init__(
        self, fault: Fault | None, *, kind: str | Collection[str] | None, at: int | None, lasting: bool
    ) -> None:
        kinds = frozenset(KINDS if kind is None else [kind] if isinstance(kind, str) else kind)
        if not kinds <= set(KINDS):
            raise ValueError(f"Unknown kinds of steps: {sorted(kinds - set(KINDS))}. Use some of {KINDS}.")
        if at is not None and at < 1:
            raise ValueError(f"at is {at}, but steps are counted from 1.")
        self.steps: list[Step] = []
        self._fault = fault
        self._kinds = kinds
        self._at = at
        self._lasting = lasting
        self._num_of_kinds = 0
        self._lock = threading.RLock()  # a signal handler may take a step too

    def take(self, kind: str, path: Path, perform: Callable[..., object], *, num_bytes: int = 0) -> Any:
        """Count a step, and do it, or apply the fault to it; steps within a step are not counted."""
        if getattr(_inside, "is_set", False):
            return perform()
        with self._lock:
            step = Step(number=len(self.steps) + 1, kind=kind, path=path, num_bytes=num_bytes)
            self.steps.append(step)
            fault = self._fault if self._is_chosen(kind) else None
        with _steps_within_hidden():
            return perform() if fault is None else fault(step, perform)

    def _is_chosen(self, kind: str) -> bool:
        if kind not in self._kinds:
            return False
        self._num_of_kinds += 1
        return self._at is None or self._num_of_kinds == self._at or (self._lasting and self._num_of_kinds > self._at)


@contextlib.contextmanager
def _steps_within_hidden() -> Iterator[None]:
    _inside.is_set = True
    try:
        yield
    finally:
        _inside.is_set = False


_PROTOCOL = "faulty"
_blocks: list[FaultySteps] = []


@final
class FaultyURLs:
    """A context manager that counts the steps below ``faulty://``, and applies a fault to chosen ones.

    Written data exists until the process ends, also outside of a block. A "close" is the end of an upload. There is no
    fsync step, and as in an object store, no "mkdir" or "rmdir".

    Args:
        fault: Applied in the chosen steps, such as ``fail_with(errno.EIO)``; None only counts.
        kind: As in ``FaultyFiles``.
        at: As in ``FaultyFiles``.
        lasting: As in ``FaultyFiles``.

    Example:
        >>> with FaultyURLs() as files:
        ...     with fsspec.open("faulty://example/notes.txt", "wb") as file:
        ...         _ = file.write(b"all is well")
        >>> [step.kind for step in files.steps]
        ['open', 'write', 'close']
    """

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        kind: str | Collection[str] | None = None,
        at: int | None = None,
        lasting: bool = False,
    ) -> None:
        self._faulty = FaultySteps(fault, kind=kind, at=at, lasting=lasting)

    @property
    def steps(self) -> list[Step]:
        """The steps so far, including the chosen ones."""
        return self._faulty.steps

    def __enter__(self) -> FaultyURLs:
        _blocks.append(self._faulty)
        return self

    def __exit__(self, *error: object) -> None:
        _blocks.remove(self._faulty)


def _take(kind: str, path: str, perform: Callable[..., object], *, num_bytes: int = 0) -> Any:
    place = Path(path.removeprefix(f"{_PROTOCOL}:/"))
    return _blocks[-1].take(kind, place, perform, num_bytes=num_bytes) if _blocks else perform()


@final
class _File(MemoryFile):  # type: ignore[misc]  # fsspec has no annotations
    """A file that is visible from its first byte."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")

        def perform(num_bytes: int | None = None) -> int:
            return int(super(_File, self).write(view[:num_bytes]))

        num_written: int = _take("write", self.path, perform, num_bytes=len(view))
        return num_written

    def close(self) -> None:
        if self.fs is not None and not getattr(self, "is_sent", False):
            self.is_sent = True
            _take("close", self.path, lambda: None)

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class _FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """The file system of ``faulty://``."""

    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = _PROTOCOL

    @classmethod
    def _strip_protocol(cls, path: object) -> object:
        return super()._strip_protocol(path.removeprefix(f"{_PROTOCOL}://") if isinstance(path, str) else path)

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        perform = functools.partial(super()._open, path, mode, **options)
        if "w" not in mode and "x" not in mode:
            return perform()

        def begin() -> Any:
            perform()  # for its checks
            self.store[path] = file = _File(self, path, options.get("data"))
            return file

        return _take("open", path, begin)

    def ls(self, path: str, *args: object, **options: object) -> Any:
        return _take("list", path, functools.partial(super().ls, path, *args, **options))

    def mv(self, path1: str, path2: str, **options: object) -> None:
        _take("rename", path2, functools.partial(super().mv, path1, path2, **options))

    def rm_file(self, path: str) -> None:
        _take("unlink", path, functools.partial(super().rm_file, path))

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        perform = functools.partial(super().pipe_file, path, value, **options)
        _take("write", path, perform, num_bytes=len(value))


fsspec.register_implementation(_PROTOCOL, _FaultyFileSystem, clobber=True)

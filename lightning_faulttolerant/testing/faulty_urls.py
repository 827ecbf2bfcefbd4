"""A remote file system in memory, ``faulty://``, that counts its steps and makes chosen ones fail.

It is as bad as a remote one can be: a file is visible while it is written, and a move is more than one step.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, final

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from lightning_faulttolerant.testing.faults import Fault, FaultySteps, Step

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


def _take(kind: str, path: str, perform: Any, *, num_bytes: int = 0) -> Any:
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

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = _PROTOCOL

    @classmethod
    def _strip_protocol(cls, path: object) -> object:
        return super()._strip_protocol(path.removeprefix(f"{_PROTOCOL}://") if isinstance(path, str) else path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> object:
        perform = functools.partial(super()._open, path, mode, **options)
        if "w" not in mode and "x" not in mode:
            return perform()

        def begin() -> Any:
            perform()  # for its checks
            self.store[path] = file = _File(self, path, options.get("data"))
            return file

        return _take("open", path, begin)

    def ls(self, path: str, *args: Any, **options: Any) -> Any:
        return _take("list", path, functools.partial(super().ls, path, *args, **options))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        _take("rename", path2, functools.partial(super().mv, path1, path2, **options))

    def rm_file(self, path: str) -> None:
        _take("unlink", path, functools.partial(super().rm_file, path))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        perform = functools.partial(super().pipe_file, path, value, **options)
        _take("write", path, perform, num_bytes=len(value))


fsspec.register_implementation(_PROTOCOL, _FaultyFileSystem, clobber=True)

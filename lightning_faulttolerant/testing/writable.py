"""Files open for writing, with a step for every system call."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import IO, Any, final

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

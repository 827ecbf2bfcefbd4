"""Decompresses files, and never writes more bytes than the index allows.

A few kilobytes can expand to terabytes. If an algorithm's library works in parts, no part is larger than a megabyte. If
it doesn't, the size stated in the file is checked before anything is decompressed.
"""

from __future__ import annotations

import bz2
import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from lightning_faulttolerant.errors import DamagedShardError
from lightning_faulttolerant.streaming.format.compression import extension
from lightning_faulttolerant.streaming.format.extras import extra
from lightning_faulttolerant.streaming.format.zstd_frames import content_bytes

_PART_BYTES = 1 << 20


def decompress_file(source: str, target: str, algorithm: str, *, num_bytes: int) -> None:
    """Write the content of a compressed file to another file.

    Args:
        source: The compressed file.
        target: A new file, or one to be replaced. It is deleted again if the content is not as expected.
        algorithm: With or without a level.
        num_bytes: The size of the content according to the index.

    Raises:
        DamagedShardError: If it is not compressed with this algorithm, is incomplete, or has another size.
        ImportError: If the algorithm needs a package that is not installed.
    """
    family = extension(algorithm)
    try:
        with open(source, "rb") as compressed, open(target, "wb") as raw:
            num_written = 0
            for part in _PARTS[family](compressed, num_bytes):
                num_written += len(part)
                if num_written > num_bytes:
                    break
                raw.write(part)
            if num_written != num_bytes:
                how_many = "more" if num_written > num_bytes else num_written
                raise ValueError(f"it holds {how_many} bytes, the index says {num_bytes}")
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(target)
        if isinstance(error, ValueError):
            raise DamagedShardError(
                f"The compressed shard {source} is damaged ({algorithm}): {error}. Delete it so that it is "
                f"downloaded again, or write the data set again if this is its only copy."
            ) from error
        raise


def _gzip_parts(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    state = zlib.decompressobj(31)
    rest = b""
    try:
        while data := rest or file.read(_PART_BYTES):
            if state.eof:
                state = zlib.decompressobj(31)
            yield state.decompress(data, _PART_BYTES)
            rest = state.unused_data if state.eof else state.unconsumed_tail
        # Output that did not fit into a full part comes without more input.
        while not state.eof and (part := state.decompress(b"", _PART_BYTES)):
            yield part
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not state.eof:
        raise ValueError("it ends early")


def _bzip2_parts(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    state = bz2.BZ2Decompressor()
    while True:
        data = b""
        if state.eof or state.needs_input:
            data = (state.unused_data if state.eof else b"") or file.read(_PART_BYTES)
            if not data:
                break
            state = bz2.BZ2Decompressor() if state.eof else state
        try:
            part = state.decompress(data, _PART_BYTES)
        except OSError as error:
            raise ValueError(str(error)) from error
        yield part
    if not state.eof:
        raise ValueError("it ends early")


def _brotli_parts(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    brotli = extra("brotli", purpose="for the compression br")
    state = brotli.Decompressor()
    # Older versions can't limit the output. Only small pieces of input keep it bounded.
    knows_limit = hasattr(state, "can_accept_more_data")
    limit = {"output_buffer_limit": _PART_BYTES} if knows_limit else {}
    try:
        while data := file.read(_PART_BYTES if knows_limit else 1 << 12):
            yield state.process(data, **limit)
            while knows_limit and not state.can_accept_more_data():
                yield state.process(b"", **limit)
        # Output that did not fit into a full part comes without more input.
        while not state.is_finished() and (part := state.process(b"", **limit)):
            yield part
    except brotli.error as error:
        raise ValueError(str(error)) from error
    if not state.is_finished():
        raise ValueError("it ends early")


def _snappy_parts(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    data = file.read()
    yield _whole("snappy", data, _first_varint(data), num_bytes, "UncompressError")


def _zstd_parts(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    data = file.read()
    yield _whole("zstd", data, content_bytes(data), num_bytes, "Error")


def _whole(package: str, data: bytes, size: int, num_bytes: int, error_name: str) -> bytes:
    """Return the content of ``data``, decompressed in one piece. The size that it states is checked first."""
    if size != num_bytes:
        raise ValueError(f"it holds {size} bytes by what it says itself, the index says {num_bytes}")
    module: Any = extra(package, purpose=f"for the compression {package}")
    try:
        return bytes(module.decompress(data))
    except getattr(module, error_name) as error:
        raise ValueError(str(error) or "its bytes are not what it writes") from error


def _first_varint(data: bytes) -> int:
    value = 0
    for i, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value
    raise ValueError("it has no size")


_PARTS: dict[str, Callable[[IO[bytes], int], Iterator[bytes]]] = {
    "br": _brotli_parts,
    "bz2": _bzip2_parts,
    "gz": _gzip_parts,
    "snappy": _snappy_parts,
    "zstd": _zstd_parts,
}

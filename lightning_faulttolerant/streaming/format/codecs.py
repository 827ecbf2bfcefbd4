"""The codecs of libraries: compression of whole files (``br``, ``bz2``, ``gz``, ``snappy``, and ``zstd``), and images.

Each package is needed only when something of its kind is written or read: Pillow from the first image on.

Decompression never writes more bytes than the index allows. A few kilobytes can expand to terabytes. If an algorithm's
library works in parts, no part is larger than a megabyte. If it doesn't, the size stated in the file is checked before
anything is decompressed.

Source of the headers of zstd frames: RFC 8878, section 3.1.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import IO, Any

from lightning_faulttolerant.errors import DamagedShardError
from lightning_faulttolerant.streaming.format.encoding import Buffer, Encoding, expect_type, extra

_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
_DEFAULT_LEVELS = {"br": 11, "bz2": 9, "gz": 9, "snappy": 0, "zstd": 3}

FAMILIES = tuple(_LEVELS)
"""Algorithms without their levels; the name of a compressed file ends with one of them."""

COMPRESSIONS = tuple(
    name for family, levels in _LEVELS.items() for name in (family, *(f"{family}:{n}" for n in levels))
)
"""Every algorithm, with its default level and with each of its levels: ``zstd``, ``zstd:1``, ..."""


def is_known_compression(algorithm: object) -> bool:
    """Return whether the format supports an algorithm, which may have a level (``zstd:7``)."""
    return algorithm in COMPRESSIONS


def extension(algorithm: str) -> str:
    """Return the extension of a compressed file's name, without the dot."""
    return _parsed(algorithm)[0]


def compress(data: bytes, algorithm: str) -> bytes:
    """Compress bytes. The same input always yields the same output.

    Args:
        data: The bytes to compress.
        algorithm: With or without a level.

    Raises:
        ImportError: If the algorithm needs a package that is not installed.
    """
    family, level = _parsed(algorithm)
    if family == "bz2":
        return bz2.compress(data, level)
    if family == "gz":
        return gzip.compress(data, level, mtime=0)
    if family == "br":
        return bytes(_package("brotli", algorithm).compress(data, quality=level))
    if family == "snappy":
        return bytes(_package("snappy", algorithm).compress(data))
    return bytes(_package("zstd", algorithm).compress(data, level))


def _package(name: str, algorithm: str) -> ModuleType:
    return extra(name, purpose=f"for the compression {algorithm}")


def _parsed(algorithm: str) -> tuple[str, int]:
    if not is_known_compression(algorithm):
        raise ValueError(f"The compression {algorithm!r} is unknown. Use one of {', '.join(COMPRESSIONS)}.")
    family, _, level = algorithm.partition(":")
    return family, int(level) if level else _DEFAULT_LEVELS[family]


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
            if not os.fstat(compressed.fileno()).st_size:
                raise ValueError("it is empty")  # gzip would accept that
            num_written = 0
            for part in _PARTS[family](compressed, num_bytes):
                num_written += len(part)
                if num_written > num_bytes:
                    break
                raw.write(part)
            if num_written != num_bytes:
                how_many = "more" if num_written > num_bytes else num_written
                raise ValueError(f"it holds {how_many} bytes, but the index says {num_bytes}")
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(target)
        if isinstance(error, ValueError):
            raise DamagedShardError(
                f"The compressed shard {source} is damaged ({algorithm}): {error}. Delete it so that it is "
                f"downloaded again, or write the data set again if this is its only copy."
            ) from error
        raise


def _parts(decompressed: gzip.GzipFile | bz2.BZ2File) -> Iterator[bytes]:
    try:
        while part := decompressed.read(_PART_BYTES):
            yield part
    except (zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        raise ValueError(str(error)) from error


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


def _whole(
    file: IO[bytes], num_bytes: int, *, package: str, size_of: Callable[[bytes], int], error: str
) -> Iterator[bytes]:
    """Yield the content, decompressed in one piece. The size that it states is checked first."""
    data = file.read()
    size = size_of(data)
    if size != num_bytes:
        raise ValueError(f"it says that it holds {size} bytes, but the index says {num_bytes}")
    module: Any = extra(package, purpose=f"for the compression {package}")
    try:
        yield bytes(module.decompress(data))
    except getattr(module, error) as reason:
        raise ValueError(str(reason) or "its bytes can't be decompressed") from reason


def _first_varint(data: bytes) -> int:
    value = 0
    for i, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value
    raise ValueError("it has no size")


_MAGIC = 0xFD2FB528
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_RUN_LENGTH = 1
_RESERVED = 3


def content_bytes(data: bytes) -> int:
    """Return the number of bytes that all frames together decompress to.

    Raises:
        ValueError: If these are not complete frames of zstd, or one of them does not state its size.
    """
    at, total = 0, 0
    while at < len(data):
        magic = _number(data, at, 4)
        if magic in _SKIPPABLE:
            at += 8 + _number(data, at + 4, 4)
            continue
        if magic != _MAGIC:
            raise ValueError("it is not zstd")
        size, at = _frame(data, at + 4)
        total += size
    if at != len(data) or not data:
        raise ValueError("it ends early")
    return total


def _frame(data: bytes, at: int) -> tuple[int, int]:
    """Return the size of a frame's content, and where the frame ends."""
    descriptor = _number(data, at, 1)
    is_single, has_checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    size_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
    at += 1 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    if not size_bytes:
        raise ValueError("a frame does not say the size of its content, which its library needs")
    size = _number(data, at, size_bytes) + (256 if size_bytes == 2 else 0)
    return size, _end_of_blocks(data, at + size_bytes) + 4 * has_checksum


def _end_of_blocks(data: bytes, at: int) -> int:
    is_last = 0
    while not is_last:
        head = _number(data, at, 3)
        is_last, type_, size = head & 1, head >> 1 & 3, head >> 3
        if type_ == _RESERVED:
            raise ValueError("it has a block of no known type")
        at += 3 + (1 if type_ == _RUN_LENGTH else size)
    return at


def _number(data: bytes, at: int, num_bytes: int) -> int:
    field = data[at : at + num_bytes]
    if len(field) < num_bytes:
        raise ValueError("it ends early")
    return int.from_bytes(field, "little")


_PARTS: dict[str, Callable[[IO[bytes], int], Iterator[bytes]]] = {
    "br": _brotli_parts,
    "bz2": lambda file, num_bytes: _parts(bz2.BZ2File(file)),
    "gz": lambda file, num_bytes: _parts(gzip.GzipFile(fileobj=file)),
    "snappy": functools.partial(_whole, package="snappy", size_of=_first_varint, error="UncompressError"),
    "zstd": functools.partial(_whole, package="zstd", size_of=content_bytes, error="Error"),
}


_UINT32_BYTES = 4


def _pillow() -> ModuleType:
    return extra("PIL.Image", purpose="for columns of images")


class RawImage(Encoding):
    """The raw pixels of an image: width, height, length of the mode, mode, pixels."""

    _head = struct.Struct("<III")

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, _pillow().Image, encoding="pil")
        if value.mode.startswith("P"):
            raise ValueError("the palette is not stored. Store image.convert('RGB'), or use 'png'")
        mode: bytes = value.mode.encode()
        pixels: bytes = value.tobytes()
        return self._head.pack(*value.size, len(mode)) + mode + pixels

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        if end - begin < self._head.size:
            raise ValueError(f"an image of {end - begin} bytes")
        width, height, mode_bytes = self._head.unpack_from(buffer, begin)
        pixels_at = begin + self._head.size + mode_bytes
        # A pixel has at least one bit. Without this check, memory for too many pixels would be allocated first.
        if pixels_at > end or width * height > 8 * (end - pixels_at):
            raise ValueError(f"an image of {width} x {height} pixels in {end - begin} bytes")
        mode = buffer[begin + self._head.size : pixels_at].decode()
        return _pillow().frombytes(mode, (width, height), buffer[pixels_at:end])


class ImageFile(Encoding):
    """An image as the bytes of a file. Pixels are decoded on first access.

    Args:
        format_: ``JPEG`` or ``PNG``.
    """

    def __init__(self, format_: str) -> None:
        self._format = format_

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, _pillow().Image, encoding=self._format.lower())
        unchanged = self._bytes_of_file(value) if self._format == "JPEG" else None
        if unchanged is not None:
            return unchanged
        file = io.BytesIO()
        value.save(file, format=self._format)
        return file.getvalue()

    def decode(self, buffer: Buffer, begin: int, end: int) -> Any:
        """Return the value of ``buffer[begin:end]``."""
        return _pillow().open(io.BytesIO(buffer[begin:end]))

    @staticmethod
    def _bytes_of_file(image: Any) -> bytes | None:
        """Return the JPEG file that an image was opened from: encoding it again would lose quality.

        An image that was shrunk in place no longer matches its file.
        """
        path = getattr(image, "filename", "")
        if image.format != "JPEG" or not path:
            return None
        try:
            with open(path, "rb") as file:
                data = file.read()
            with _pillow().open(io.BytesIO(data)) as stored:
                return data if (stored.size, stored.mode) == (image.size, image.mode) else None
        except OSError:
            return None


class ImageList(Encoding):
    """A list of images: a zero, their number, their sizes, the images.

    Args:
        element: The encoding of each image.
    """

    def __init__(self, element: Encoding) -> None:
        self._element = element

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, list, encoding="list[...]")
        return struct.pack("<I", 0) + _packed([self._element.encode(image) for image in value])

    def decode(self, buffer: Buffer, begin: int, end: int) -> list[object]:
        """Return the value of ``buffer[begin:end]``."""
        spans = _spans(buffer, begin + _UINT32_BYTES, end)
        return [self._element.decode(buffer, lo, hi) for lo, hi in spans]


class JpegArray(Encoding):
    """A sequence of JPEG files, given as bytes and decoded to images."""

    _element = ImageFile("JPEG")

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        elements = list(value)
        for element in elements:
            expect_type(element, (bytes, bytearray), encoding="jpeg_array")
        packed = _packed([bytes(element) for element in elements])
        self.check(packed)
        return packed

    def decode(self, buffer: Buffer, begin: int, end: int) -> list[object]:
        """Return the value of ``buffer[begin:end]``."""
        spans = _spans(buffer, begin, end)
        if not spans:
            raise ValueError("an array of no images")
        return [self._element.decode(buffer, lo, hi) for lo, hi in spans]


def _packed(elements: list[bytes]) -> bytes:
    sizes = struct.pack(f"<{len(elements) + 1}I", len(elements), *map(len, elements))
    return b"".join([sizes, *elements])


def _spans(buffer: Buffer, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the spans of the elements in a packed list."""
    if end - begin < _UINT32_BYTES:
        raise ValueError("a list ends before its length")
    (num_elements,) = struct.unpack_from("<I", buffer, begin)
    first = begin + _UINT32_BYTES * (1 + num_elements)
    if first > end:
        raise ValueError(f"a list of {num_elements} elements in {end - begin} bytes")
    sizes = struct.unpack_from(f"<{num_elements}I", buffer, begin + _UINT32_BYTES)
    bounds = list(itertools.accumulate(sizes, initial=first))
    if bounds[-1] != end:
        raise ValueError(f"elements of {sum(sizes)} bytes in {end - first} bytes")
    return list(itertools.pairwise(bounds))

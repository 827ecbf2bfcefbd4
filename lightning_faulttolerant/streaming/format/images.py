"""Encodings of images. They need Pillow, from the first image on."""

from __future__ import annotations

import io
import itertools
import struct
from types import ModuleType
from typing import Any

from lightning_faulttolerant.streaming.format.encoding import Buffer, Encoding, expect_type, extra

_UINT32_BYTES = 4


def _pillow() -> ModuleType:
    return extra("PIL.Image", purpose="for columns of images")


class RawImage(Encoding):
    """The raw pixels of an image: width, height, length of the mode, mode, pixels."""

    _head = struct.Struct("<III")

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        expect_type(value, _pillow().Image, encoding="pil")
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
        return _packed([bytes(element) for element in elements])

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

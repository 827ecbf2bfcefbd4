"""Reads the content size from the headers of zstd frames, without decompressing them.

Source: RFC 8878, section 3.1.
"""

from __future__ import annotations

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

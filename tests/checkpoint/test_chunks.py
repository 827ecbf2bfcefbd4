"""A whole file is read, in pieces of a bounded size."""

from __future__ import annotations

import io

import pytest

from lightning_faulttolerant.checkpoint.checked_file import CHUNK_BYTES, read_chunks

CONTENT = bytes(range(256)) * (CHUNK_BYTES // 128) + b"end"


class Short(io.BytesIO):
    """Returns less than requested, as a network may."""

    def readinto(self, room):
        return super().readinto(memoryview(room)[: 1024 * 1024 + 7])


class OnlyRead:
    """A file with nothing but `read`."""

    def __init__(self, content):
        self.read = io.BytesIO(content).read


@pytest.mark.parametrize("kind", [io.BytesIO, Short, OnlyRead])
@pytest.mark.parametrize("more", [0, 5])
def test_all_is_read_and_no_more_than_is_there(kind, more):
    """The chunks together must be the file, even if it ends before the requested number of bytes."""
    chunks = [bytes(chunk) for chunk in read_chunks(kind(CONTENT), len(CONTENT) + more)]
    assert b"".join(chunks) == CONTENT
    assert max(map(len, chunks)) <= CHUNK_BYTES


def test_no_more_is_read_than_is_asked_for():
    """The bytes after a record must be left for the next read."""
    file = io.BytesIO(CONTENT)
    assert sum(len(chunk) for chunk in read_chunks(file, CHUNK_BYTES + 9)) == CHUNK_BYTES + 9 == file.tell()
    assert list(read_chunks(file, 0)) == []

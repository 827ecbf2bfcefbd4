"""Files of a store, and the requests to S3."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import fsspec.config
import pytest
import s3fs

from lightning_faulttolerant.storage.store import open_file, open_store


def write(url: str, name: str, content: bytes) -> None:
    """Write a file of a store."""
    with open_store(url).writer(name) as file:
        file.write(content)


def read(path: str) -> bytes:
    """Read a file by its path or URL."""
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def calls_of_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Record the requests to S3."""
    calls = []
    real = s3fs.S3FileSystem._call_s3

    async def call(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append((method, kwargs))
        return await real(self, method, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", call)
        patch.setattr(s3fs.S3FileSystem, "call_s3", fsspec.asyn.sync_wrapper(call))
        yield calls


def damage_what_is_not_sent_yet(upload: Any, damage: Callable[[bytes], bytes]) -> None:
    """Make an upload to S3 send other bytes than it was given."""
    data = damage(upload._file.buffer.getvalue())
    upload._file.buffer = io.BytesIO()
    upload._file.buffer.write(data)

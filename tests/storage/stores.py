"""Files of a store, and the requests to S3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import s3fs

from lightning_faulttolerant.storage.store import open_file, open_store

Requests = list[tuple[str, dict[str, Any]]]
MIB = 1024 * 1024


def write(url: str, name: str, content: bytes) -> None:
    """Write a file of a store."""
    with open_store(url).writer(name) as file:
        file.write(content)


def read(path: str) -> bytes:
    """Read a file by its path or URL."""
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def requests_to_s3(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[str, dict[str, Any]], object] = lambda method, arguments: None,
    after: Callable[[str, Any], object] = lambda method, answer: None,
) -> Iterator[Requests]:
    """Record the requests to S3; `before` may change one, and either may raise instead."""
    requests: Requests = []
    real = s3fs.S3FileSystem._call_s3

    async def call(self: Any, method: str, *args: Any, **arguments: Any) -> Any:
        requests.append((method, arguments))
        before(method, arguments)
        answer = await real(self, method, *args, **arguments)
        after(method, answer)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", call)
        patch.setattr(s3fs.S3FileSystem, "call_s3", fsspec.asyn.sync_wrapper(call))
        yield requests


def damaging(change: Callable[[bytes], bytes]) -> Callable[[str, dict[str, Any]], None]:
    """Return a function that makes the last part of an upload to S3 arrive as other bytes than it was sent."""

    def damage(method: str, arguments: dict[str, Any]) -> None:
        if method == "put_object" or (method == "upload_part" and len(arguments["Body"]) < 5 * MIB):
            arguments["Body"] = change(bytes(arguments["Body"]))

    return damage

"""Data sets on remotes that fail on request: in memory behind fsspec, and behind a web server on localhost."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from lightning_faulttolerant import StreamingDataset
from tests.streaming.shards import files as files_in, numbers, write_numbers

SHARD = "shard.00001.mds"
PER_SHARD = 28
"""Samples of a shard, which has some 500 bytes."""


def data_of(num_shards: int = 3, **options: Any) -> dict[str, bytes]:
    """Return the files of a data set of the numbers from 0."""
    with tempfile.TemporaryDirectory() as directory:
        return files_in(Path(write_numbers(Path(directory), num_shards * PER_SHARD, **options)))


def opened(local: Path, remote: Path | str | None, **options: Any) -> StreamingDataset:
    """Return a data set that fetches its shards."""
    return StreamingDataset(str(local), None if remote is None else str(remote), **options)


def assert_whole(dataset: StreamingDataset) -> None:
    """Check that each shard is fetched intact and nothing else is left; call it only while no other process fetches."""
    assert numbers(dataset[:]) == list(range(dataset.size))
    assert_tidy(Path(dataset.streams[0].directory))


def assert_tidy(directory: Path) -> None:
    """Check that a cache holds only shards, their marks, and the index."""
    left = [path for path in directory.rglob("*") if ".tmp-" in path.name or path.name.endswith(".lock")]
    assert left == []


def here(directory: Path) -> list[int]:
    """Return the numbers of the shards in a directory."""
    return sorted(int(path.name.split(".")[1]) for path in directory.glob("shard.*.mds"))


def put(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write files below a directory."""
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


@dataclass
class Faults:
    """The faults of each file, one after the other, and the files that were requested."""

    by_name: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    is_stuck: ClassVar[threading.Event] = threading.Event()
    drip_seconds: float = 0.02

    @property
    def shards(self) -> list[str]:
        return [name for name in self.asked if name != "index.json"]

    def next_of(self, path: str) -> str:
        """Note that a file is requested, and return what happens to the request."""
        name = path.rpartition("/")[2]
        self.asked.append(name)
        waiting = self.by_name.get(name, [])
        return waiting.pop(0) if waiting else ""

    def hang(self) -> None:
        """Answer nothing until the test is over."""
        self.is_stuck.set()
        self.is_over.wait(60)

    def drip(self, seconds: float, *, is_first: bool) -> bool:
        """Wait a moment before the next bytes, and return whether the test is over."""
        if is_first:
            self.is_stuck.set()
        return self.is_over.wait(seconds)


class FlakyFileSystem(MemoryFileSystem):
    """The file system behind ``flaky://``: it blocks, and is in memory."""

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = "flaky"
    faults: ClassVar[Faults] = Faults()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("flaky://") if isinstance(path, str) else path)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Describe a file as a bucket does: by a tag of its content."""
        found = super().info(path, **options)
        found.pop("created", None)
        return {**found, "ETag": hashlib.sha1(self.cat_file(path)).hexdigest()}

    def get_file(self, rpath: str, lpath: str, callback: Any = None, **options: Any) -> None:
        """Copy a file, or cause the requested fault."""
        content = self.cat_file(rpath)
        fault = self.faults.next_of(rpath)
        errors = {
            "fail": OSError("the connection was reset"),
            "missing": FileNotFoundError(rpath),
            "denied": PermissionError("access denied"),
            "full": OSError(28, "No space left on device"),
        }
        if fault in errors:
            raise errors[fault]
        content = damaged(content, fault)
        with open(lpath, "wb") as file:
            if fault == "hang":
                self.faults.hang()
            for begin in range(0, len(content), 100):
                if fault == "drip" and self.faults.drip(self.faults.drip_seconds, is_first=begin == 0):
                    return
                file.write(content[begin : begin + 100])
                file.flush()
                callback.relative_update(100)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


def damaged(content: bytes, fault: str) -> bytes:
    """Return the content as a fault leaves it."""
    if fault == "flip":
        return bytes([content[0] ^ 1]) + content[1:]
    return content[: len(content) // 2] if fault == "short" else b"" if fault == "empty" else content


@contextlib.contextmanager
def flaky(files: Mapping[str, bytes], faults: Mapping[str, list[str]] | None = None) -> Iterator[tuple[str, Faults]]:
    """Yield the URL of a directory in memory, and its faults."""
    FlakyFileSystem.store.clear()
    FlakyFileSystem.faults = Faults(by_name={name: list(kinds) for name, kinds in (faults or {}).items()})
    fs = fsspec.filesystem("flaky")
    for name, content in files.items():
        fs.pipe_file(f"/data/{name}", content)
    try:
        yield "flaky://data", FlakyFileSystem.faults
    finally:
        FlakyFileSystem.faults.is_over.set()
        FlakyFileSystem.store.clear()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, files: dict[str, bytes], faults: Faults, *args: Any) -> None:
        self._files = files
        self._faults = faults
        super().__init__(*args)

    def do_HEAD(self) -> None:
        content = self._files.get(self.path.removeprefix("/data/").partition("?")[0])
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", hashlib.sha1(content).hexdigest())
        self.end_headers()

    def do_GET(self) -> None:
        self._faults.addresses.append(self.path)
        name = self.path.removeprefix("/data/").partition("?")[0]
        fault = self._faults.next_of(name)
        content = self._files.get(name)
        if fault == "hang":
            self._faults.hang()
        if content is None or fault.isdigit():
            self.send_error(int(fault or 404))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        content = damaged(content, fault)
        step = 10 if fault in ("drip", "slow") else len(content) or 1
        for begin in range(0, len(content), step):
            if fault == "drip" and self._faults.drip(0.05, is_first=begin == 0):
                return
            if fault == "slow":
                time.sleep(0.001)
            with contextlib.suppress(OSError):
                self.wfile.write(content[begin : begin + step])

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def web(files: Mapping[str, bytes], faults: Mapping[str, list[str]] | None = None) -> Iterator[tuple[str, Faults]]:
    """Yield the URL of a directory behind a web server, and its faults."""
    troubles = Faults(by_name={name: list(kinds) for name, kinds in (faults or {}).items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, dict(files), troubles))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/data", troubles
    finally:
        troubles.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()

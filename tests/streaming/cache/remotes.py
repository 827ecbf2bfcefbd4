"""Data sets on remotes that fail on request: in memory behind fsspec, and behind a web server on localhost."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from lightning_faulttolerant.streaming.cache.shard_cache import ShardCache
from lightning_faulttolerant.streaming.format.codecs import compress
from lightning_faulttolerant.streaming.format.index import Columns, ShardFile, ShardInfo

HASH = "sha1"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Shards: their entries in the index, and their files as they are stored."""

    infos: list[ShardInfo]
    raw: dict[str, bytes]
    stored: dict[str, bytes]

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files, with an index that distinguishes this data from other data."""
        names = {name: hashlib.sha1(content).hexdigest() for name, content in self.stored.items()}
        return {**self.stored, "index.json": json.dumps(names).encode()}


def make_data(
    num_shards: int = 3,
    num_bytes: int = 1000,
    *,
    compression: str | None = None,
    hashes: Sequence[str] = (HASH,),
    folder: str = "",
    num_files: int = 1,
    salt: str = "",
) -> Data:
    """Make shards of different contents, all of one size."""
    infos, raw, stored = [], {}, {}
    for number in range(num_shards):
        files, zip_files = [], []
        for part in range(num_files):
            name = f"{folder}shard.{number:05d}.mds" + ".meta" * part
            word = f"{salt} {number} {part} ".encode()
            content = (word * num_bytes)[:num_bytes]
            raw[name] = content
            files.append(_file(name, content, hashes))
            if compression is not None:
                zipped = compress(content, compression)
                stored[f"{name}.zip"] = zipped
                zip_files.append(_file(f"{name}.zip", zipped, hashes))
            else:
                stored[name] = content
        infos.append(
            ShardInfo(
                format="mds",
                num_samples=1,
                files=tuple(files),
                zip_files=tuple(zip_files),
                compression=compression,
                columns=Columns(names=(), encodings=()),
            )
        )
    return Data(infos=infos, raw=raw, stored=stored)


def _file(name: str, content: bytes, hashes: Sequence[str]) -> ShardFile:
    digests = {algorithm: hashlib.new(algorithm, content).hexdigest() for algorithm in hashes}
    return ShardFile(basename=name, num_bytes=len(content), hashes=digests)


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a directory."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def cache_of(data: Data, local: Path, remote: str | None, **options: Any) -> ShardCache:
    """Make a cache of data."""
    return ShardCache(local=str(local), remote=remote, shards=data.infos, **options)


def assert_whole(cache: ShardCache, data: Data) -> None:
    """Check that each shard is fetched intact and nothing else is left; call it only while no other process fetches."""
    assert_fetched(cache, data)
    assert_tidy(Path(cache.directory))


def assert_fetched(cache: ShardCache, data: Data) -> None:
    """Check that each shard is fetched intact."""
    for number, info in enumerate(data.infos):
        directory = Path(cache.fetch(number))
        for file in info.files:
            assert (directory / file.basename).read_bytes() == data.raw[file.basename]


def assert_tidy(directory: Path) -> None:
    """Check that a cache holds only shards, their marks, and the index."""
    left = [path for path in directory.rglob("*") if ".tmp-" in path.name or path.name.endswith(".lock")]
    assert left == []


@dataclass
class Faults:
    """The faults of each file, one after the other, and the files that were requested."""

    by_name: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    is_stuck: ClassVar[threading.Event] = threading.Event()
    drip_seconds: float = 0.02

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
        }
        if fault in errors:
            raise errors[fault]
        content = damaged(content, fault)
        if fault == "late":
            self.faults.hang()
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

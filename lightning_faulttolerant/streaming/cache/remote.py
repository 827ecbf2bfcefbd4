"""Where shards come from: a directory anywhere that fsspec reaches, and one bounded attempt to get a file of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, final
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from lightning_faulttolerant.streaming.cache.patience import result_in_time

_S3_PROTOCOLS = ("s3", "s3a")
# Their retries wait a random time, drawn from the global generator of `random`: in fsspec's thread, at any moment.
_DRAWING_MODULES = ("botocore.retryhandler", "aiohttp.connector", "gcsfs.retry")


@final
class Remote:
    """A directory that shards are fetched from.

    It can be pickled and forked; each process makes its own connections.

    Args:
        url: A path, or a URL that fsspec knows: ``s3://``, ``gs://``, ``az://``, ``hf://``, ``http://``, ``file://``.
        storage_options: For fsspec's file system: credentials, addresses.

    Raises:
        ImportError: If the package for this kind of URL is not installed.
        ValueError: If there is no such kind of URL, or its options are wrong.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._options = {**_options(url), **(storage_options or {})}
        self._process_id = 0
        self._shared: AsyncFileSystem | None = None
        self._root = ""
        self.is_local = isinstance(self._file_system(), LocalFileSystem)

    def local_directory(self) -> str | None:
        """Return the directory where it is one of this machine."""
        return os.path.realpath(self._root) if self.is_local else None

    def address(self, basename: str) -> str:
        """Return the URL of a file, as it is shown: without passwords and signatures."""
        return re.sub(r"//[^/@]*@", "//", _join(self.url, basename).partition("?")[0])

    def download(self, basename: str, target: str, *, timeout_seconds: float) -> None:
        """Copy a file here, once, in a bounded time, whatever the other side does.

        Args:
            basename: Of the file, relative to the directory; may have sub-folders.
            target: Where it is written. What is there after an error is the caller's to remove.
            timeout_seconds: For all of it.

        Raises:
            TimeoutError: If it has not ended in time.
            Exception: What the client raises.
        """
        fs = self._file_system()
        path = _join(self._root, basename)
        _let_retries_draw_elsewhere()
        if isinstance(fs, AsyncFileSystem):
            # A coroutine is cancelled when its time is over, so that nothing goes on behind our back.
            copying = asyncio.run_coroutine_threadsafe(fs._get_file(path, target), fs.loop)
            result_in_time(copying, timeout_seconds)
        else:
            _Copy(self._file_system, path, target).run(timeout_seconds)
        if os.path.isdir(target):  # that is how a directory is copied
            os.rmdir(target)
            raise IsADirectoryError(f"{self.address(basename)} is a directory")

    def _file_system(self) -> Any:
        if self._shared is not None and self._process_id == os.getpid():
            return self._shared
        try:
            fs, self._root = fsspec.core.url_to_fs(self.url, **self._options)
        except ImportError as error:
            raise ImportError(
                f"{self.address('')} can't be opened: {error}. Without its package nothing can be read from there. "
                f"Install it: pip install {_package(error)}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{self.address('')} can't be opened: {error}. Nothing can be read from there. Give a directory, or a "
                "URL that fsspec knows, such as s3://bucket/folder, with the storage_options that it needs."
            ) from error
        if isinstance(fs, AsyncFileSystem):
            # One for all threads: its work is done in fsspec's own. Others are not made for that, and fsspec keeps one
            # for each thread.
            self._shared, self._process_id = fs, os.getpid()
        return fs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": None}


@final
class _Copy(Callback):  # type: ignore[misc]  # fsspec has no annotations
    """A copy by a file system that blocks, which ends between two blocks once nobody waits for it any more."""

    def __init__(self, file_system: Callable[[], Any], path: str, target: str) -> None:
        super().__init__()
        self._file_system = file_system
        self._path = path
        self._target = target
        self._is_given_up = False

    def run(self, timeout_seconds: float) -> None:
        """Copy, or give up after a time."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon: one that hangs does not keep the process from its end.
        threading.Thread(target=self._copy, args=(done,), name="shard-download", daemon=True).start()
        try:
            result_in_time(done, timeout_seconds)
        finally:
            self._is_given_up = True

    def relative_update(self, inc: int = 1) -> None:
        """Learn that a block has been written."""
        if self._is_given_up:
            raise TimeoutError("nobody waits for this file any more")

    def _copy(self, done: concurrent.futures.Future[None]) -> None:
        try:
            self._file_system().get_file(self._path, self._target, callback=self)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            _settle(done, error)
        else:
            _settle(done, None)
        finally:
            if self._is_given_up:  # who waited has removed the file, but perhaps before it was made
                with contextlib.suppress(OSError):
                    os.unlink(self._target)


def _settle(done: concurrent.futures.Future[None], error: BaseException | None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _join(directory: str, basename: str) -> str:
    if not basename:
        return directory
    # A signature stands behind the path: https://host/folder?sig=...
    is_web = directory.startswith(("http://", "https://"))
    directory, mark, query = directory.partition("?") if is_web else (directory, "", "")
    return f"{directory.rstrip('/')}/{basename}{mark}{query}"


def is_final(error: BaseException) -> bool:
    """Tell whether an error will be the same when it is tried again: what is not there, and what is not allowed."""
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return True
    status = getattr(error, "status", None)  # aiohttp's
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


def _options(url: str) -> dict[str, Any]:
    # The mode "standard" takes its random numbers in a way that can't be led elsewhere, and is the default for some.
    is_s3 = urlsplit(url).scheme in _S3_PROTOCOLS
    return {"config_kwargs": {"retries": {"mode": "legacy"}}} if is_s3 else {}


def _package(error: ImportError) -> str:
    # fsspec raises an ImportError with advice of its own from the one that names the module.
    missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    return (missing.name or "the package that it needs").partition(".")[0]


def _let_retries_draw_elsewhere() -> None:
    for name in _DRAWING_MODULES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[attr-defined]

"""Where shards come from: a directory anywhere that fsspec reaches, and one bounded attempt to get a file of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, final
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from lightning_faulttolerant.clients import client_options, let_retries_draw_elsewhere, missing_package
from lightning_faulttolerant.streaming.cache.patience import result_in_time

Result = TypeVar("Result")

# What stands between // and @, and after a question mark.
_SECRETS = re.compile(r"(?<=//)[^/@]+@|\?.*")
_WEB_PROTOCOLS = ("http", "https")


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
        self.is_local = isinstance(self.file_system(), LocalFileSystem)

    def local_directory(self) -> str | None:
        """Return the directory where it is one of this machine."""
        return os.path.realpath(self._root) if self.is_local else None

    def address(self, basename: str) -> str:
        """Return the URL of a file, as it may be shown."""
        return self.without_secrets(_join(self.url, basename))

    def without_secrets(self, text: str) -> str:
        """Return a text, such as a client's error, without the password and the signature that the URL may have."""
        for secret in _SECRETS.findall(self.url):
            text = text.replace(secret, "")
        return text

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
        fs, path = self.file_system(), _join(self._root, basename)
        let_retries_draw_elsewhere()
        if isinstance(fs, AsyncFileSystem):
            result_in_time(_in_loop(fs, fs._get_file(path, target)), timeout_seconds)
        else:
            copy = _Copy(self.file_system, path, target)
            try:
                result_in_time(_in_thread(copy), timeout_seconds)
            finally:
                copy.is_given_up = True
        if os.path.isdir(target):  # that is how a directory is copied
            os.rmdir(target)
            raise IsADirectoryError(f"{self.address(basename)} is a directory")

    def read(self, basename: str, *, timeout_seconds: float) -> bytes:
        """Return the content of a file, as ``download`` does."""
        fs, path = self.file_system(), _join(self._root, basename)
        let_retries_draw_elsewhere()
        if isinstance(fs, AsyncFileSystem):
            content = result_in_time(_in_loop(fs, fs._cat_file(path)), timeout_seconds)
        else:  # asked for in the thread that uses it: fsspec keeps one for each thread
            content = result_in_time(_in_thread(lambda: self.file_system().cat_file(path)), timeout_seconds)
        return bytes(content)

    def file_system(self) -> Any:
        """Return fsspec's file system, of this process and, if it blocks, of this thread."""
        if self._shared is not None and self._process_id == os.getpid():
            return self._shared
        try:
            fs, self._root = fsspec.core.url_to_fs(self.url, **self._options)
        except ImportError as error:
            raise ImportError(
                f"{self.address('')} can't be opened: {error}. Without its package nothing can be read from there. "
                f"Install it: pip install {missing_package(error)}"
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
        self.is_given_up = False

    def __call__(self) -> None:
        try:
            self._file_system().get_file(self._path, self._target, callback=self)
        finally:
            if self.is_given_up:  # who waited has removed the file, but perhaps before it was made
                with contextlib.suppress(OSError):
                    os.unlink(self._target)

    def relative_update(self, inc: int = 1) -> None:
        """Learn that a block has been written."""
        if self.is_given_up:
            raise TimeoutError("nobody waits for this file any more")


def _in_loop(fs: AsyncFileSystem, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
    """Begin with what can be cancelled when its time is over, so that nothing continues behind our back."""
    return asyncio.run_coroutine_threadsafe(coroutine, fs.loop)


def _in_thread(function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """Begin with what can't be ended, in a thread that does not keep the process from its end when it hangs."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

    threading.Thread(target=run, name="shard-download", daemon=True).start()
    return future


def _join(directory: str, basename: str) -> str:
    if not basename:
        return directory
    # A signature stands after the path: https://host/folder?sig=...
    is_web = urlsplit(directory).scheme in _WEB_PROTOCOLS
    directory, mark, query = directory.partition("?") if is_web else (directory, "", "")
    return f"{directory.rstrip('/')}/{basename}{mark}{query}"


def is_final(error: BaseException) -> bool:
    """Tell whether an error will be the same when it is tried again: what is not there, and what is not allowed."""
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return True
    status = getattr(error, "status", None)  # aiohttp's
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


def _options(url: str) -> dict[str, Any]:
    scheme = urlsplit(url).scheme
    if scheme in _WEB_PROTOCOLS:
        with contextlib.suppress(ImportError):
            from fsspec.implementations import http

            # Ours counts, not the five minutes that it has for each request.
            return {"client_kwargs": {"timeout": http.aiohttp.ClientTimeout(total=None)}}
    return client_options(scheme)

"""The source of shards: a directory in any file system of fsspec, and one time-limited attempt to fetch a file."""

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

from lightning_faulttolerant.storage.file_systems import client_options, let_clients_draw_elsewhere, missing_package
from lightning_faulttolerant.streaming.cache.timeouts import result_in_time

Result = TypeVar("Result")

# The credentials between // and @, and everything after a question mark.
_SECRETS = re.compile(r"(?<=//)[^/@]+@|\?.*")
_WEB_PROTOCOLS = ("http", "https")


@final
class Remote:
    """A directory that shards are fetched from.

    It can be pickled and forked; each process opens its own connections.

    Args:
        url: A path, or a URL that fsspec knows: ``s3://``, ``gs://``, ``az://``, ``hf://``, ``http://``, ``file://``.
        storage_options: Options of fsspec's file system: credentials, addresses.

    Raises:
        ImportError: If the package for this kind of URL is not installed.
        ValueError: If this kind of URL doesn't exist, or its options are wrong.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._options = {**_options(url), **(storage_options or {})}
        self._process_id = 0
        self._shared: AsyncFileSystem | None = None
        self._root = ""
        self.is_local = isinstance(self.file_system(), LocalFileSystem)

    def local_directory(self) -> str | None:
        """Return the directory if it is on this machine."""
        return os.path.realpath(self._root) if self.is_local else None

    def address(self, basename: str) -> str:
        """Return the URL of a file in a form that is safe to show."""
        return self.without_secrets(_join(self.url, basename))

    def without_secrets(self, text: str) -> str:
        """Return a text, such as a client's error, without the password and the signature that the URL may contain."""
        for secret in _SECRETS.findall(self.url):
            text = text.replace(secret, "")
        return text

    def download(self, basename: str, target: str, *, timeout_seconds: float) -> None:
        """Copy a file here in one attempt of limited time, whatever the other side does.

        Args:
            basename: The file's path relative to the directory; may have subfolders.
            target: The file to write. After an error, the caller must remove it.
            timeout_seconds: The limit for the whole copy.

        Raises:
            TimeoutError: If it has not finished in time.
            Exception: Any error of the client.
        """
        fs, path = self.file_system(), _join(self._root, basename)
        let_clients_draw_elsewhere()
        if isinstance(fs, AsyncFileSystem):
            result_in_time(_in_loop(fs, fs._get_file(path, target)), timeout_seconds)
        else:
            copy = _Copy(self.file_system, path, target)
            try:
                result_in_time(_in_thread(copy), timeout_seconds)
            finally:
                copy.is_given_up = True
        if os.path.isdir(target):  # fsspec copies a directory this way
            os.rmdir(target)
            raise IsADirectoryError(f"{self.address(basename)} is a directory")

    def read(self, basename: str, *, timeout_seconds: float) -> bytes:
        """Return the content of a file, with the limits of ``download``."""
        fs, path = self.file_system(), _join(self._root, basename)
        let_clients_draw_elsewhere()
        if isinstance(fs, AsyncFileSystem):
            content = result_in_time(_in_loop(fs, fs._cat_file(path)), timeout_seconds)
        else:  # requested in the thread that uses it: fsspec keeps one for each thread
            content = result_in_time(_in_thread(lambda: self.file_system().cat_file(path)), timeout_seconds)
        return bytes(content)

    def file_system(self) -> Any:
        """Return fsspec's file system of this process and, if it blocks, of this thread."""
        if self._shared is not None and self._process_id == os.getpid():
            return self._shared
        try:
            fs, self._root = fsspec.core.url_to_fs(self.url, **self._options)
        except ImportError as error:
            raise ImportError(
                f"{self.address('')} can't be opened: {error}. Without its package, nothing can be read there. "
                f"Install it: pip install {missing_package(error)}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{self.address('')} can't be opened: {error}. Nothing can be read there. Pass a directory, or a URL "
                "that fsspec knows, such as s3://bucket/folder, with the storage_options that it needs."
            ) from error
        if isinstance(fs, AsyncFileSystem):
            # One for all threads: its work runs in fsspec's own thread. Blocking file systems don't support that, and
            # fsspec keeps one of them for each thread.
            self._shared, self._process_id = fs, os.getpid()
        return fs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": None}


@final
class _Copy(Callback):  # type: ignore[misc]  # fsspec has no annotations
    """A copy by a blocking file system. It ends between two blocks once its result is no longer wanted."""

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
            if self.is_given_up:  # the caller has removed the file, but perhaps before it was created
                with contextlib.suppress(OSError):
                    os.unlink(self._target)

    def relative_update(self, inc: int = 1) -> None:
        """Note that a block has been written."""
        if self.is_given_up:
            raise TimeoutError("nothing waits for this file anymore")


def _in_loop(fs: AsyncFileSystem, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
    """Start a coroutine that can be cancelled when its time is over, so nothing continues in the background."""
    return asyncio.run_coroutine_threadsafe(coroutine, fs.loop)


def _in_thread(function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """Start a function that can't be interrupted, in a thread that does not keep the process alive if it hangs."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
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
    # A signature comes after the path: https://host/folder?sig=...
    is_web = urlsplit(directory).scheme in _WEB_PROTOCOLS
    directory, mark, query = directory.partition("?") if is_web else (directory, "", "")
    return f"{directory.rstrip('/')}/{basename}{mark}{query}"


def is_final(error: BaseException) -> bool:
    """Return whether a retry would raise the same error: the file is missing, or access is denied."""
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return True
    status = getattr(error, "status", None)  # aiohttp's
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


def _options(url: str) -> dict[str, Any]:
    scheme = urlsplit(url).scheme
    if scheme in _WEB_PROTOCOLS:
        with contextlib.suppress(ImportError):
            from fsspec.implementations import http

            # Our timeout applies, not the default of five minutes for each request.
            return {"client_kwargs": {"timeout": http.aiohttp.ClientTimeout(total=None)}}
    return client_options(scheme)

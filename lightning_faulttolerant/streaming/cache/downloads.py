"""Downloads from any file system of fsspec: each attempt has a time limit, and is repeated if that may help.

Another thread can end a wait. Some errors are final: the file is missing, or this disk is full.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, final
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from lightning_faulttolerant.storage.file_systems import client_options, let_clients_draw_elsewhere, missing_package
from lightning_faulttolerant.storage.local import is_on_local_disk
from lightning_faulttolerant.storage.store import is_url, local_path

Result = TypeVar("Result")

_LOOK_SECONDS = 0.05

# Each thread has its own context, and begins with an empty one.
_stop: ContextVar[threading.Event | None] = ContextVar("_stop", default=None)


class StoppedError(BaseException):
    """This thread no longer needs to wait. It is not a data error, so handlers of data errors don't catch it."""


@contextlib.contextmanager
def stoppable(stop: threading.Event) -> Iterator[None]:
    """Let an event end the waits in the block, with a StoppedError.

    Args:
        stop: Set by another thread.
    """
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def pause(seconds: float) -> None:
    """Sleep.

    Raises:
        StoppedError: If this thread is stopped.
    """
    stop = _stop.get()
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise StoppedError


def result_in_time(future: concurrent.futures.Future[Result], timeout_seconds: float) -> Result:
    """Return the result of a future.

    Args:
        future: It is cancelled, if possible, when it is given up.
        timeout_seconds: The longest time that it may take.

    Raises:
        TimeoutError: If it takes longer.
        StoppedError: If this thread is stopped.
        Exception: What the future raises.
    """
    stop, deadline = _stop.get(), time.monotonic() + timeout_seconds
    while not future.done():
        left = deadline - time.monotonic()
        if left <= 0 or (stop is not None and stop.is_set()):
            future.cancel()
            if left <= 0:
                raise TimeoutError(f"it has not ended within {timeout_seconds:g} s")
            raise StoppedError
        concurrent.futures.wait([future], left if stop is None else min(left, _LOOK_SECONDS))
    return future.result()


# The credentials between // and @, and everything after a question mark.
_SECRETS = re.compile(r"(?<=//)[^/@]+@|\?.*")
_WEB_PROTOCOLS = ("http", "https")
# The names that file systems of fsspec have for the size, the time, and the tag of a file's content.
_VERSION = ("size", "mtime", "lastmodified", "modified", "modify", "updated", "created", "generation", "etag", "blobid")


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

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        self.url = url
        self._options = {**_options(url), **(storage_options or {})}
        self._process_id = 0
        self._shared: AsyncFileSystem | None = None
        self._root = ""
        self.is_local = isinstance(self.file_system(), LocalFileSystem)

    def local_directory(self) -> str | None:
        """Return the directory if it is on this machine."""
        return os.path.realpath(self._root) if self.is_local else None

    def identity(self) -> str:
        """Return the address without secrets, the same for each spelling of a local directory."""
        return self.local_directory() or self.address("").rstrip("/")

    def is_on_local_disk(self) -> bool:
        """Return whether a fetch only copies from a disk of this machine, and waits for nothing else."""
        directory = self.local_directory()
        return directory is not None and is_on_local_disk(directory)

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
        return bytes(self._answer("cat_file", basename, timeout_seconds))

    def version(self, basename: str, *, timeout_seconds: float) -> str:
        """Return what the store says of a file: its size, its time, and its tag, as far as the store has them."""
        found = self._answer("info", basename, timeout_seconds)
        said = {re.sub("[-_]", "", name.lower()): str(value) for name, value in found.items()}
        if "mtime" in said:  # a local file is "created" again when its mode changes
            said.pop("created", None)
        return " ".join(said[name] for name in _VERSION if name in said)

    def _answer(self, method: str, basename: str, timeout_seconds: float) -> Any:
        fs, path = self.file_system(), _join(self._root, basename)
        let_clients_draw_elsewhere()
        if isinstance(fs, AsyncFileSystem):
            future = _in_loop(fs, getattr(fs, f"_{method}")(path))
        else:  # requested in the thread that uses it: fsspec keeps one for each thread
            future = _in_thread(lambda: getattr(self.file_system(), method)(path))
        return result_in_time(future, timeout_seconds)

    def file_system(self) -> Any:
        """Return fsspec's file system of this process and, if it blocks, of this thread."""
        if self._shared is not None and self._process_id == os.getpid():
            return self._shared
        try:
            if is_url(self.url):
                fs, self._root = fsspec.core.url_to_fs(self.url, **self._options)
            else:  # url_to_fs would cut a path at "::"
                fs, self._root = LocalFileSystem(**self._options), os.path.abspath(local_path(self.url))
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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_shared": None}


def remote_of(directory: str, address: str | None, storage_options: Mapping[str, object] | None) -> Remote | None:
    """Return the remote at an address, unless it is the local directory itself.

    Args:
        directory: The directory of the data set on this machine.
        address: The address; None if there is no remote.
        storage_options: Options of the remote's file system.

    Raises:
        ImportError: If the package for this kind of remote is not installed.
        ValueError: If fsspec does not know this kind.
    """
    remote = None if address is None else Remote(address, storage_options)
    return None if remote is not None and remote.local_directory() == os.path.realpath(directory) else remote


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


def _options(url: str) -> dict[str, object]:
    scheme = urlsplit(url).scheme
    if scheme in _WEB_PROTOCOLS:
        with contextlib.suppress(ImportError):
            from fsspec.implementations import http

            # Our timeout applies, not the default of five minutes for each request.
            return {"client_kwargs": {"timeout": http.aiohttp.ClientTimeout(total=None)}}
    return client_options(scheme)


_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 30.0
# Errors of the local disk, not of the network: the disk will be as full the next time.
_OF_THIS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# A separate generator: a draw from the run's generators would change its results.
_jitter = random.Random()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The policy for download attempts.

    Args:
        retry: How often a download is tried again after the first attempt. 0 is a single attempt.
        timeout_seconds: The limit for each attempt, whatever the other side does.
    """

    retry: int = 2
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.retry, bool) or not isinstance(self.retry, int) or self.retry < 0:
            raise ValueError(f"download_retry is {self.retry!r}. Pass the number of further attempts, 0 or more.")
        if not self.timeout_seconds > 0:
            raise ValueError(f"download_timeout is {self.timeout_seconds!r}. Pass a number of seconds above 0.")

    @property
    def longest_seconds(self) -> float:
        """The longest possible time of all attempts and the pauses between them."""
        return sum(self.timeout_seconds + _longest_pause(number) for number in range(self.retry + 1))

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Return the result of the first attempt that succeeds.

        Args:
            attempt: The function to call. It keeps its own time limit.

        Raises:
            FailedError: With the number of attempts, and the last error as its cause.
            ImportError: Immediately.
        """
        number = 0
        while True:
            try:
                return attempt()
            except ImportError:
                raise  # a package for a compression or a hash
            except Exception as error:
                number += 1
                if number > self.retry or is_final(error) or getattr(error, "errno", None) in _OF_THIS_DISK:
                    raise FailedError(number) from error
            pause(_longest_pause(number - 1) * _jitter.uniform(0.5, 1.0))


class FailedError(Exception):
    """No attempt succeeded. The cause is the error of the last attempt.

    Args:
        num_attempts: The number of attempts.
    """

    def __init__(self, num_attempts: int) -> None:
        super().__init__(num_attempts)
        self.num_attempts = num_attempts

    def __str__(self) -> str:
        times = "attempt" if self.num_attempts == 1 else "attempts"
        cause = self.__cause__
        return f"{self.num_attempts} {times}, the last: {type(cause).__name__}: {cause}"


def _longest_pause(number: int) -> float:
    return min(_FIRST_PAUSE_SECONDS * 2.0**number, _LAST_PAUSE_SECONDS)

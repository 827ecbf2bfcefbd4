"""The place where a data set is written, a directory or an address that fsspec knows, and the merge of data sets.

The index of a data set is written last. A merge turns the data sets below one directory into one: only the index is
written, and no shard is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_faulttolerant.storage.local import atomic_writer
from lightning_faulttolerant.storage.store import is_url, local_path
from lightning_faulttolerant.streaming.format.codecs import FAMILIES
from lightning_faulttolerant.streaming.format.encoding import extra
from lightning_faulttolerant.streaming.format.index import FORMATS, INDEX_BASENAME, VERSION, parse_index


class FilePlace:
    """A local directory, or an address that fsspec knows. Names are relative to it, with ``/`` between their parts.

    Args:
        address: The path, or the address.
        storage_options: Options for the file system of an address.
    """

    def __init__(self, address: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> None:
        self.is_local = not is_url(address)
        self._address = _whole(address)
        if self.is_local:
            self._file_system, path = LocalFileSystem(), self._address
        else:
            self._file_system, path = fsspec.core.url_to_fs(self._address, **(storage_options or {}))
        self._root = str(path).rstrip("/")

    def __str__(self) -> str:
        return self._address

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: If it doesn't exist.
        """
        return bytes(self._file_system.cat_file(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Write a file. When this returns, the file is durable."""
        path = self._path(name)
        try:
            self._write(path, data)
        except FileNotFoundError:  # object stores have no directories; others may need one first
            self._file_system.makedirs(os.path.dirname(path), exist_ok=True)
            self._write(path, data)

    def _write(self, path: str, data: bytes) -> None:
        if not self.is_local:
            self._file_system.pipe_file(path, data)
            return
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, name: str, data: bytes) -> None:
        """Write a file so that readers find the old content or the new one, never a part."""
        if not self.is_local:  # object stores show a file when it is complete
            self.write(name, data)
            return
        path = self._path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_writer(path) as file:
            file.write(data)

    def names(self) -> list[str]:
        """Return the names directly in the directory, sorted; an empty list if it does not exist."""
        self._file_system.invalidate_cache(self._root)
        try:
            paths = self._file_system.ls(self._root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in (str(path).rstrip("/").rpartition("/")[2] for path in paths) if name)

    def find(self, basename: str) -> list[str]:
        """Return the files of this name in the directory and all below it, sorted."""
        self._file_system.invalidate_cache()
        paths = [str(path) for path in self._file_system.find(self._root)]
        names = [path[len(self._root) :].lstrip("/") for path in paths]
        return sorted(name for name in names if name.rpartition("/")[2] == basename)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are skipped."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._file_system.rm_file(self._path(name))

    def relative(self, address: str) -> str | None:
        """Return the name of a file by its address, or ``None`` if it is not below this place."""
        whole, prefix = _whole(address), f"{self._address.rstrip('/')}/"
        return whole.removeprefix(prefix) if whole.startswith(prefix) else None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _whole(address: str | os.PathLike[str]) -> str:
    """Return an address without a slash at its end, or an absolute path."""
    text = os.fspath(address)
    return text.rstrip("/") if is_url(text) else os.path.abspath(os.path.expanduser(local_path(text)))


_SHARD_NAME = re.compile(
    rf"shard\.\d{{5,}}\.(?:{'|'.join(FORMATS)})(?:\.meta)?(?:\.(?:{'|'.join(FAMILIES)}))?"
    rf"|{re.escape(INDEX_BASENAME)}|\.{re.escape(INDEX_BASENAME)}\.tmp-.*"
)
_MAX_DELAY_SECONDS = 30.0
# Errors that another attempt would raise again.
_FINAL_ERRORS = (FileNotFoundError, PermissionError, NotImplementedError, TypeError)


class Output:
    """Receives the files of a data set one by one, and its index last.

    Files for a local directory are written immediately. Threads upload the files for a remote. No more files wait than
    there are threads, so a slow remote slows the writer down and does not fill its memory.

    Args: see ``DatasetWriter``.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | tuple[str, str],
        *,
        keep_local: bool,
        progress_bar: bool,
        max_workers: int | None,
        retry: int,
        exist_ok: bool,
        storage_options: Mapping[str, object] | None,
    ) -> None:
        if retry < 0 or (max_workers is not None and max_workers < 1):
            raise ValueError(f"retry={retry} must be at least 0, and max_workers={max_workers} at least 1.")
        self._local, self._remote = _places(out, storage_options)
        self._retry = retry
        self._keep_local = keep_local
        self._written: list[str] = []
        for place in filter(None, (self._remote, self._local)):
            _make_room(place, exist_ok=exist_ok)
        if self._local is not None:
            os.makedirs(str(self._local), exist_ok=True)
        num_threads = max_workers or min(32, (os.cpu_count() or 1) + 4)
        self._executor = ThreadPoolExecutor(num_threads, "upload") if self._remote else None
        self._slots = threading.BoundedSemaphore(2 * num_threads)
        self._uploads: list[Future[None]] = []
        self._bar: Any = None
        if progress_bar and self._remote:
            self._bar = extra("tqdm", purpose="for progress_bar=True").tqdm(desc="Uploading", unit="file", total=0)

    def add(self, name: str, data: bytes) -> None:
        """Write a file of the data set.

        Raises:
            OSError: If it can't be written, or if an earlier upload failed.
        """
        if self._local is not None:
            self._local.write(name, data)
            self._written.append(name)
        if self._executor is not None:
            self._raise_failures(only_done=True)
            self._slots.acquire()
            if self._bar is not None:
                self._bar.total += 1
            upload = self._executor.submit(self._upload, name, data)
            upload.add_done_callback(self._uploaded)
            self._uploads.append(upload)

    def publish(self, data: bytes) -> None:
        """Write the index, once all other files are in place.

        Raises:
            OSError: If the index, or a file before it, can't be written.
        """
        self._raise_failures(only_done=False)
        if self._local is not None:
            self._local.replace(INDEX_BASENAME, data)
            self._written.append(INDEX_BASENAME)
        if self._remote is not None:
            self._upload(INDEX_BASENAME, data)
        self._close()
        if self._local is not None and self._remote is not None and not self._keep_local:
            self._local.delete(reversed(self._written))
            if not self._local.names():
                os.rmdir(str(self._local))

    def abandon(self) -> None:
        """Give up: wait for the current uploads, and start no others."""
        self._close()

    def _upload(self, name: str, data: bytes) -> None:
        assert self._remote is not None
        for attempt in range(self._retry + 1):
            try:
                return (self._remote.replace if name == INDEX_BASENAME else self._remote.write)(name, data)
            except Exception as error:
                if attempt == self._retry or isinstance(error, _FINAL_ERRORS):
                    raise OSError(
                        f"{name} could not be uploaded to {self._remote} (attempt {attempt + 1} of "
                        f"{self._retry + 1}): {error!r}. The data set there has no index, so it does not count as "
                        "complete. Write it again, with exist_ok=True."
                    ) from error
            time.sleep(min(2.0**attempt, _MAX_DELAY_SECONDS))
        return None

    def _uploaded(self, upload: Future[None]) -> None:
        self._slots.release()
        if self._bar is not None:
            self._bar.update()

    def _raise_failures(self, *, only_done: bool) -> None:
        waiting = []
        for upload in self._uploads:
            if only_done and not upload.done():
                waiting.append(upload)
            else:
                upload.result()
        self._uploads = waiting

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        if self._bar is not None:
            self._bar.close()


def _places(
    out: str | os.PathLike[str] | tuple[str, str], storage_options: Mapping[str, object] | None
) -> tuple[FilePlace | None, FilePlace | None]:
    """Return the place to write to immediately, and the place to upload to."""
    if isinstance(out, (tuple, list)):
        if len(out) != 2 or is_url(out[0]):
            raise ValueError(f"out={out!r}: a pair is a local directory and the address to upload to.")
        return FilePlace(out[0]), FilePlace(out[1], storage_options)
    place = FilePlace(out, storage_options)
    return (place, None) if place.is_local else (None, place)


def _make_room(place: FilePlace, *, exist_ok: bool) -> None:
    """Delete the existing data set, its index first: an index must not remain without its shards."""
    names = place.names()
    if names and not exist_ok:
        raise FileExistsError(
            f"{place} is not empty ({names[0]}, ...). Choose another place, or pass exist_ok=True to replace the data "
            "set there; other files stay."
        )
    found = [name for name in names if _SHARD_NAME.fullmatch(name)]
    place.delete(sorted(found, key=lambda name: name != INDEX_BASENAME))


Address: TypeAlias = str | tuple[str, str]

_FILE_KEYS = ("raw_data", "zip_data", "raw_meta", "zip_meta")
_NUM_THREADS = 16


def merge_index(*args: Any, **kwargs: Any) -> None:
    """Write an index of all the data sets below a directory, which makes them one data set.

    ``merge_index(out, keep_local=True, download_timeout=60)`` merges all that have an index below ``out``, in the order
    of their names. ``merge_index(index_file_urls, out, keep_local=True, download_timeout=60)`` merges those given, in
    that order, each once.

    Args:
        *args: In one of the two orders above. ``index_file_urls``: paths or addresses of indexes below ``out``, or
            pairs of both. ``out``: a directory, an address, or a pair of both. The index is written to each, and files
            in the directory are not requested from the address. ``keep_local``: for a pair, write it to the directory,
            too. ``download_timeout``: limit for reading an index, in seconds.
        **kwargs: The same by their names; also ``storage_options``, for the file system of an address.

    Raises:
        FileNotFoundError: If there is no index to merge.
        ValueError: If an index is not below ``out``: its shards could not be found from there.
        IndexFileError: If one of them is damaged, or the same file would be in it twice with different content.
        TimeoutError: If an index was not read in time.
    """
    urls: Sequence[Address] | None = kwargs.pop("index_file_urls", None)
    if urls is None and args and isinstance(args[0], list):
        urls, *args = args  # type: ignore[assignment]
    job = _Merge(*args, **kwargs)
    job.run(job.found() if urls is None else [job.name_of(url) for url in dict.fromkeys(urls)])


class _Merge:
    def __init__(
        self,
        out: Address,
        keep_local: bool = True,
        download_timeout: float = 60,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        addresses = (out,) if isinstance(out, (str, os.PathLike)) else tuple(out)
        # The last one is the place of the data set. A directory with copies of its indexes may come before it.
        self._places: list[FilePlace] = [FilePlace(address, storage_options) for address in addresses]
        self._keep_local = keep_local
        self._timeout_seconds = download_timeout

    def found(self) -> list[str]:
        """Return the indexes below ``out``. Anything below a data set is already part of it."""
        names = {name for place in self._places for name in place.find(INDEX_BASENAME)} - {INDEX_BASENAME}
        return sorted((name for name in names if not names & _indexes_above(name)), key=lambda name: name.split("/"))

    def name_of(self, address: Address) -> str:
        """Return the name of an index relative to ``out``."""
        texts = (address,) if isinstance(address, (str, os.PathLike)) else tuple(address)
        for text in map(os.fspath, texts):
            for place in self._places:
                name = place.relative(text.strip().rstrip("/"))
                if name is not None:
                    return name if name.endswith(".json") else f"{name}/{INDEX_BASENAME}"
        raise ValueError(
            f"The index {address} is not below {' or '.join(map(str, self._places))}: an index written there could "
            "not name its shards. Pass a directory above all data sets."
        )

    def run(self, names: Sequence[str]) -> None:
        """Merge the indexes of these names."""
        if not names:
            raise FileNotFoundError(f"No {INDEX_BASENAME} exists below {self._places[-1]}, so nothing can be merged.")
        executor = ThreadPoolExecutor(min(_NUM_THREADS, len(names)))
        seconds = self._timeout_seconds * len(names)
        try:
            texts = list(executor.map(self._read, names, timeout=seconds))
        except futures.TimeoutError as error:  # before Python 3.11 not the built-in one
            raise TimeoutError(
                f"Not all indexes below {self._places[-1]} ({len(names)}) were read within {seconds:g} s. Run it "
                "again, or pass a longer download_timeout."
            ) from error
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
        shards = [shard for name, text in zip(names, texts, strict=True) for shard in self._shards(name, text)]
        merged = json.dumps({"version": VERSION, "shards": shards}).encode()
        # Reading it once shows whether two of them name the same file.
        parse_index(merged, source=f"merged below {self._places[-1]}")
        for place in self._places:
            if self._keep_local or len(self._places) == 1 or place is not self._places[0]:
                place.replace(INDEX_BASENAME, merged)

    def _read(self, name: str) -> bytes:
        for place in self._places:
            with contextlib.suppress(FileNotFoundError):
                return place.read(name)
        raise FileNotFoundError(f"No {name} exists below {' or '.join(map(str, self._places))}.")

    def _shards(self, name: str, text: bytes) -> list[dict[str, object]]:
        source = f"{self._places[-1]}/{name}"
        parse_index(text, source=source)
        folder = name.rpartition("/")[0]
        shards = cast(list[dict[str, Any]], json.loads(text)["shards"])
        for shard in shards:
            for file in filter(None, map(shard.get, _FILE_KEYS)):
                file["basename"] = f"{folder}/{file['basename']}" if folder else file["basename"]
        return shards


def _indexes_above(name: str) -> set[str]:
    """Return the names that indexes would have in the parent folders of a folder with an index."""
    folders = name.split("/")[:-1]
    return {"/".join((*folders[:i], INDEX_BASENAME)) for i in range(1, len(folders))}

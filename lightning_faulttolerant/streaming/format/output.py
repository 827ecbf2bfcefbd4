"""Delivers the files of a data set that is being written, and its index last."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_faulttolerant.storage.store import is_url
from lightning_faulttolerant.streaming.format.compression import FAMILIES
from lightning_faulttolerant.streaming.format.extras import extra
from lightning_faulttolerant.streaming.format.index import FORMATS, INDEX_BASENAME
from lightning_faulttolerant.streaming.format.places import FilePlace, LocalPlace, place_of

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
            raise ValueError(f"retry={retry}, max_workers={max_workers}: at least 0 and 1.")
        self._local, self._remote = _places(out, storage_options)
        self._retry = retry
        self._keep_local = keep_local
        self._written: list[str] = []
        for place in filter(None, (self._remote, self._local)):
            _make_room(place, exist_ok=exist_ok)
        if isinstance(self._local, LocalPlace):
            os.makedirs(self._local.path, exist_ok=True)
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
        if isinstance(self._local, LocalPlace) and self._remote is not None and not self._keep_local:
            self._local.delete(reversed(self._written))
            if not self._local.names():
                os.rmdir(self._local.path)

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
            raise ValueError(f"out={out!r}: a pair must be a local directory and an address.")
        return place_of(out[0]), place_of(out[1], storage_options)
    place = place_of(out, storage_options)
    return (place, None) if isinstance(place, LocalPlace) else (None, place)


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

"""Merges several data sets below one directory into one: only the index is written, and no shard is touched."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, cast

from lightning_faulttolerant.streaming.format.index import INDEX_BASENAME, VERSION, parse_index
from lightning_faulttolerant.streaming.format.output import FilePlace, place_of

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
        self._places: list[FilePlace] = [place_of(address, storage_options) for address in addresses]
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

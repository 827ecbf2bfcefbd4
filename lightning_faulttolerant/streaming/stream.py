"""One of the data sets that a streaming data set is mixed of: where it is, and how much of it an epoch reads."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_faulttolerant.streaming.order.mixing import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One directory of shards, with its own weight in the mixture.

    At most one of `proportion`, `repeat` and `choose` may be given, and `proportion` by all streams or by none. What is
    ``None`` of the rest is as the `StreamingDataset` says.

    Args:
        remote: Directory or URL where the shards are; ``None`` if all of them are in `local`.
        local: Directory where shards are, or are cached; by default one of the temporary directory.
        split: Sub-directory of both.
        proportion: Share of the samples of an epoch, relative to those of the other streams.
        repeat: How many times each sample is read in an epoch; fractions read a part of them.
        choose: How many samples are read in an epoch.
        download_retry: How many times a download that failed is tried again.
        download_timeout: Seconds for one download.
        validate_hash: Algorithm by which files are checked.
        keep_zip: Whether compressed files are kept beside the decompressed ones.
        storage_options: For fsspec's file system.

    Raises:
        ValueError: If arguments contradict each other.
    """

    remote: str | None = None
    local: str | None = None
    split: str | None = None
    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None
    download_retry: int | None = None
    download_timeout: float | None = None
    validate_hash: str | None = None
    keep_zip: bool | None = None
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _ = self.weight  # checks it
        if self.remote is None and self.local is None:
            raise ValueError("A stream needs `local`, `remote` or both: there is nothing to read.")

    @property
    def directory(self) -> str:
        """Where the shards are cached, or are."""
        local = os.fspath(self.local) if self.local is not None else _temporary(self.remote or "")
        return os.path.join(local, self.split or "")

    @property
    def address(self) -> str | None:
        """Where the shards come from, or ``None``."""
        if self.remote is None:
            return None
        remote = os.fspath(self.remote)
        return f"{remote.rstrip('/')}/{self.split}" if self.split else remote

    @property
    def weight(self) -> Weight:
        """How much of it an epoch reads."""
        return Weight(proportion=self.proportion, repeat=self.repeat, choose=self.choose)

    def with_defaults(self, **defaults: Any) -> Stream:
        """Return this stream with what it leaves open."""
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


def _temporary(remote: str) -> str:
    name = hashlib.blake2b(remote.encode(), digest_size=16).hexdigest()
    return os.path.join(tempfile.gettempdir(), name)

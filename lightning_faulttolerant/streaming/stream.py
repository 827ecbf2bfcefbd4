"""One of the data sets that a streaming data set mixes: its location, and how much of it an epoch reads."""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.streaming.order.mixing import Shares, Weight

Weights = tuple[float | None, float | None, int | None]


@dataclass(kw_only=True, eq=False)
class Stream:
    """One directory of shards, with its own weight in the mixture.

    At most one of `proportion`, `repeat`, and `choose` may be given, and `proportion` by all streams or by none. The
    `StreamingDataset` fills in the others; proportions then add up to 1. Any other argument that is ``None`` gets the
    data set's value.

    Args:
        remote: Directory or URL of the shards; ``None`` if all of them are in `local`.
        local: Directory of the shards, or of their cache; by default a temporary directory with a name derived from
            `remote`.
        split: Subdirectory of both.
        proportion: Share of the samples of an epoch, relative to those of the other streams.
        repeat: How many times each sample is read in an epoch; fractions read a part of them.
        choose: How many samples are read in an epoch.
        download_retry: How many times a failed download is tried again.
        download_timeout: Seconds for one download.
        validate_hash: Hash algorithm to check files with.
        keep_zip: Whether compressed files are kept beside the decompressed ones.
        storage_options: Options of fsspec's file system.

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
    storage_options: Mapping[str, object] | None = None
    _given: Weight | None = field(init=False, repr=False, default=None)
    _resolved: Weights | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        _ = self.weight  # checks it
        if self.remote is None and self.local is None:
            raise ValueError("A stream needs `local`, `remote`, or both. Without them, it has nothing to read.")
        if self.local is None:
            self.local = _temporary(os.fspath(self.remote or ""), self.split or "")

    @property
    def directory(self) -> str:
        """The directory of the shards or of their cache."""
        return os.path.join(os.fspath(self.local or ""), self.split or "")

    @property
    def address(self) -> str | None:
        """The source of the shards, or ``None``."""
        if self.remote is None:
            return None
        remote = os.fspath(self.remote)
        return f"{remote.rstrip('/')}/{self.split}" if self.split else remote

    @property
    def weight(self) -> Weight:
        """How much of it an epoch reads, as given by the user, not as resolved by a data set."""
        if self._given is not None and self._weights() == self._resolved:
            return self._given
        return Weight(proportion=self.proportion, repeat=self.repeat, choose=self.choose)

    def with_defaults(self, **defaults: Any) -> Stream:
        """Return a copy of this stream with its open settings filled in."""
        completed = copy.copy(self)
        for name, value in defaults.items():
            if getattr(completed, name) is None:
                setattr(completed, name, value)
        return completed

    def resolve(self, shares: Shares, number: int) -> None:
        """Set `proportion`, `repeat`, and `choose` to the results of all streams' weights.

        Args:
            shares: The results.
            number: The index of this stream.
        """
        self._given = self.weight
        self.proportion = shares.proportions[number]
        self.repeat = shares.repeats[number]
        self.choose = shares.chosen[number]
        self._resolved = self._weights()

    def _weights(self) -> Weights:
        return self.proportion, self.repeat, self.choose


def _temporary(remote: str, split: str) -> str:
    # The original library's path: its cache may exist there.
    name = hashlib.blake2s(remote.encode(), digest_size=16).hexdigest()
    return os.path.join(tempfile.gettempdir(), name, split)

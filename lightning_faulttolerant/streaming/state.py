"""The state of a streaming data set: a position in the epoch, and everything that its meaning depends on.

It contains nothing about ranks or workers, so it is the same on every rank and can be loaded with another number of
them. It contains no paths: the data may have moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.streaming.format.shard_info import ShardInfo

VERSION = 1
_PLACE = ("epoch", "sample_in_epoch", "shuffle_seed", "num_canonical_nodes")
WHAT = {
    "num_samples": "number of samples",
    "num_shards": "number of shards",
    "num_bytes": "bytes in all shards",
    "samples": "samples of each shard",
    "basenames": "names of the files",
    "sizes": "sizes of the files",
}
"""What each entry of a fingerprint means, by its key."""

Fingerprint = dict[str, object]


def fingerprint(shards: Sequence[ShardInfo]) -> Fingerprint:
    """Return what identifies the data: counts, names, and sizes of the shards in order; a hash, if the index has one.

    Of the hashes that all files have, the first by name is used: data with equally large samples differs in nothing
    else.
    """
    files = [file for shard in shards for file in shard.files]
    algorithms = sorted(set.intersection(*(set(file.hashes) for file in files)) if files else ())
    hashes = {f"{name} of the files": digest(file.hashes[name] for file in files) for name in algorithms[:1]}
    return {
        "num_samples": sum(shard.num_samples for shard in shards),
        "num_shards": len(shards),
        "num_bytes": sum(file.num_bytes for file in files),
        "samples": digest(shard.num_samples for shard in shards),
        "basenames": digest(file.basename for file in files),
        "sizes": digest(file.num_bytes for file in files),
        **hashes,
    }


def digest(values: Iterable[object]) -> str:
    """Return a short string that differs if the values do."""
    return hashlib.blake2b("\0".join(map(str, values)).encode(), digest_size=8).hexdigest()


def checked_place(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the position of a state.

    Raises:
        ValueError: If it is not a state of a streaming data set.
    """
    missing = [key for key in _PLACE if key not in state]
    if missing:
        raise ValueError(
            f"This is not the state of a streaming data set: it lacks {', '.join(missing)}; it has"
            f" {', '.join(map(str, state)) or 'nothing'}. Pass what state_dict() returned."
        )
    if state.get("version", VERSION) > VERSION:
        raise ValueError(f"This state was written by a newer version ({state['version']}); this one knows {VERSION}.")
    epoch, sample = int(state["epoch"]), int(state["sample_in_epoch"])
    # The original library writes this before its first iteration.
    return (0, 0) if epoch < 0 else (epoch, max(0, sample))


def differences(saved: Mapping[str, object], now: Mapping[str, object], what: Mapping[str, str]) -> list[str]:
    """Return the differences between two fingerprints, each with both values."""
    return [
        f"{what.get(key, key)}: {saved[key]} -> {now[key]}" for key in now if key in saved and saved[key] != now[key]
    ]


def mismatch(differing: Sequence[str]) -> FingerprintMismatchError:
    """Return the error that reports a state of other data, or of another order."""
    return FingerprintMismatchError(
        "The state was saved with other data or in another order than this data set has, so its position would mean"
        f" other samples. Saved -> now: {'; '.join(differing)}. Use the data set that saved it, or pass"
        " strict=False to load_state_dict to continue at this position anyway."
    )

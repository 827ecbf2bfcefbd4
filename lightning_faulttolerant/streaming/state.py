"""The state of a streaming data set: a place in the epoch, and what that place's meaning depends on.

It says nothing of ranks or workers, so it is the same on every rank, and it may be loaded with other numbers of them.
Paths are no part of it: the data may have moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.streaming.format.info import ShardInfo

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
"""What a fingerprint says, by its key."""

Fingerprint = dict[str, Any]


def fingerprint(shards: Sequence[ShardInfo]) -> Fingerprint:
    """Return what identifies the data: counts, names, sizes of the shards in their order; a hash, if the index has one.

    Of the hashes that all files have, the first by name counts: data of samples of one size differ in nothing else.
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
    """Return a short text that differs where the values do."""
    return hashlib.blake2b("\0".join(map(str, values)).encode(), digest_size=8).hexdigest()


def checked_place(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return epoch and position of a state.

    Raises:
        ValueError: If it is no state of a streaming data set.
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
    # What the original writes before its first iteration.
    return (0, 0) if epoch < 0 else (epoch, max(0, sample))


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], what: Mapping[str, str]) -> list[str]:
    """Return what differs between two fingerprints, each with both values."""
    return [
        f"{what.get(key, key)}: {saved[key]} -> {now[key]}" for key in now if key in saved and saved[key] != now[key]
    ]


def mismatch(differing: Sequence[str]) -> FingerprintMismatchError:
    """Return the error that says that a state is of other data, or of another order."""
    return FingerprintMismatchError(
        "The state was saved with other data or in another order than this data set has, so its position would mean"
        f" other samples. Saved -> now: {'; '.join(differing)}. Use the data set that saved it, or pass"
        " strict=False to load_state_dict to continue at this position all the same."
    )

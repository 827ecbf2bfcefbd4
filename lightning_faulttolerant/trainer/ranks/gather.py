"""The states of all ranks become one checkpoint, and each rank gets its own state back.

Rank 0's state is kept whole. For the other ranks only the differences from it are kept. Rank 0 sends them digests of
its state, so equal parts are not sent either. Each rank makes the bytes to keep, and rank 0 passes them on unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_faulttolerant.checkpoint.ranks import Ranks, as_bytes, joined, packed_state
from lightning_faulttolerant.checkpoint.schema import (
    KEY,
    NOT_EXACT,
    PICKLED,
    REMARKS,
    CheckpointPart,
    PartHeader,
)
from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.state.objects.saved import contents_of
from lightning_faulttolerant.state.packing import difference, digests_of, pack_blobs, patched, unpack_blobs
from lightning_faulttolerant.state.tensors import buffers_state, with_tensors
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.sections import OwnTimes

LIGHTNINGS = "lightning"
"""The parts of Lightning's checkpoint that may differ between ranks, in the state of a rank."""
BUFFERS = "buffers"
FINGERPRINT = "fingerprint"

_APART = (BUFFERS, LIGHTNINGS, "callbacks", "flags", "trainer")

OPAQUE_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "datamodule_hparams_type")
"""Keys that a resume doesn't need; their values may be any object."""

# The same on every rank: weights are synchronized, even those that WeightAveraging sets aside; loops count together.
_WEIGHTS = ("state_dict", "current_model_state", "optimizer_states")
SHARED = ("epoch", "global_step", "pytorch-lightning_version", "loops", *_WEIGHTS, KEY)


def full_state(
    state: Mapping[str, Any], checkpoint: Mapping[str, object], module: Any, *, buffers: Mapping[str, object] = {}
) -> dict[str, object]:
    """Return a rank's state, including the parts that Lightning would keep for rank 0 only.

    Args:
        state: The state of this rank.
        checkpoint: Lightning's checkpoint at the instant of that state.
        module: The module that the state belongs to.
        buffers: The values of buffers that have changed since.
    """
    found = {**buffers_state(module), **buffers, **state.get(BUFFERS, {})}
    return {**state, LIGHTNINGS: _lightnings(checkpoint), BUFFERS: found}


def gather(
    ranks: Ranks,
    position: TrainerPosition,
    state: Mapping[str, object],
    full: Mapping[str, object],
    header: PartHeader,
    times: OwnTimes | None = None,
) -> dict[str, Any] | None:
    """Return the states of all ranks on rank 0, ready for `part_with`, and ``None`` on the others; a collective.

    Args:
        ranks: The ranks that take part.
        position: Where this rank is; all must be at the same place.
        state: The state of this rank, in the form kept for rank 0.
        full: The same state, from `full_state`.
        header: What this rank says about the run. Rank 0's gets the remarks of all ranks, and why the run is not exact.
        times: What this rank has spent its time on, which travels with the state. Rank 0's hears that of all.

    Raises:
        RanksLostError: If the ranks are at different places, or one of them is gone.
    """
    if ranks.num_ranks == 1:
        return joined([pack_blobs(state)])
    digests = ranks.from_first("digests", digests_of(full) if ranks.rank == 0 else None)
    own = state if ranks.rank == 0 else difference(full, digests)
    packed = with_tensors(pack_blobs(own), lambda one: one.detach().cpu())
    own_times = None if times is None else times.take()
    packed = packed if ranks.rank == 0 else as_bytes(packed)
    gathered = ranks.to_first("state", (position, packed, own_times, (header[NOT_EXACT], header[REMARKS])))
    if gathered is None:
        return None
    elsewhere = {place: str(other) for place, (other, *_) in enumerate(gathered) if other != position}
    if elsewhere:
        raise RanksLostError(f"rank 0 would save {position}, but other ranks are elsewhere: {elsewhere}")
    if times is not None:
        times.hear([seconds for _, _, seconds, _ in gathered])
    header[NOT_EXACT] = list(dict.fromkeys(reason for *_, (reasons, _) in gathered for reason in reasons))
    header[REMARKS] = {text: label for *_, (_, remarks) in gathered for text, label in remarks.items()}
    return joined([kept for _, kept, *_ in gathered])


def state_of(part: CheckpointPart, rank: int, checkpoint: Mapping[str, object]) -> dict[str, Any]:
    """Return the state of a rank; empty if the checkpoint was saved without this rank.

    Args:
        part: Our part of the checkpoint.
        rank: The number of the rank.
        checkpoint: The whole checkpoint.
    """
    if rank >= len(part["ranks"]):
        return {}
    first = unpack_blobs(part["ranks"][0])
    if rank == 0:
        return first
    state = patched({**first, LIGHTNINGS: _lightnings(checkpoint)}, unpack_blobs(packed_state(part, rank)))
    # Rank 0 writes the files, so its list of existing files counts: the others may have looked while it wrote.
    found = first["files"]["checkpoints"]["found"] if "files" in first else None
    return state if found is None else _with_found(state, found)


def kept_apart(part: CheckpointPart, checkpoint: Mapping[str, object]) -> list[str]:
    """Return the names of state that differs from rank 0's on other ranks, and that is not merged.

    Args:
        part: Our part of the checkpoint.
        checkpoint: The whole checkpoint.
    """
    first = {**unpack_blobs(part["ranks"][0]), LIGHTNINGS: _lightnings(checkpoint)}
    names: dict[str, None] = {}
    for rank in range(1, len(part["ranks"])):
        state = state_of(part, rank, checkpoint)
        for kind in _APART:
            names.update(dict.fromkeys(_names(first.get(kind), state.get(kind), "" if kind == LIGHTNINGS else kind)))
        first_objects, objects = changed_objects(first.get("objects")), changed_objects(state.get("objects"))
        names.update(dict.fromkeys(_names(first_objects, objects, depth=1)))
    return sorted(names)


def changed_objects(objects: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the changes on the user's objects that a state holds, by path."""
    return {**contents_of(objects), **objects.get("stores", {})} if objects else {}


def _names(first: object, other: object, path: str = "", depth: int = 2) -> list[str]:
    if digests_of(first) == digests_of(other):
        return []
    if not depth or not isinstance(first, Mapping) or not isinstance(other, Mapping):
        return [path]
    inner = "" if not path else f"{path}."
    keys = {**first, **other}
    return [name for key in keys for name in _names(first.get(key), other.get(key), f"{inner}{key}", depth - 1)]


def _with_found(state: dict[str, Any], found: object) -> dict[str, object]:
    files = state["files"]
    return {**state, "files": {**files, "checkpoints": {**files["checkpoints"], "found": found}}}


def _lightnings(checkpoint: Mapping[str, Any]) -> dict[str, object]:
    found = {key: value for key, value in checkpoint.items() if key not in (*SHARED, *OPAQUE_KEYS)}
    pool = checkpoint.get(KEY, {}).get(PICKLED)
    return {**found, PICKLED: pool} if pool else found

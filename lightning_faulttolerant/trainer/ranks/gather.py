"""The states of all ranks become one checkpoint, and each rank gets its own back.

Rank 0's state is kept whole, of the others only what differs from it: it is told by digests what rank 0 has, so that
what is equal isn't sent either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.state.blobs import pack_blobs, unpack_blobs
from lightning_faulttolerant.state.differences import difference, digests_of, patched
from lightning_faulttolerant.state.objects.object_state import contents_of
from lightning_faulttolerant.state.tensors import buffers_state
from lightning_faulttolerant.trainer.files.parts import KEY, PICKLED
from lightning_faulttolerant.trainer.position import Position
from lightning_faulttolerant.trainer.ranks.group import Ranks

LIGHTNINGS = "lightning"
"""What Lightning's checkpoint of a rank holds that may be another rank's own, in that rank's state."""
BUFFERS = "buffers"
FINGERPRINT = "fingerprint"

_APART = (BUFFERS, LIGHTNINGS, "callbacks", "flags", "trainer")

OPAQUE_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "datamodule_hparams_type")
"""A resume doesn't need these, and they may hold any object."""

# The same on every rank: weights are synchronised, those that WeightAveraging puts aside too, and loops count together.
_WEIGHTS = ("state_dict", "current_model_state", "optimizer_states")
SHARED = ("epoch", "global_step", "pytorch-lightning_version", "loops", *_WEIGHTS, KEY)


def full_state(
    state: Mapping[str, Any], checkpoint: Mapping[str, Any], module: Any, *, buffers: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Return the state of a rank with what Lightning would keep of rank 0 only.

    Args:
        state: Of this rank.
        checkpoint: Lightning's, as it was at the instant of that state.
        module: Whose it is.
        buffers: Those of its buffers that are others now.
    """
    found = {**buffers_state(module), **buffers, **state.get(BUFFERS, {})}
    return {**state, LIGHTNINGS: _lightnings(checkpoint), BUFFERS: found}


def as_captured(
    checkpoint: Mapping[str, Any], instead: Mapping[str, Any] | None, trainer: Trainer
) -> Mapping[str, Any]:
    """Return Lightning's checkpoint with those of its parts that may be a rank's own as they were at a capture."""
    if instead is None:
        return checkpoint
    found = {**checkpoint, "callbacks": instead["callbacks"], "lr_schedulers": instead["schedulers"]}
    precision_key = type(trainer.precision_plugin).__qualname__
    if precision_key in found:
        found[precision_key] = instead["precision"]
    return found


def gather(
    ranks: Ranks, position: Position, state: Mapping[str, Any], full: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Return the packed states of all ranks on rank 0, ``None`` on the others; a collective.

    Args:
        ranks: Who takes part.
        position: Where this one is; all must be at the same place.
        state: Of this rank, as it is kept of rank 0.
        full: The same by `full_state`.

    Raises:
        RanksLostError: If the ranks are at different places, or one of them is gone.
    """
    if ranks.num_ranks == 1:
        return [pack_blobs(state)]
    digests = ranks.from_first("digests", digests_of(full) if ranks.rank == 0 else None)
    own = state if ranks.rank == 0 else difference(full, digests)
    told = ranks.to_first("state", (position, on_cpu(pack_blobs(own))))
    if told is None:
        return None
    elsewhere = {place: str(other) for place, (other, _) in enumerate(told) if other != position}
    if elsewhere:
        raise RanksLostError(f"rank 0 would save {position}, but these are elsewhere: {elsewhere}")
    return [packed for _, packed in told]


def state_of(part: Mapping[str, Any], rank: int, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank; nothing if the checkpoint was saved by another rank alone.

    Args:
        part: Our part of the checkpoint.
        rank: Which.
        checkpoint: The whole.
    """
    packed: Sequence[Mapping[str, Any]] = part["ranks"]
    if rank >= len(packed):
        return {}
    first = unpack_blobs(packed[0])
    if rank == 0:
        return first
    state = patched({**first, LIGHTNINGS: _lightnings(checkpoint)}, unpack_blobs(packed[rank]))
    # Which files there were is rank 0's to say, who writes them: the others may have looked while it did.
    found = first["files"]["checkpoints"]["found"] if "files" in first else None
    return state if found is None else _with_found(state, found)


def kept_apart(part: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the names of what other ranks have otherwise than rank 0, and nobody merges.

    Args:
        part: Our part of the checkpoint.
        checkpoint: The whole.
    """
    first = {**unpack_blobs(part["ranks"][0]), LIGHTNINGS: _lightnings(checkpoint)}
    names: dict[str, None] = {}
    for rank in range(1, len(part["ranks"])):
        state = state_of(part, rank, checkpoint)
        # A buffer of the state_dict is in it only if it differs.
        names.update(dict.fromkeys(f"{BUFFERS}.{name}" for name in state[BUFFERS].keys() - first[BUFFERS].keys()))
        for kind in _APART:
            names.update(dict.fromkeys(_names(first.get(kind), state.get(kind), "" if kind == LIGHTNINGS else kind)))
        first_objects, objects = _contents(first.get("objects")), _contents(state.get("objects"))
        names.update(dict.fromkeys(_names(first_objects, objects, depth=1)))
    return sorted(names)


def _contents(objects: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**contents_of(objects), **objects.get("stores", {})} if objects else {}


def _names(first: Any, other: Any, path: str = "", depth: int = 2) -> list[str]:
    if digests_of(first) == digests_of(other):
        return []
    if not depth or not isinstance(first, Mapping) or not isinstance(other, Mapping):
        return [path]
    inner = "" if not path else f"{path}."
    keys = {**first, **other}
    return [name for key in keys for name in _names(first.get(key), other.get(key), f"{inner}{key}", depth - 1)]


def _with_found(state: dict[str, Any], found: Any) -> dict[str, Any]:
    files = state["files"]
    return {**state, "files": {**files, "checkpoints": {**files["checkpoints"], "found": found}}}


def _lightnings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in checkpoint.items() if key not in (*SHARED, *OPAQUE_KEYS)}
    pool = checkpoint.get(KEY, {}).get(PICKLED)
    return {**found, PICKLED: pool} if pool else found


def on_cpu(state: Any) -> Any:
    """Return `state` with its tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_cpu(value) for value in state]
    return state

"""The states of the ranks in one checkpoint: that of rank 0 as it is, those of the others as separate bytes.

Each rank makes its bytes, with their checksum. Rank 0 passes them on as they are, and a rank that resumes reads only
its own. All bytes are one tensor, so the cost of writing and loading them does not grow with the number of ranks.

A state that ``weights_only=True`` would refuse stays as it is: whoever reads the file decides whether to load it.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.checkpoint.atomic import save_to_file
from lightning_faulttolerant.checkpoint.schema import DATA, INDEX, RANKS, STATES
from lightning_faulttolerant.checkpoint.verify import unsafe_paths
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.state.packing import tensor_to_blob

_ONLY = "only"


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The state of a rank as bytes.

    Args:
        data: A file of ``torch.save``.
        crc32: Its checksum, from the rank that made it.
    """

    data: bytes
    crc32: int


def as_bytes(state: dict[str, Any]) -> StateBytes | dict[str, Any]:
    """Return a rank's state as bytes, or unchanged if ``weights_only=True`` would not load it.

    Args:
        state: A result of `pack_blobs`, with its tensors on the CPU.
    """
    if unsafe_paths(state):
        return state
    buffer = io.BytesIO()
    save_to_file(state, buffer)
    data = buffer.getvalue()
    return StateBytes(data, zlib.crc32(data))


def joined(states: Sequence[StateBytes | dict[str, Any]]) -> dict[str, Any]:
    """Return the states of all ranks in the form that our part of a checkpoint keeps.

    Args:
        states: One for each rank.

    Returns:
        Under ``ranks`` each state that is not bytes, with ``None`` for the others; the others under `STATES`.
    """
    kept = [None if isinstance(state, StateBytes) else state for state in states]
    found = [state if isinstance(state, StateBytes) else StateBytes(b"", 0) for state in states]
    data = bytearray(b"").join(state.data for state in found)
    if not data:
        return {RANKS: kept}
    index = torch.tensor([[len(state.data), state.crc32] for state in found], dtype=torch.int64, device="cpu")
    return {RANKS: kept, STATES: {INDEX: index, DATA: torch.frombuffer(data, dtype=torch.uint8)}}


def packed_state(part: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the state of a rank, a result of `pack_blobs`.

    Args:
        part: Our part of a checkpoint, of any version of the schema.
        rank: The number of the rank, less than the number of ranks that saved.

    Raises:
        DamagedCheckpointError: If its bytes are not those that the rank had made.
    """
    kept: dict[str, Any] | None = part[RANKS][rank]
    if kept is not None:
        return kept
    data = _bytes_of(part, rank)
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def check(part: Mapping[str, Any], rank: int) -> None:
    """Check that the bytes of a rank are those that it had made. Do nothing if its state is kept as it is.

    Raises:
        DamagedCheckpointError: If they are not.
    """
    if part[RANKS][rank] is None:
        _bytes_of(part, rank)


def with_state_of(part: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return our part of a checkpoint with the bytes of one rank only, copied.

    Args:
        part: Our part of a checkpoint. The bytes of other ranks are not read.
        rank: The number of the rank.
    """
    states = part[STATES]
    begin, num_bytes = _place_of(states[INDEX], rank)
    return {**part, STATES: {**states, DATA: states[DATA][begin : begin + num_bytes].clone(), _ONLY: rank}}


def _place_of(index: Tensor, rank: int) -> tuple[int, int]:
    return int(index[:rank, 0].sum()), int(index[rank, 0])


def _bytes_of(part: Mapping[str, Any], rank: int) -> bytes:
    states = part[STATES]
    index, data, only = states[INDEX], states[DATA], states.get(_ONLY)
    if only is not None and only != rank:
        raise ValueError(f"The state of rank {rank} was not read: only that of rank {only} was.")
    begin, num_bytes = _place_of(index, rank)
    begin = begin if only is None else 0
    own = tensor_to_blob(data[begin : begin + num_bytes])
    crc32, expected = zlib.crc32(own), int(index[rank, 1])
    if len(own) != num_bytes or crc32 != expected:
        raise DamagedCheckpointError(
            f"The state of rank {rank} is damaged: it has {len(own)} bytes with CRC32 {crc32:08x}, but was made with "
            f"{num_bytes} bytes and {expected:08x}. Take another checkpoint."
        )
    return own

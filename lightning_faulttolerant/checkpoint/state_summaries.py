"""Summarize the states that a checkpoint keeps as bytes, without loading them."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import IO

from lightning_faulttolerant.checkpoint.described import TensorInfo
from lightning_faulttolerant.checkpoint.schema import DATA, INDEX, KEY, states_in
from lightning_faulttolerant.checkpoint.summary import Summary, begin_of, read_summary
from lightning_faulttolerant.errors import DamagedCheckpointError

_ROW = struct.Struct("<2q")


def read_state_summaries(file: IO[bytes], summary: Summary, *, name: str) -> dict[int, Summary]:
    """Read the summary of each state that is kept as bytes.

    Args:
        file: The file of the checkpoint.
        summary: Its summary.
        name: Its name for errors.

    Returns:
        The summaries by the number of the rank; empty if no state is kept as bytes.

    Raises:
        DamagedCheckpointError: If one of them is damaged.
        CheckpointError: As `read_summary`.
        OSError: If the file can't be read.
    """
    content = summary.content
    states = states_in(content.get(KEY) if isinstance(content, Mapping) else None)
    if states is None or not all(isinstance(states[key], TensorInfo) for key in (INDEX, DATA)):
        return {}
    index, data = states[INDEX].storage.key, states[DATA].storage.key
    found = {}
    try:
        file.seek(begin_of(file, summary, index))
        rows = list(_ROW.iter_unpack(file.read(summary.storages[index])))
        file.seek(begin_of(file, summary, data))
        for rank, (num_bytes, _) in enumerate(rows):
            if not 0 <= num_bytes <= summary.num_bytes:
                raise ValueError(f"the state of rank {rank} has {num_bytes} bytes")
            if num_bytes:
                own = io.BytesIO(file.read(num_bytes))
                found[rank] = read_summary(own, name=f"the state of rank {rank} in {name}")
    except (ValueError, struct.error) as error:
        raise DamagedCheckpointError(f"{name} is damaged: {error}. Take another checkpoint.") from error
    return found

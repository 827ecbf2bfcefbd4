"""The ranks' states before the step of an incident, which reach rank 0 as files next to the incident.

No rank knows whether the others have noticed the incident, so nothing here is a collective: each rank leaves its state,
and rank 0 takes what comes within a time limit. If one does not come, no state is written, and training continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, final

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.checkpoint.ranks import StateBytes
from lightning_faulttolerant.errors import CheckpointError, RanksLostError
from lightning_faulttolerant.records.incidents import incident_name
from lightning_faulttolerant.storage.store import Store, open_file
from lightning_faulttolerant.trainer.position import TrainerPosition

WAIT_SECONDS = 10.0
"""How long rank 0 waits for the states of the others, and they for its report."""
_POLL_SECONDS = 0.02


def all_notice(trainer: Trainer) -> bool:
    """Return whether a gradient that is not finite on this rank is so on each rank: DDP has averaged it.

    Not if gradients are accumulated without being exchanged, nor if an optimizer exchanges its own state to save it.
    """
    model = trainer.strategy.model
    exchanges = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)
    return isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync and not exchanges


@final
class StatesOnDisk:
    """The ranks of one incident, for code that gathers their states.

    Args:
        store: The directory of the incidents of the fit.
        step: The step of the incident.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        token: What only the ranks of this start know: a file of an earlier start counts for nothing.
    """

    def __init__(self, store: Store, step: int, *, rank: int, num_ranks: int, token: str) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._step = step
        self._token = token

    def label(self, rank: int) -> str:
        """Return a rank's name for messages."""
        return f"rank {rank}"

    def to_all(self, step: str, value: object) -> list[object]:
        """Not possible: files only go to rank 0.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(step)

    def from_first(self, step: str, value: object) -> object:
        """Return nothing on each rank: rank 0 sends no digests, so the others leave their whole states."""
        return {}

    def to_first(self, step: str, value: Any) -> list[object] | None:
        """Leave this rank's state; on rank 0, return those of all ranks in order.

        Args:
            step: What is gathered.
            value: The position, the state, and times that only an autosave needs.

        Raises:
            RanksLostError: On rank 0, if one does not come in time.
            CheckpointError: If the state holds an object that ``weights_only=True`` would refuse.
        """
        position, state, _ = value
        if self.rank == 0:
            deadline = time.monotonic() + WAIT_SECONDS
            others = [self._state_of(rank, deadline) for rank in range(1, self.num_ranks)]
            return [(position, state, None), *others]
        if not isinstance(state, StateBytes):
            raise CheckpointError("the state of this rank holds an object that torch.load refuses")
        header = {"token": self._token, "crc32": state.crc32, "position": asdict(position)}
        with self._store.writer(self._file_of(self.rank)) as file:
            file.write(json.dumps(header).encode() + b"\n" + state.data)
        return None

    def _state_of(self, rank: int, deadline: float) -> tuple[TrainerPosition, StateBytes, None]:
        path = self._store.path(self._file_of(rank))
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError, ValueError, KeyError), open_file(path) as file:
                header, data = json.loads(file.readline()), file.read()
                if header["token"] == self._token:
                    return TrainerPosition(**header["position"]), StateBytes(data, header["crc32"]), None
            time.sleep(_POLL_SECONDS)
        raise RanksLostError(f"the state of rank {rank} did not come within {WAIT_SECONDS:g} seconds")

    def _file_of(self, rank: int) -> str:
        return incident_name(self._step, rank=rank, kind="state")

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within the block, this rank's file may exist; afterwards it doesn't."""
        try:
            yield
        finally:
            if self.rank:
                with suppress(OSError):
                    self._store.delete(self._file_of(self.rank))

    def wait_for(self, name: str) -> bytes | None:
        """Return the content of a file that rank 0 writes; ``None`` if it does not come in time.

        Args:
            name: The name of the file.
        """
        deadline = time.monotonic() + 2 * WAIT_SECONDS
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError), open_file(self._store.path(name)) as file:
                return file.read()
            time.sleep(_POLL_SECONDS)
        return None

    def close(self) -> None:
        """Do nothing."""

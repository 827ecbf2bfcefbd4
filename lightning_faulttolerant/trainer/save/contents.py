"""What is in a checkpoint of a fit: what Lightning dumps, and our part with the states of all ranks."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from lightning_faulttolerant.checkpoint.opaque import Packed, pack
from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.checkpoint.schema import KEY, PICKLED, CheckpointPart, Instead, PartHeader, part_with
from lightning_faulttolerant.checkpoint.verify import unsafe_paths
from lightning_faulttolerant.state.packing import blob_to_tensor
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, OPAQUE_KEYS, as_captured, full_state, gather
from lightning_faulttolerant.trainer.ranks.sharded import (
    IN_SHARDS,
    WITHOUT_STATE,
    Replicas,
    left_alone,
    make_loadable,
    without_state,
)
from lightning_faulttolerant.trainer.run.own_times import OwnTimes
from lightning_faulttolerant.trainer.save.hook_saves import HookSave
from lightning_faulttolerant.trainer.save.run_state import TITLES, Capture, RunState, put_instead

_log = logging.getLogger(__name__)


class CheckpointContents:
    """Creates the checkpoints of one fit.

    Args:
        run_state: Reads the state that Lightning's checkpoint lacks.
        ranks: The ranks that save together. Each method is a collective.
        header: Returns what every checkpoint of this fit says about it: origin, fingerprint, surroundings.
        times: The times of this rank.
        strict: Whether the ranks must have the same parameters.
        is_sharded: Whether each rank saves its own part.
    """

    def __init__(
        self,
        run_state: RunState,
        ranks: Ranks,
        header: Callable[[], PartHeader],
        times: OwnTimes,
        *,
        strict: bool,
        is_sharded: bool,
    ) -> None:
        self._trainer = run_state.trainer
        self._run_state = run_state
        self._ranks = ranks
        self._header = header
        self._times = times
        self._is_sharded = is_sharded
        self._replicas = Replicas(self._trainer, ranks, strict=strict)
        self.packed = Packed({}, {}, [], {})
        """The objects of the last checkpoint."""
        self.is_dumping = False
        """Whether Lightning dumps its checkpoint for this one."""

    def put_part(self, checkpoint: dict[str, object], save: HookSave) -> None:
        """Put our part into a checkpoint that other code saves; a collective, unless one rank saves alone."""
        self._run_state.files.flush()
        ranks = Alone(rank=self._ranks.rank) if save.is_of_one_rank else self._ranks
        inexact = save.inexact if save.is_of_one_rank else (*save.inexact, *self._replicas.why_not_exact())
        part = self._part_of_all(ranks, save.position, save.state, checkpoint, save.instead)
        if part is not None:
            checkpoint[KEY] = part
            part["behind"], part["inexact"] = list(save.pending), list(inexact)
            if save.instead is not None:
                part["instead"] = {**save.instead}
            if save.before_validation is not None:
                part["before_validation"] = dict(save.before_validation)

    def own_state(self, position: TrainerPosition) -> dict[str, Any]:
        """Return the state of this instant, without the parts that Lightning's checkpoint has."""
        return self._times.timed(lambda: self._run_state.state_dict(position))  # type: ignore[no-any-return]

    def gathered(
        self, position: TrainerPosition, state: Mapping[str, object], capture: Capture | None = None
    ) -> dict[str, Any]:
        """Return the whole checkpoint on rank 0, else an empty one; if the strategy shards, each rank's own part."""
        self._replicas.check()
        self.is_dumping = True
        try:
            with left_alone(self._trainer, without_state(self._trainer)):
                checkpoint = self._times.timed(lambda: compat.dump_checkpoint(self._trainer))
        finally:
            self.is_dumping = False
        make_loadable(self._trainer, checkpoint)
        opaque = {key: checkpoint.pop(key) for key in OPAQUE_KEYS if key in checkpoint}
        if capture is not None:
            put_instead(checkpoint, capture.instead(), position, self._trainer)
        packed = pack(checkpoint, leave=IN_SHARDS if self._is_sharded else ())
        self.packed = Packed({}, *packed[1:])  # without the checkpoint, which need not stay in memory
        own = {KEY: {PICKLED: packed.pool}} if packed.pool else {}
        part = self._part_of_all(self._ranks, position, state, {**packed.checkpoint, **own}, times=self._times)
        if part is None:
            return packed.checkpoint if self._is_sharded else {}
        safe = {key: value for key, value in opaque.items() if not unsafe_paths({key: value})}
        rest = {key: _pickled(key, value) for key, value in opaque.items() if key not in safe}
        part["opaque"] = {key: blob_to_tensor(blob) for key, blob in rest.items() if blob is not None}
        return {**packed.checkpoint, **safe, KEY: {**part, **own.get(KEY, {})}}

    def _part_of_all(
        self,
        ranks: Ranks,
        position: TrainerPosition,
        state: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        instead: Instead | None = None,
        times: OwnTimes | None = None,
    ) -> CheckpointPart | None:
        """Return our part of a checkpoint on rank 0, and ``None`` on the others."""
        header = self._header()
        if ranks.num_ranks > 1:
            state = {**state, FINGERPRINT: header["fingerprint"]["loaders"]}
        checkpoint = as_captured(checkpoint, instead, self._trainer)
        buffers = {} if instead is None else instead["buffers"]
        full = full_state(state, checkpoint, self._trainer.lightning_module, buffers=buffers)
        states = gather(ranks, position, state, full, times)
        if states is None:
            return None
        world_size = self._trainer.world_size
        part = part_with(header, world_size=world_size, position=position.state_dict(), states=states)
        part["parts"], part[WITHOUT_STATE] = list(TITLES), without_state(self._trainer)
        return part


def _pickled(key: str, value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        _log.warning("%s can't be pickled and is left out of the autosaves; a resume doesn't need it: %s", key, error)
        return None

"""What is in a checkpoint of a fit: what Lightning dumps, and our part with the states of all ranks.

Other code saves checkpoints inside a fit, too. A run can resume exactly from between two batches and from the start of
a validation run. It can also resume exactly from the end of a batch, a validation run, or an epoch if Lightning's own
loops can do the work that is still owed. So a checkpoint from the middle of a batch or of a validation run takes the
state of its start. It can't be exact if parameters have moved since, or if later hooks of the same event need arguments
that are gone.

User code may add data to a checkpoint that depends on the instant of the write. If such hooks have nothing to save
before the first batch, the first autosave waits for that batch.
"""

from __future__ import annotations

import logging
import pickle
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, SpikeDetection, ThroughputMonitor

from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.checkpoint.schema import (
    KEY,
    PICKLED,
    REWRITTEN,
    CheckpointPart,
    Instead,
    PartHeader,
    part_with,
)
from lightning_faulttolerant.checkpoint.trust import Packed, pack
from lightning_faulttolerant.checkpoint.verify import unsafe_paths
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state.packing import blob_to_tensor
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.bases import is_lightnings
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import (
    is_lightnings_function,
    is_our_function,
    is_users_function,
    overridden,
)
from lightning_faulttolerant.trainer.position import (
    BATCH_END,
    EPOCH_END,
    EPOCH_START,
    FINISHED,
    VALIDATION_END,
    TrainerPosition,
    position_of,
)
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, OPAQUE_KEYS, full_state, gather
from lightning_faulttolerant.trainer.ranks.sharded import (
    IN_SHARDS,
    WITHOUT_STATE,
    Replicas,
    left_alone,
    make_loadable,
    without_shards,
    without_state,
)
from lightning_faulttolerant.trainer.resume.loaded import rewritten_in, sums_of_states, sums_of_weights
from lightning_faulttolerant.trainer.resume.schedulers import SCHEDULERS
from lightning_faulttolerant.trainer.save.capture import Capture, put_instead
from lightning_faulttolerant.trainer.save.lightnings import as_captured
from lightning_faulttolerant.trainer.save.run_state import RunState, named_callbacks
from lightning_faulttolerant.trainer.sections import OwnTimes

_log = logging.getLogger(__name__)

_OURS = "lightning_faulttolerant."


def overrides_save_hook(trainer: Trainer) -> bool:
    """Return whether the module or a user's callback has an ``on_save_checkpoint``, or the data module a state."""
    if type(trainer.lightning_module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
        return True
    module = compat.datamodule(trainer)
    if module is not None and type(module).state_dict is not LightningDataModule.state_dict:
        return True  # it has no on_save_checkpoint that Lightning calls
    # A hook that a user's class inherits from Lightning is Lightning's. A LambdaCallback has its hook on the instance.
    modules = [callback.on_save_checkpoint.__module__ for callback in compat.callbacks(trainer)]
    return any(not is_lightnings(module) and not module.startswith(_OURS) for module in modules)


_HOOKS = ("on_save_checkpoint", "state_dict")


def can_wait(error: Exception, trainer: Trainer, position: TrainerPosition) -> bool:
    """Return whether the first save is put off, and report it: without us, such a hook first runs after a step.

    Args:
        error: The error that the save raised.
        trainer: The trainer that runs the fit. With several ranks a save is not put off: it may have failed on this
            rank alone.
        position: The position of the first boundary.
    """
    if trainer.world_size > 1 or position.global_step or position.batch or isinstance(error, NotExactError):
        return False
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    hook = next((name for name in _HOOKS if name in names), None)
    if hook is None:
        return False
    tell(
        f"{hook} can't be called before the first batch: it raised {error!r}. The first autosave comes after that "
        "batch. If the run is interrupted before, it starts again from the beginning."
    )
    return True


MODULE = "module"
_PLACES = {
    "on_train_epoch_start": EPOCH_START,
    "on_train_batch_end": BATCH_END,
    "on_validation_end": VALIDATION_END,
    "on_train_epoch_end": EPOCH_END,
    "on_train_end": FINISHED,
    "on_fit_end": FINISHED,
    "teardown": FINISHED,
}
# Called with an outcome and a batch, which are gone when a run continues. Two of Lightning's own callbacks read them.
_WITH_BATCH = ("on_train_batch_end",)
_LOOKS_AT_BATCHES = (SpikeDetection, ThroughputMonitor)
# A run that continues after its end does not call these again.
_NOT_AGAIN = ("on_train_end", "on_fit_end", "teardown")
_SAVES = "save_checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class HookSave:
    """Our part of a checkpoint that other code saves.

    Args:
        position: The position at which the run continues.
        state: The state at that position; empty if there is none.
        pending: Names of the callbacks, and of the module, with a hook that still has to be called.
        inexact: Why the run can't continue exactly.
        instead: Values that replace parts of Lightning's checkpoint on a resume.
        is_of_one_rank: Whether this rank saves alone. The other ranks may not save now, so their states are missing.
    """

    position: TrainerPosition
    state: Mapping[str, Any]
    pending: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    instead: Instead | None = None
    is_of_one_rank: bool = False


class HookSaves:
    """Creates our part of the checkpoints that other code saves in one fit.

    Args:
        trainer: The trainer that runs the fit.
        run_state: Reads the state of the fit.
    """

    def __init__(self, trainer: Trainer, run_state: RunState) -> None:
        self._trainer = trainer
        self._run_state = run_state
        self._warned_of: set[str] = set()
        self.wants_captures = _saves_in_a_batch(trainer)
        """Whether each boundary needs a capture, because other code saves in the middle of batches."""

    def make(self, hook: str, saver: Callback | None, capture: Capture | None) -> HookSave:
        """Return our part of a checkpoint that is saved now.

        Args:
            hook: The hook that runs.
            saver: The callback that the hook belongs to; ``None`` for the module.
            capture: The last capture, if any.
        """
        save = self._made(hook, saver, capture)
        if hook == "on_exception" and self._trainer.world_size > 1:
            lost = "an exception ended this rank, and the checkpoint lacks the states of the other ranks"
            save = replace(save, inexact=(*save.inexact, lost), is_of_one_rank=True)
        if save.inexact and hook not in self._warned_of:
            self._warned_of.add(hook)
            reasons = "; ".join(save.inexact)
            _log.warning("A checkpoint saved in %s can't be resumed exactly: %s.", hook or "a call", reasons)
        return save

    def _made(self, hook: str, saver: Callback | None, capture: Capture | None) -> HookSave:
        where = None if self._trainer.sanity_checking else _PLACES.get(hook)
        if where is None and capture is not None:
            return self._from_capture(hook, capture)
        if where is None:
            position = position_of(self._trainer, hook or "a call", hook)
            return HookSave(position=position, state={}, inexact=("it was saved before the first batch",))
        position = position_of(self._trainer, where, hook)
        pending, lost = self._pending(hook, saver)
        return HookSave(
            position=position,
            state=self._run_state.state_dict(position),
            pending=tuple(pending),
            inexact=tuple(f"{name} comes after the hook that saved, and can't be called again" for name in lost),
        )

    def _from_capture(self, hook: str, capture: Capture) -> HookSave:
        inexact = []
        if not capture.is_current(self._trainer):
            self.wants_captures = True
            inexact.append(f"parameters have changed since the other state was captured, {capture.position}")
        if overrides_save_hook(self._trainer):
            adds = "what on_save_checkpoint, or the data module's state_dict, adds"
            inexact.append(f"{adds} is of a later time than the other state, which was captured {capture.position}")
        kept = capture.position
        position = replace(kept, hook=hook or "a call")
        return HookSave(position=position, state=capture.state, inexact=tuple(inexact), instead=capture.instead)

    def _pending(self, hook: str, saver: Callback | None) -> tuple[list[str], list[str]]:
        """Return the owners of the hooks to call after the saving one, and the hooks that can't be called again."""
        module = self._trainer.lightning_module
        named = named_callbacks(compat.callbacks(self._trainer))
        order: list[tuple[str, object]] = [*named.items(), (MODULE, module)]
        if hook == "on_train_epoch_end":  # here Lightning calls callbacks that watch a metric last
            order.sort(key=lambda item: isinstance(item[1], (EarlyStopping, Checkpoint)))
        own = next(i for i, (_, owner) in enumerate(order) if owner is (module if saver is None else saver))
        pending, lost = [], []
        if self._run_state.files.saves_in_its_hook(saver):
            name, function = order[own][0], overridden(saver, hook)
            pending += [name] if is_lightnings_function(function) else []
            lost += [] if is_lightnings_function(function) else [f"the rest of {type(saver).__name__}.{hook}"]
        for name, owner in order[own + 1 :]:
            function = overridden(owner, hook)
            if function is None or is_our_function(function):
                continue
            is_lightnings = is_lightnings_function(function)
            if hook in _WITH_BATCH:
                can_be_called = is_lightnings and not isinstance(owner, _LOOKS_AT_BATCHES)
            else:
                can_be_called = is_lightnings or hook not in _NOT_AGAIN
            if not can_be_called:
                lost.append(f"{type(owner).__name__}.{hook}")
            elif hook not in _NOT_AGAIN:
                pending.append(name)
        return pending, lost


def _saves_in_a_batch(trainer: Trainer) -> bool:
    """Return whether the module or a callback has a method that saves a checkpoint and may run inside a batch.

    Only the names in the method's own code are checked. A method that saves indirectly is noticed when it does so.
    """
    owners = [trainer.lightning_module, *compat.callbacks(trainer)]
    return any(
        _SAVES in function.__code__.co_names and name not in _PLACES and not name.startswith("on_validation")
        for owner in owners
        for kind in (*type(owner).__mro__, owner)
        for name, function in list(getattr(kind, "__dict__", {}).items())
        if type(function) is types.FunctionType and is_users_function(function)
    )


class CheckpointContents:
    """Creates the checkpoints of one fit.

    Args:
        run_state: Reads the state that Lightning's checkpoint lacks.
        ranks: The ranks that save together. Each method is a collective.
        header: Returns what a checkpoint of this fit with a state of this rank says about it.
        times: The times of this rank.
        strict: Whether the ranks must have the same parameters.
        is_sharded: Whether each rank saves its own part.
    """

    def __init__(
        self,
        run_state: RunState,
        ranks: Ranks,
        header: Callable[[Mapping[str, Any]], PartHeader],
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
        dumped = self._run_state.left_out.take_dumped()
        self._run_state.files.flush()
        ranks = Alone(rank=self._ranks.rank) if save.is_of_one_rank else self._ranks
        inexact = save.inexact if save.is_of_one_rank else (*save.inexact, *self._replicas.why_not_exact())
        # Hooks that come later may drop weights. Storages that the file has twice are written once.
        has_hooks = overrides_save_hook(self._trainer)
        captured = {} if save.instead is None else save.instead["buffers"]
        state = self._run_state.with_left_out(save.state, {} if has_hooks else checkpoint, captured)
        states = checkpoint.get("lr_schedulers", [])
        if save.instead is None and (plain := self._run_state.schedulers.plain(states)) is not states:
            state = {**state, SCHEDULERS: plain}
        part = self._part_of_all(ranks, save.position, state, checkpoint, save.instead)
        if part is not None:
            checkpoint[KEY] = part
            part["pending"], part["inexact"] = list(save.pending), list(inexact)
            is_sharded = has_shards(self._trainer.strategy)
            part["sums"] = sums_of_states(without_shards(dumped) if is_sharded else dumped)
            hooks = (overridden(one, "on_save_checkpoint") for one in compat.callbacks(self._trainer))
            if not (has_hooks or is_sharded) and all(one is None or is_our_function(one) for one in hooks):
                part["sums"] = {**part["sums"], **sums_of_weights(dumped)}  # only a CheckpointIO comes after it
            if save.instead is not None:
                part["instead"] = {**save.instead}

    def own_state(self, position: TrainerPosition, *, strict: bool = False) -> dict[str, object]:
        """Return the state of this instant, without the parts that Lightning's checkpoint has; `strict` as there."""
        return self._times.timed(lambda: self._run_state.state_dict(position, strict=strict))

    def gathered(
        self,
        position: TrainerPosition,
        state: Mapping[str, object],
        capture: Capture | None = None,
        ranks: Ranks | None = None,
    ) -> dict[str, Any]:
        """Return the whole checkpoint on rank 0, else an empty one; if the strategy shards, each rank's own part.

        It is a collective, unless `ranks` are given, which then gather the states.
        """
        times = self._times if ranks is None else None
        if ranks is None:
            self._replicas.check()
        self.is_dumping = True
        try:
            with left_alone(self._trainer, without_state(self._trainer)):
                has_hooks = overrides_save_hook(self._trainer)
                checkpoint = self._times.timed(lambda: self._run_state.left_out.dump(has_hooks=has_hooks))
        finally:
            self.is_dumping = False
        rewritten = rewritten_in(checkpoint, self._trainer)
        checkpoint["lr_schedulers"] = self._run_state.schedulers.plain(checkpoint["lr_schedulers"])
        make_loadable(self._trainer, checkpoint)
        opaque = {key: checkpoint.pop(key) for key in OPAQUE_KEYS if key in checkpoint}
        if capture is not None:
            put_instead(checkpoint, capture.instead, position, self._trainer)
        packed = pack(checkpoint, leave=IN_SHARDS if self._is_sharded else ())
        self.packed = Packed({}, *packed[1:])  # without the checkpoint, which need not stay in memory
        own = {KEY: {PICKLED: packed.pool}} if packed.pool else {}
        content = {**packed.checkpoint, **own}
        state = self._run_state.with_left_out(state, checkpoint)
        part = self._part_of_all(ranks or self._ranks, position, state, content, times=times)
        if part is None:
            return packed.checkpoint if self._is_sharded else {}
        safe = {key: value for key, value in opaque.items() if not unsafe_paths({key: value})}
        rest = {key: _pickled(key, value) for key, value in opaque.items() if key not in safe}
        part[REWRITTEN] = rewritten
        part["opaque"] = {key: blob_to_tensor(blob) for key, blob in rest.items() if blob is not None}
        return {**packed.checkpoint, **safe, KEY: {**part, **own.get(KEY, {})}}

    def _part_of_all(
        self,
        ranks: Ranks,
        position: TrainerPosition,
        state: Mapping[str, object],
        checkpoint: Mapping[str, object],
        instead: Instead | None = None,
        times: OwnTimes | None = None,
    ) -> CheckpointPart | None:
        """Return our part of a checkpoint on rank 0, and ``None`` on the others."""
        header = self._header(state)
        if ranks.num_ranks > 1:
            state = {**state, FINGERPRINT: header["fingerprint"]["loaders"]}
        checkpoint = as_captured(checkpoint, instead, self._trainer)
        buffers = {} if instead is None else instead["buffers"]
        full = full_state(state, checkpoint, self._trainer.lightning_module, buffers=buffers)
        states = gather(ranks, position, state, full, header, times)
        if states is None:
            return None
        world_size = self._trainer.world_size
        part = part_with(header, world_size=world_size, position=position.state_dict(), states=states)
        part[WITHOUT_STATE] = without_state(self._trainer)
        return part


def _pickled(key: str, value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        _log.warning("%s can't be pickled and is left out of the autosaves; a resume doesn't need it: %s", key, error)
        return None

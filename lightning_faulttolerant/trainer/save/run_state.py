"""The state of a run that Lightning does not save: `PARTS` lists what it consists of.

Gradients are part of the state at a boundary if they outlive their step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.metrics import load_metrics, metrics_state
from lightning_faulttolerant.state.objects.object_state import LOST
from lightning_faulttolerant.state.objects.walk import users_variables
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from lightning_faulttolerant.state.tensors import (
    buffers_of,
    buffers_state,
    flags_state,
    gradients_state,
    kinds_of_buffers,
    load_buffers,
    load_flags,
    load_gradients,
    make_room,
    weights_of,
)
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.logged_results import load_results, results_state
from lightning_faulttolerant.trainer.adapters.state import (
    callbacks_state,
    load_callbacks,
    load_shown,
    shown_state,
)
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.objects.objects import Objects
from lightning_faulttolerant.trainer.position import (
    EPOCH_END,
    EPOCH_START,
    EVALUATED,
    FINISHED,
    IN_EVALUATION,
    IN_VALIDATION,
    TrainerPosition,
)
from lightning_faulttolerant.trainer.process import OBJECTS, Registered, is_manual
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.sharded import reshard
from lightning_faulttolerant.trainer.resume.schedulers import Schedulers
from lightning_faulttolerant.trainer.save.left_out import LeftOut
from lightning_faulttolerant.trainer.settings import Options

VALIDATION_RUN = "validation"
"""The part of a checkpoint from inside a validation run, or from an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moment:
    """The instant at which a state is read.

    Args:
        where: The place in the run.
        is_iterating: Whether the next batch comes from the iterators that the training loaders have here.
        is_evaluating: Whether a validation run or an evaluation is in progress.
        has_gradients: Whether gradients are part of the state.
        strict: Whether what a checkpoint can't carry is an error.
        state: The parts that have been read.
    """

    where: str
    is_iterating: bool
    is_evaluating: bool
    has_gradients: bool
    strict: bool
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a run's state.

    Args:
        name: Its key in a checkpoint.
        title: Its name in reports; empty if they don't mention it.
        state_dict: Reads it.
        load_state_dict: Restores it from a state that has it, and may return the names of what no longer exists;
            ``None`` if it is restored elsewhere.
        is_of_evaluations: Whether only a state from inside a validation run or an evaluation has it.
        compare: What `compared` does; ``None`` if the result of `state_dict` has that form.
        derived: The keys in it that depend on the process or the clock: they are not compared.
        is_read_back: Whether a resume compares it with the live objects.
    """

    name: str
    title: str
    state_dict: Callable[[RunState, _Moment], Any]
    load_state_dict: Callable[[RunState, Mapping[str, Any]], list[str] | None] | None
    is_of_evaluations: bool = False
    compare: Callable[[RunState, _Moment, Any], tuple[object, object]] | None = None
    derived: frozenset[str] = frozenset()
    is_read_back: bool = True

    def compared(self, run: RunState, at: _Moment, saved: Any) -> tuple[object, object]:
        """Return the part's value in a checkpoint and the live one, in a form in which equal values are equal."""
        return (saved, self.state_dict(run, at)) if self.compare is None else self.compare(run, at, saved)


@dataclass(frozen=True, slots=True)
class ReadBack:
    """One part of a state that was restored, to compare with the live objects.

    Args:
        name: Its key in a checkpoint.
        derived: The keys in it that depend on the process.
        values: Returns its value in a checkpoint, and the same read from the live objects.
    """

    name: str
    derived: frozenset[str]
    values: Callable[[], tuple[object, object]]

    def live(self) -> object:
        """Return its live value."""
        return self.values()[1]


class RunState:
    """Reads and restores the state of a run that Lightning's own checkpoint lacks.

    Args:
        trainer: The trainer of the run.
        loaders: The trainer's loaders.
        files: The files that the run has written besides its autosaves.
        registered: The functions given to `FaultTolerance.register`, by name.
        options: The callback's options.
        schedulers: The trainer's schedulers, if a checkpoint was loaded since they were created.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        files: RunFiles,
        registered: Mapping[str, Registered],
        options: Options,
        schedulers: Schedulers | None = None,
    ) -> None:
        self.trainer = trainer
        self.schedulers = schedulers or Schedulers(trainer)
        self.module = trainer.lightning_module
        self.loaders = loaders
        self.validation = ValidationRun(trainer, loaders, may_be_resized=options.allows_other_ranks)
        self.files = files
        self.objects_not_restored: tuple[str, ...] = ()
        """After a resume, a line for each part of the object state that is not as it was."""
        callbacks = named_callbacks(compat.callbacks(trainer))
        roots = {
            "module": trainer.lightning_module,
            "datamodule": compat.datamodule(trainer),
            "loaders": loaders.untracked,
            "callbacks": callbacks,
            "optimizers": trainer.optimizers,
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        }
        self.held = HeldGenerators({**roots, **users_variables(roots)})
        """The generators that objects hold, except those of loaders."""
        self.objects = Objects(trainer, loaders, callbacks, registered, self.held, manual=is_manual())
        self.kinds_of_buffers = kinds_of_buffers(trainer.lightning_module)
        """The kind of each buffer that the module began with, by its name."""
        self.left_out = LeftOut(trainer)

    def _refresh(self) -> None:
        """Find generators that objects have created since the last search."""
        self.held.refresh(whole=True)
        for tracker in self.loaders.trackers.values():
            tracker.held.refresh(whole=True)

    def state_dict(self, position: TrainerPosition, *, strict: bool = False) -> dict[str, Any]:
        """Return the state of this rank: `PARTS`, by their names.

        Raises:
            NotExactError: If `strict`, and a checkpoint can't carry what training has changed.
        """
        self._refresh()
        at = self._moment(position, strict=strict)
        if at.has_gradients:
            reshard(self.trainer)
        for part in PARTS:
            if not part.is_of_evaluations or at.is_evaluating:
                at.state[part.name] = part.state_dict(self, at)
        return at.state

    def _moment(self, position: TrainerPosition, *, strict: bool) -> _Moment:
        # A validation step may have computed gradients.
        has_gradients = keeps_gradients(self.trainer) or compat.is_accumulating(self.trainer)
        is_validating = position.where == IN_VALIDATION
        return _Moment(
            where=position.where,
            is_iterating=self._is_iterating(position),
            is_evaluating=is_validating or position.where in IN_EVALUATION,
            has_gradients=has_gradients or is_validating,
            strict=strict,
        )

    def _is_iterating(self, position: TrainerPosition) -> bool:
        """Return whether the next batch comes from the iterators that the training loaders have here."""
        if position.where == EPOCH_START:
            return not compat.starts_over(self.trainer)
        return position.where not in (EPOCH_END, FINISHED, *IN_EVALUATION, *EVALUATED)

    def not_carried(self, taken: Mapping[str, Any] | None = None) -> frozenset[str]:
        """Return the paths of what training has changed or made that a checkpoint would lack.

        Args:
            taken: The `state_dict` of this instant, if it was taken just now.
        """
        objects = self.objects.state_dict(IN_VALIDATION, {}) if taken is None else taken[OBJECTS]
        return frozenset(objects.get(LOST, ())) | frozenset(self.objects.live)

    def with_left_out(
        self,
        state: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        captured: Mapping[str, Any] = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        """Return a state with the weights that a checkpoint lacks.

        Args:
            state: The state of this rank.
            checkpoint: Lightning's checkpoint, as users leave it.
            captured: The buffers at the instant of the state, if they have changed since.
        """
        weights = checkpoint.get("current_model_state", checkpoint.get("state_dict", {}))
        carried, sums = self.left_out.found(weights) if state else ({}, {})
        if not (carried or sums):
            return state
        carried = {name: captured.get(name, one) for name, one in carried.items()}
        return {**state, **sums, "buffers": {**state["buffers"], **carried}}

    def load_state_dict(self, state: Mapping[str, object]) -> list[str]:
        """Restore the parts in `state`.

        Returns:
            A line for each thing that could not be restored.
        """
        missing = self.left_out.others(state)
        for part in reversed(PARTS):
            if part.load_state_dict is not None and part.name in state:
                lost = part.load_state_dict(self, state) or ()
                missing += [f"{part.title}: nothing to restore {what!r} into" for what in lost]
        return missing

    def read_back(self, position: TrainerPosition, state: Mapping[str, Any]) -> Iterator[ReadBack]:
        """Yield each part in `state` that a resume has restored from it.

        Args:
            position: Where it was taken.
            state: A `state_dict`.
        """
        self._refresh()
        at = self._moment(position, strict=False)
        for part in PARTS:
            if part.name in state and part.is_read_back:
                yield ReadBack(part.name, part.derived, partial(part.compared, self, at, state[part.name]))


def named_callbacks(callbacks: list[Callback]) -> dict[str, Callback]:
    """Return callbacks by class and number within the class: a callback of another class in front renames none."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        number = sum(key.partition("#")[0] == name for key in named)
        named[f"{name}#{number}"] = callback
    return named


def _trainer_state(trainer: Trainer) -> dict[str, object]:
    return {
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "num_training_batches": trainer.num_training_batches,
        "val_check_batch": getattr(trainer, "val_check_batch", None),
        "validation_is_set_up": compat.are_set_up(trainer, for_training=False),
        "reload_epochs": compat.reload_epochs(trainer),
        "seen_validation_batches": compat.seen_validation_batches(trainer),
        **{name: getattr(trainer.strategy.model, name) for name in _of_ddp(trainer)},
    }


def _load_trainer_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    trainer.should_stop = state["should_stop"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    if state["validation_is_set_up"]:
        compat.set_up_validation(trainer)
    compat.set_reload_epochs(trainer, state["reload_epochs"])
    compat.set_seen_validation_batches(trainer, state["seen_validation_batches"])
    for name in _of_ddp(trainer):
        if name in state:
            setattr(trainer.strategy.model, name, state[name])


def _of_ddp(trainer: Trainer) -> tuple[str, ...]:
    # The flag says whether the next forward takes rank 0's buffers. A new DDP does. After a forward that reduced no
    # gradients (validation, an open accumulation window, manual optimization) it doesn't: each rank keeps its own.
    is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
    return ("require_forward_param_sync",) if is_ddp else ()


def _loaders_state(run: RunState, at: _Moment) -> dict[str, object]:
    validated = run.validation.num_consumed() if at.is_evaluating else {}
    return run.loaders.state_dict(in_epoch=at.is_iterating, validated=validated, strict=at.strict)


def _held_state(run: RunState, at: _Moment) -> dict[str, object]:
    return {"objects": run.held.state_dict(), "loaders": run.loaders.held_state()}


def _load_held(run: RunState, state: Mapping[str, Any]) -> list[str]:
    held = state["held"]
    return run.held.load_state_dict(held["objects"]) + run.loaders.load_held(held["loaders"])


def _load_objects(run: RunState, state: Mapping[str, Any]) -> None:
    run.objects_not_restored = tuple(run.objects.load_state_dict(state[OBJECTS]))


def _buffers_state(run: RunState, at: _Moment) -> dict[str, Any]:
    # If each rank has a buffer whole, the checkpoint of a strategy that shards holds the copy of any one rank.
    return buffers_state(run.module, persistent=None if has_shards(run.trainer.strategy) else False)


def _load_buffers(run: RunState, state: Mapping[str, Any]) -> list[str]:
    began = state.get("began", {}).get("buffers", {})
    make_room(run.module, state["buffers"], began=began, here=run.kinds_of_buffers)
    missing = load_buffers(run.module, state["buffers"])
    run.left_out.carry(state["buffers"])
    return missing


def _compared_buffers(run: RunState, at: _Moment, state: Mapping[str, Any]) -> tuple[object, object]:
    live = {**buffers_of(run.module), **weights_of(run.module)}
    return state, {name: one for name, one in live.items() if name in state}


def _load_gradients(run: RunState, state: Mapping[str, Any]) -> None:
    reshard(run.trainer)
    load_gradients(run.module, state["gradients"])


def _callbacks_state(run: RunState, at: _Moment) -> dict[str, object]:
    return callbacks_state(run.trainer, named_callbacks(compat.callbacks(run.trainer)))


def _load_callbacks(run: RunState, state: Mapping[str, Any]) -> list[str] | None:
    return load_callbacks(run.trainer, named_callbacks(compat.callbacks(run.trainer)), state["callbacks"])


def _of_trainer(
    name: str,
    title: str,
    read: Callable[[Trainer], object],
    load: Callable[[Trainer, Any], Any],
    *,
    derived: frozenset[str] = frozenset(),
) -> Part:
    """Return a part that is read from the trainer alone, and restored into it."""
    return Part(
        name,
        title,
        lambda run, at: read(run.trainer),
        lambda run, state: load(run.trainer, state[name]),
        derived=derived,
    )


def _of_module(
    name: str, title: str, read: Callable[[LightningModule], object], load: Callable[[LightningModule, Any], Any]
) -> Part:
    """Return a part that is read from the module alone, and restored into it."""
    return Part(name, title, lambda run, at: read(run.module), lambda run, state: load(run.module, state[name]))


def _unread(name: str, read: Callable[[RunState, _Moment], object], *, is_of_evaluations: bool = False) -> Part:
    """Return a part that is restored elsewhere, and not read back."""
    return Part(name, "", read, None, is_of_evaluations=is_of_evaluations, is_read_back=False)


# How a loader has come to its place: another process has come another way.
_WAY_OF_A_LOADER = frozenset(
    ("recent", "digests", "log", "handed_out", "num_samples", "fetched", "ahead", "objects", "now", "had_workers")
)

PARTS = (
    Part("rng", "random generators", lambda run, at: rng_state(), lambda run, state: set_rng_state(state["rng"])),
    Part("held", "generators held by objects", _held_state, _load_held),
    # `Resume` gives the loaders their places before they are iterated over.
    Part(
        "loaders",
        "order of samples and workers",
        _loaders_state,
        None,
        derived=_WAY_OF_A_LOADER,
    ),
    Part(
        OBJECTS,
        "object state",
        lambda run, at: run.objects.state_dict(at.where, at.state["loaders"]["places"], strict=at.strict),
        _load_objects,
        compare=lambda run, at, state: run.objects.compared(state),
    ),
    Part(
        "files",
        "",
        lambda run, at: run.files.state_dict(),
        lambda run, state: run.files.load_state_dict(state["files"]),
        is_read_back=False,  # it says what the files of loggers and callbacks have, which are not the run's
    ),
    _of_trainer("results", "logged values", results_state, load_results),
    _of_module("metrics", "metrics", metrics_state, load_metrics),
    _of_module("shown", "", shown_state, load_shown),
    Part(
        "buffers",
        "tensors outside the state_dict",
        _buffers_state,
        _load_buffers,
        compare=_compared_buffers,
    ),
    _unread("began", lambda run, at: {"buffers": run.kinds_of_buffers}),  # for `_load_buffers`
    Part(
        "gradients",
        "gradients of an open accumulation window",
        lambda run, at: gradients_state(run.module) if at.has_gradients else {},
        _load_gradients,
    ),
    _of_module("flags", "training and frozen flags", flags_state, load_flags),
    _of_trainer(
        "trainer",
        "trainer attributes",
        _trainer_state,
        _load_trainer_state,
        derived=frozenset({"validation_is_set_up"}),  # by a finder of this process
    ),
    Part("callbacks", "what callbacks keep and do not save", _callbacks_state, _load_callbacks),
    # `ValidationRun` continues there.
    _unread(VALIDATION_RUN, lambda run, at: run.validation.state_dict(), is_of_evaluations=True),
)
"""What a run consists of besides Lightning's checkpoint, read in this order and restored in the reverse order.

Random generators are read first and restored last: everything in between may draw.
"""

TITLES = {part.name: part.title for part in PARTS if part.title}
"""The name in reports of each part that they mention. A checkpoint that lacks one of these parts is not complete."""


_HOOKS = ("optimizer_zero_grad", "optimizer_step", "backward", "on_before_zero_grad")
# The optimizers of these packages begin a step with a new gradient, whatever the old one was.
_PLAIN = frozenset({"apex", "bitsandbytes", "colossalai", "deepspeed", "fairscale", "lightning", "lightning_fabric",
                    "lion_pytorch", "pytorch_lightning", "timm", "torch", "torchao", "transformer_engine",
                    "transformers"})  # fmt: skip


def keeps_gradients(trainer: Trainer) -> bool:
    """Return whether the next step can read the gradients of the previous one.

    A manual step, an overridden hook, or a custom optimizer may read them. Examples are gradient norms that are logged
    before the gradients are set to zero, or a step that uses the previous gradient.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or _overrides(module, LightningModule, _HOOKS):
        return True
    if any(_overrides(callback, Callback, ("on_before_zero_grad",)) for callback in compat.callbacks(trainer)):
        return True
    return any(_root(type(optimizer)) not in _PLAIN for optimizer in trainer.optimizers)


def _overrides(owner: object, base: type, hooks: tuple[str, ...]) -> bool:
    found = (getattr(type(owner), hook) for hook in hooks)
    return any(
        own is not getattr(base, hook) and _root(own) not in _PLAIN for hook, own in zip(hooks, found, strict=True)
    )


def _root(part: object) -> str:
    return (getattr(part, "__module__", None) or "").partition(".")[0]

"""The state of a run that Lightning does not save: `PARTS` lists what it consists of.

Gradients are part of the state at a boundary if they outlive their step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.nn.parameter import is_lazy

from lightning_faulttolerant.records.requests import skips_in_words
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.metrics import load_metrics, metrics_state
from lightning_faulttolerant.state.objects.saved import LOST
from lightning_faulttolerant.state.objects.walk import users_variables
from lightning_faulttolerant.state.process_settings import process_settings, set_process_settings
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
from lightning_faulttolerant.trainer.adapters.state import callbacks_state, load_callbacks
from lightning_faulttolerant.trainer.evaluation.saving import (
    DEALT,
    GRADIENTS,
    PREDICTIONS,
    PROGRESS,
    RETURNED,
    SUMS,
    WEIGHTS,
)
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.objects.objects import Objects
from lightning_faulttolerant.trainer.objects.roots import schedulers_of
from lightning_faulttolerant.trainer.position import (
    EPOCH_END,
    EPOCH_START,
    EVALUATED,
    FINISHED,
    FIT,
    IN_EVALUATION,
    IN_VALIDATION,
    VALIDATION_END,
    TrainerPosition,
    function_of,
)
from lightning_faulttolerant.trainer.process import OBJECTS, SETTINGS, Registered, is_manual
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, LIGHTNINGS
from lightning_faulttolerant.trainer.ranks.sharded import reshard
from lightning_faulttolerant.trainer.ranks.strategies import BUCKETS
from lightning_faulttolerant.trainer.resume.loaded import IN_SHARDS
from lightning_faulttolerant.trainer.resume.parameters import GROUPS
from lightning_faulttolerant.trainer.resume.schedulers import SCHEDULERS, Schedulers
from lightning_faulttolerant.trainer.run.changes import CREATED
from lightning_faulttolerant.trainer.save.left_out import LEFT_OUT, LeftOut
from lightning_faulttolerant.trainer.save.lightnings import weights_in
from lightning_faulttolerant.trainer.save.part import GONE, MERGED, Moment, Part
from lightning_faulttolerant.trainer.save.trainer_state import keeps_gradients, load_trainer_state, trainer_state
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.steps.skipped_batches import SKIPPED

GROWN, REPLACED = "grown", "replaced"
BEFORE_VALIDATION = "before_validation"
VALIDATION_RUN = "validation"
"""The part of a checkpoint from inside a validation run, or from an evaluation."""


ReadBack = Callable[[], tuple[object, object]]
"""Returns the value of a part in a checkpoint, and the same read from the live objects."""


class RunState:
    """Reads and restores the state of a run that Lightning's own checkpoint lacks.

    Args:
        trainer: The trainer of the run.
        loaders: The trainer's loaders.
        files: The files that the run has written besides its autosaves.
        registered: The functions given to `FaultTolerance.register`, by name.
        options: The callback's options.
        schedulers: The trainer's schedulers, if a checkpoint was loaded since they were created.
        own: What reads the parts, by name, that only a fit or only an evaluation has.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        files: RunFiles,
        registered: Mapping[str, Registered],
        options: Options,
        schedulers: Schedulers | None = None,
        own: Mapping[str, Callable[..., object]] = MappingProxyType({}),
    ) -> None:
        self.trainer = trainer
        self.own = own
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
            "schedulers": schedulers_of(trainer),
        }
        self.held = HeldGenerators({**roots, **users_variables(roots)})
        """The generators that objects hold, except those of loaders."""
        self.objects = Objects(trainer, loaders, callbacks, registered, self.held, manual=is_manual())
        self.kinds_of_buffers = kinds_of_buffers(trainer.lightning_module)
        """The kind of each buffer that the module began with, by its name."""
        self.kinds_when_saved: Mapping[str, str] = {}
        """The same in the process that saved the state."""
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
            value = part.read(self, at) if part.read is not None and part.when(at) else None
            if value is not None:
                at.state[part.name] = value
        return at.state

    def _moment(self, position: TrainerPosition, *, strict: bool) -> Moment:
        # A validation step may have computed gradients.
        has_gradients = keeps_gradients(self.trainer) or compat.is_accumulating(self.trainer)
        is_validating = position.where == IN_VALIDATION
        return Moment(
            where=position.where,
            is_fit=function_of(self.trainer) == FIT,
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
        carried, sums = self.left_out.found(weights_in(checkpoint)) if state else ({}, {})
        if not (carried or sums):
            return state
        carried = {name: captured.get(name, one) for name, one in carried.items()}
        return {**state, **sums, "buffers": {**state["buffers"], **carried}}

    def load_state_dict(self, state: Mapping[str, object]) -> list[str]:
        """Restore the parts in `state`.

        Returns:
            A line for each thing that could not be restored.
        """
        missing: list[str] = []
        for part in reversed(PARTS):
            if part.load is not None and part.name in state:
                lost = part.load(self, state[part.name]) or ()
                missing += [f"{part.title}: nothing to restore {one!r} into" for one in lost] if part.title else lost
        return missing

    def read_back(self, position: TrainerPosition, state: Mapping[str, Any]) -> Iterator[tuple[Part, ReadBack]]:
        """Yield each part in `state` that a resume has restored from it, and what reads both of its values.

        Args:
            position: Where it was taken.
            state: A `state_dict`.
        """
        self._refresh()
        at = self._moment(position, strict=False)
        for part in PARTS:
            if part.name in state and part.read is not None and part.is_read_back and part.when(at):
                yield part, partial(part.compared, self, at, state[part.name])


def named_callbacks(callbacks: list[Callback]) -> dict[str, Callback]:
    """Return callbacks by class and number within the class: a callback of another class in front renames none."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        number = sum(key.partition("#")[0] == name for key in named)
        named[f"{name}#{number}"] = callback
    return named


def _loaders_state(run: RunState, at: Moment) -> dict[str, object]:
    validated = run.validation.num_consumed() if at.is_evaluating else {}
    return run.loaders.state_dict(in_epoch=at.is_iterating, validated=validated, strict=at.strict)


def _held_state(run: RunState, at: Moment) -> dict[str, object]:
    return {"objects": run.held.state_dict(), "loaders": run.loaders.held_state()}


def _load_held(run: RunState, held: Mapping[str, Any]) -> list[str]:
    return run.held.load_state_dict(held["objects"]) + run.loaders.load_held(held["loaders"])


def _load_objects(run: RunState, objects: Mapping[str, Any]) -> None:
    run.objects_not_restored = tuple(run.objects.load_state_dict(objects))


def _buffers_state(run: RunState, at: Moment) -> dict[str, Any]:
    # If each rank has a buffer whole, the checkpoint of a strategy that shards holds the copy of any one rank.
    return buffers_state(run.module, persistent=None if has_shards(run.trainer.strategy) else False)


def _load_buffers(run: RunState, buffers: Mapping[str, Any]) -> list[str]:
    make_room(run.module, buffers, began=run.kinds_when_saved, here=run.kinds_of_buffers)
    missing = load_buffers(run.module, buffers)
    run.left_out.carry(buffers)
    return missing


def _load_kinds(run: RunState, began: Mapping[str, Any]) -> None:
    run.kinds_when_saved = began["buffers"]


def _compared_buffers(run: RunState, at: Moment, saved: Any) -> tuple[object, object]:
    live = {**buffers_of(run.module), **weights_of(run.module)}
    return saved, {name: one for name, one in live.items() if name in saved}


def _gradients_state(run: RunState, at: Moment) -> Any:
    if not at.is_fit:
        return run.own[GRADIENTS]()
    return gradients_state(run.module) if at.has_gradients else {}


def _load_gradients(run: RunState, gradients: Mapping[str, Any]) -> None:
    reshard(run.trainer)
    load_gradients(run.module, gradients)


def _load_weights(run: RunState, weights: Mapping[str, Any]) -> None:
    has_lazy = any(map(is_lazy, (*run.module.parameters(), *run.module.buffers())))
    run.module.load_state_dict(dict(weights), strict=not has_lazy)


def _callbacks_state(run: RunState, at: Moment) -> dict[str, object]:
    return callbacks_state(run.trainer, named_callbacks(compat.callbacks(run.trainer)))


def _load_callbacks(run: RunState, state: Mapping[str, Any]) -> list[str] | None:
    return load_callbacks(run.trainer, named_callbacks(compat.callbacks(run.trainer)), state)


def _dealt_state(run: RunState, at: Moment) -> object:
    return run.own[DEALT](is_finished=at.where in EVALUATED)


def _lost(objects: Mapping[str, Any]) -> dict[str, str]:
    return {f"{path}: {reason}": "without" for path, reason in objects.get(LOST, {}).items()}


def _skipped(skipped: Mapping[str, Any]) -> dict[str, str]:
    labels = {"wanted": "to leave out", "done": "left out"}
    return {skips_in_words(skip): label for name, label in labels.items() for skip in skipped.get(name, ())}


def _own(name: str, *, is_of_fits: bool) -> Part:
    """Return a part that only fits have, and that is restored before Lightning's, or that only evaluations have."""
    return Part(name, "", lambda run, at: run.own[name](), when=lambda at: at.is_fit == is_of_fits, is_read_back=False)


def _of_trainer(name: str, title: str, read: Any, load: Any, **more: Any) -> Part:
    """Return a part that is read from the trainer alone, and restored into it."""
    return Part(name, title, lambda run, at: read(run.trainer), lambda run, one: load(run.trainer, one), **more)


def _of_module(name: str, title: str, read: Any, load: Any, **more: Any) -> Part:
    """Return a part that is read from the module alone, and restored into it."""
    return Part(name, title, lambda run, at: read(run.module), lambda run, one: load(run.module, one), **more)


# How a loader has come to its place: another process has come another way.
_WAY_OF_A_LOADER = frozenset(
    (
        "share",
        "recent",
        "digests",
        "log",
        "handed_out",
        "num_samples",
        "fetched",
        "ahead",
        "objects",
        "now",
        "had_workers",
    )
)

OF_RUN = (
    *(_own(name, is_of_fits=True) for name in (GROUPS, REPLACED, GROWN, CREATED, BUCKETS)),
    replace(_own(SKIPPED, is_of_fits=True), remarks=_skipped),
)
"""The parts that are of the run, and not of one rank."""

PARTS = (
    Part("rng", "random generators", lambda *_: rng_state(), lambda _, one: set_rng_state(one), for_others=MERGED),
    Part("held", "generators held by objects", _held_state, _load_held, for_others=MERGED),
    # `Resume` gives the loaders their places before they are iterated over.
    Part("loaders", "order of samples and workers", _loaders_state, for_others=MERGED, derived=_WAY_OF_A_LOADER),
    Part(
        OBJECTS,
        "object state",
        lambda run, at: run.objects.state_dict(at.where, at.state["loaders"]["places"], strict=at.strict),
        _load_objects,
        compare=lambda run, at, saved: run.objects.compared(saved),
        remarks=_lost,
    ),
    Part(
        SETTINGS,
        "settings of the process",
        lambda run, at: run.objects.changed_settings(),
        lambda _, changed: set_process_settings(changed),
        compare=lambda run, at, saved: (
            saved,
            {name: one for name, one in process_settings().items() if name in saved},
        ),
    ),
    Part(
        "files",
        "",
        lambda run, at: run.files.state_dict(),
        lambda run, state: run.files.load_state_dict(state),
        is_read_back=False,  # it says what the files of loggers and callbacks have, which are not the run's
    ),
    _of_trainer("results", "logged values", results_state, load_results, for_others=MERGED),
    _of_module("metrics", "metrics", metrics_state, load_metrics, for_others=MERGED),
    Part("buffers", "tensors outside the state_dict", _buffers_state, _load_buffers, compare=_compared_buffers),
    # For `_load_buffers`: it is restored before.
    Part("began", "", lambda run, at: {"buffers": run.kinds_of_buffers}, _load_kinds, is_read_back=False),
    Part(GRADIENTS, "gradients of an open accumulation window", _gradients_state, _load_gradients, for_others=MERGED),
    _of_module("flags", "training and frozen flags", flags_state, load_flags),
    _of_trainer(
        "trainer",
        "trainer attributes",
        trainer_state,
        load_trainer_state,
        when=lambda at: at.is_fit,
        # By a finder of this process; of the last epoch, if another one begins.
        derived=frozenset({"validation_is_set_up", "epoch_length"}),
    ),
    Part("callbacks", "what callbacks keep and do not save", _callbacks_state, _load_callbacks),
    # `ValidationRun` continues there.
    Part(
        VALIDATION_RUN,
        "",
        lambda run, at: run.validation.state_dict(),
        when=lambda at: at.is_evaluating,
        for_others=MERGED,
        is_read_back=False,
    ),
    Part(
        BEFORE_VALIDATION,
        "",
        lambda run, at: compat.before_validation(run.trainer, run.validation.first_loop_iter),
        when=lambda at: at.where == VALIDATION_END,
        is_read_back=False,
    ),
    *OF_RUN,
    # What only `validate`, `test`, and `predict` have.
    Part(
        WEIGHTS,
        "",
        lambda run, at: run.own[WEIGHTS](),
        _load_weights,
        when=lambda at: not at.is_fit,
        compare=lambda run, at, saved: (saved, run.module.state_dict()),
    ),
    _own(SUMS, is_of_fits=False),
    Part(DEALT, "", _dealt_state, when=lambda at: not at.is_fit, for_others=MERGED, is_read_back=False),
    # What is known only when the checkpoint is written.
    *(Part(name, "", None) for name in (PROGRESS, RETURNED, SCHEDULERS)),
    Part(PREDICTIONS, "", None, for_others=MERGED),
    Part(LEFT_OUT, "", None, lambda run, sums: run.left_out.others(sums)),
    *(Part(name, "", None, for_others=GONE) for name in (IN_SHARDS, FINGERPRINT, LIGHTNINGS)),
)
"""What a run consists of besides Lightning's checkpoint, read in this order and restored in the reverse order.

Random generators are read first and restored last: everything in between may draw.
"""

TITLES = {part.name: part.title for part in PARTS if part.title}
"""The name in reports of each part that they mention. A checkpoint that lacks one of these parts is not complete."""


def remarks_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return what the state of a rank tells whoever inspects the checkpoint: texts, each with its label."""
    return {text: label for part in PARTS for text, label in part.remarks(state.get(part.name, {})).items()}

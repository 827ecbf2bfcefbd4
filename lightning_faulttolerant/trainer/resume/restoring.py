"""The seams where Lightning restores a checkpoint: they hand it the checkpoint to continue from, and begin a resume.

During a fit, our `CheckpointIO` is in the place of Lightning's default one.

Training may create buffers of the ``state_dict`` or give them another shape: a queue that is filled, a memory bank.
A new process has them as they were at the start, and would not load them. Buffers outside the
``state_dict`` are in the state of each rank (`state.tensors.make_room`).

Training may also replace optimizers and schedulers. No new process creates those again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import final

from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from lightning_faulttolerant.checkpoint.schema import PICKLED, REWRITTEN
from lightning_faulttolerant.state.tensors import LAZY, kinds_of_buffers, room_for
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import spikes_restored
from lightning_faulttolerant.trainer.files.compat import CHECKPOINT_IO
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.gather import BUFFERS, SHARED
from lightning_faulttolerant.trainer.ranks.sharded import load_checkpoint
from lightning_faulttolerant.trainer.resume.choice import Choice, Trust
from lightning_faulttolerant.trainer.resume.loaded import IN_SHARDS, changed_states
from lightning_faulttolerant.trainer.resume.parameters import GROUPS, ParamGroups, changed_in_place
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.resume.schedulers import Schedulers, restore_logs
from lightning_faulttolerant.trainer.run.beginning import Beginning
from lightning_faulttolerant.trainer.run.changes import CREATED, ChangedSettings
from lightning_faulttolerant.trainer.run.fingerprint import Fingerprint
from lightning_faulttolerant.trainer.save.checkpoint_io import AtomicCheckpointIO
from lightning_faulttolerant.trainer.save.left_out import load_left_out
from lightning_faulttolerant.trainer.save.run_state import GROWN, REPLACED
from lightning_faulttolerant.trainer.settings import Options

# Those that the user has not chosen: they stand in for Lightning's default during a fit.
_stand_ins: weakref.WeakSet[CheckpointIO] = weakref.WeakSet()


def write_atomically(trainer: Trainer, patches: Patches) -> None:
    """Let a Trainer that has Lightning's default `CheckpointIO` use ours until `patches` are undone."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        ours = AtomicCheckpointIO()
        _stand_ins.add(ours)
        patches.replace(trainer.strategy, CHECKPOINT_IO, ours)


@contextlib.contextmanager
def own_file_restored(trainer: Trainer) -> Iterator[None]:
    """Within the block, read files as without us: the fit itself has just written them, as finders do.

    Lightning before 2.6 unpickles any content there, and a training that runs without us must run with us.
    """
    patches = Patches()
    if trainer.strategy.checkpoint_io in _stand_ins:
        patches.replace(trainer.strategy, CHECKPOINT_IO, TorchCheckpointIO())
    try:
        yield
    finally:
        patches.undo()


class Restoring:
    """Gives Lightning the checkpoint that the fit continues from.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options.
        beginning: The object that chooses the checkpoint.
        loaders: The fit's loaders.
        fingerprint: The fingerprint of this run.
        files: The files that the run has written next to its autosaves.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: Options,
        beginning: Beginning,
        loaders: Loaders,
        fingerprint: Fingerprint,
        files: RunFiles,
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._beginning = beginning
        self._loaders = loaders
        self._fingerprint = fingerprint
        self._files = files
        self._trust = Trust(options)
        self._start: _Start | None = None
        self._optimizers: _Optimizers | None = None
        self._settings: ChangedSettings | None = None

    @property
    def schedulers(self) -> Schedulers | None:
        """The schedulers, once they exist."""
        return None if self._optimizers is None else self._optimizers.schedulers

    @property
    def resume(self) -> Resume | None:
        """The resume, if the fit continues from a checkpoint."""
        return None if self._start is None else self._start.resume

    def forget_checkpoint(self) -> str | None:
        """Free the checkpoint, which is as large as the model and its optimizers. Return its origin."""
        self._beginning.forget_checkpoint()
        if self._start is None:
            return None
        self._start = replace(self._start, choice=self._start.choice.with_checkpoint(None))
        return self._start.choice.origin

    def is_saved(self, position: TrainerPosition) -> bool:
        """Return whether an autosave of this run holds the state of `position`. Call this at the first boundary."""
        start = self._start
        if start is None or start.resume is None:
            return False
        return is_saved(self._trainer, start.choice, start.resume, position)

    def changes(self) -> dict[str, Callable[[], object]]:
        """Return what reads how training has changed the optimizers, schedulers, and buffers that the fit began with.

        Call it when the fit begins.
        """
        assert self._start is not None
        assert self._optimizers is not None
        assert self._settings is not None
        return {
            GROUPS: self._optimizers.groups.state_dict,
            REPLACED: self._optimizers.replaced.checked,
            GROWN: self._start.grown.state_dict,
            CREATED: self._settings.state_dict,
        }

    def around_resume_start(
        self, original: Method, checkpoint_path: object = None, *args: object, **kwargs: object
    ) -> None:
        """Choose the checkpoint, and begin the resume from it."""
        if self._start is not None:  # a finder saves and restores its own checkpoint inside the fit
            with own_file_restored(self._trainer):
                original(checkpoint_path, *args, **kwargs)
            return
        grown = GrownBuffers(self._trainer.lightning_module)
        if self._trainer.optimizers:  # a strategy that shards loads them together with the weights
            self._settings = ChangedSettings(self._trainer)
        choice = self._beginning.choose(checkpoint_path)
        self._loaders.share_seeds(self._beginning.ranks)
        lightnings = partial(original, *args, **kwargs)
        load = partial(load_checkpoint, self._trainer, choice, lightnings, why_not_trusted=self._trust.why_not)
        is_read = choice.checkpoint is not None
        if not is_read:
            load()
            choice = choice.with_checkpoint(compat.loaded_checkpoint(self._trainer))
        resume = None if choice.path is None else self._begin(choice, grown, load if is_read else None)
        self._start = _Start(choice=choice, grown=grown, resume=resume)

    def _begin(self, choice: Choice, grown: GrownBuffers, load: Callable[[], None] | None) -> Resume:
        """Begin the resume from `choice`. If its content was read already, `load` gives it to Lightning."""
        resume = Resume(
            self._trainer,
            choice,
            self._loaders,
            self._fingerprint,
            self._files,
            ranks=self._beginning.ranks,
            options=replace(self._options, accepted=self._beginning.place.accepted),
        )
        self._beginning.set_aside()
        if load is not None:
            load()
        loaded, part, path = compat.loaded_checkpoint(self._trainer), choice.part, str(choice.path)
        self._trust.restore(loaded, None if part is None else part.get(PICKLED), path)
        sums = {} if part is None else part.get("sums", {})
        if part is not None and part["world_size"] != self._trainer.world_size and has_shards(self._trainer.strategy):
            resume.notes.append("weights and optimizers are not compared: the ranks that saved had other shards")
        resume.admit(changed_states(loaded, {**sums, **resume.saved(IN_SHARDS)}, self._trainer))
        resume.prepare(loaded)
        self._trust.restore(loaded, loaded.pop(PICKLED, None), path, leave=SHARED)  # a rank's own
        if resume.position is not None and part is not None and "state_dict" in loaded:
            captured = part["instead"].get("buffers", {}) if "instead" in part else {}
            grown.make_room(resume.saved(GROWN), loaded["state_dict"], captured=captured)
        if resume.position is not None:
            rewritten = part.get(REWRITTEN, ()) if part is not None else ()
            resume.proving.note(loaded, rewritten=rewritten)
            resume.restored.note_checkpoint(loaded, rewritten=rewritten)
        return resume

    def around_restore_training_state(self, original: Method) -> None:
        """Give Lightning the parameter groups to load into, and the checkpoint if it is gone.

        The checkpoint is gone if a finder has used it up.
        """
        choice = None if self._start is None else self._start.choice
        if choice is not None and choice.path is not None and not compat.loaded_checkpoint(self._trainer):
            compat.put_checkpoint(self._trainer, str(choice.path), choice.checkpoint or {})
        changes = None
        if self._optimizers is None:
            changes = self._settings = self._settings or ChangedSettings(self._trainer)
            own = self._optimizers = _Optimizers(
                groups=ParamGroups(self._trainer),
                replaced=Replaced(self._trainer),
                schedulers=Schedulers(self._trainer),
            )
            if self.resume is not None:
                self.resume.admit(own.replaced.why_not_exact(self.resume.saved(REPLACED)))
                self.resume.notes += own.groups.load_state_dict(self.resume.saved(GROUPS))
        if self.resume is None or changes is None:
            original()
        else:
            self._load_in_place(self.resume, original)
            self.resume.apply_changes(changes)
        if self.resume is not None and self.resume.is_pending:
            self.resume.restored.note_optimizers()

    def _load_in_place(self, resume: Resume, original: Method) -> None:
        loaded = compat.loaded_checkpoint(self._trainer)
        if self.schedulers is not None and "lr_schedulers" in loaded:
            loaded["lr_schedulers"], reasons = self.schedulers.load(loaded["lr_schedulers"])
            resume.admit(reasons)
        with changed_in_place(self._trainer):
            original()

    def around_restore_callbacks(self, original: Method) -> None:
        """Let callbacks load their states, also those that fail to load by themselves."""
        self._files.make_absolute(compat.loaded_checkpoint(self._trainer).get("callbacks", {}))
        with spikes_restored(self._trainer):
            original()
        restore_logs(self._trainer)
        if self.resume is not None and self.resume.is_pending and self.resume.position is not None:
            load_left_out(self._trainer, self.resume.saved(BUFFERS))
            self.resume.restored.note_loaded()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What is known once Lightning has asked for the checkpoint: what the fit continues from, if anything."""

    choice: Choice
    grown: GrownBuffers
    resume: Resume | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Optimizers:
    """The optimizers and schedulers that the fit began with."""

    groups: ParamGroups
    replaced: Replaced
    schedulers: Schedulers


_log = logging.getLogger(__name__)
_NOTHING = "nothing"


@final
class GrownBuffers:
    """The persistent buffers of a module, compared with those that it had before a checkpoint was loaded.

    Args:
        module: The module of the fit.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._first = kinds_of_buffers(self._module, persistent=True)

    def state_dict(self) -> dict[str, str]:
        """Return what the changed buffers were at the start, by name."""
        now = kinds_of_buffers(self._module, persistent=True)
        names = {name for name in {*now, *self._first} if now.get(name) != self._first.get(name)}
        return {name: self._first.get(name, _NOTHING) for name in sorted(names)}

    def make_room(
        self, state: Mapping[str, str], weights: dict[str, object], *, captured: Mapping[str, object]
    ) -> None:
        """Give the module buffers like those in `weights`, if they began as they do here.

        Args:
            state: The return value of `state_dict`.
            weights: The weights to load.
            captured: All buffers as they were at a capture, if a capture was saved.
        """
        modules = dict(self._module.named_modules())
        for name, began in state.items():
            prefix, _, own = name.rpartition(".")
            owner = modules.get(prefix)
            if owner is None or began == LAZY or self._first.get(name, _NOTHING) != began:
                continue
            if captured and name not in captured:  # training created it after the capture
                weights.pop(name, None)
            value = weights.get(name)
            if isinstance(value, Tensor) and (name in self._first or not hasattr(owner, own)):
                owner.register_buffer(own, room_for(value, owner, self._module))
            elif name in self._first and name not in weights:
                owner.register_buffer(own, None)


Kinds = dict[str, list[str]]
"""The classes of the optimizers and of the schedulers, and which optimizer each scheduler drives."""
_REMEDY = "Use both from the start (self.optimizers(), a SequentialLR), or a separate fit for each"


@final
class Replaced:
    """The classes of a fit's optimizers and schedulers, compared with the classes at its start.

    Args:
        trainer: The trainer that runs the fit. Its optimizers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = self._now()
        self._is_told = False

    def checked(self) -> Kinds | None:
        """Return the classes, or ``None`` while they are the original ones. Warn once if no resume can make these."""
        now = self._now()
        reasons = [] if self._is_told else self.why_not_exact(now)
        if reasons and self._trainer.is_global_zero:
            self._is_told = True
            _log.warning("A resume from now on can't be exact: %s. %s.", "; ".join(reasons), _REMEDY)
        return None if now == self._first else now

    def why_not_exact(self, state: Kinds) -> list[str]:
        """Return why the states that `state` describes can't be loaded into the current objects, one line for each."""
        if not state:
            return []
        pairs = (
            (f"{kind} {number}", saved, made)
            for kind in self._first
            for number, (saved, made) in enumerate(zip_longest(state[kind], self._first[kind], fillvalue="nothing"))
        )
        return [
            f"while training, {name} became {saved}, but configure_optimizers creates {made}, which can't continue "
            "from its state" for name, saved, made in pairs if saved != made
        ]  # fmt: skip

    def _now(self) -> Kinds:
        # StochasticWeightAveraging swaps a scheduler, and other code makes sure that it does so again.
        swaps = any(isinstance(callback, StochasticWeightAveraging) for callback in compat.callbacks(self._trainer))
        schedulers = [] if swaps else [config.scheduler for config in self._trainer.lr_scheduler_configs]
        optimizers = self._trainer.optimizers
        names = {id(one): f"optimizer {number}" for number, one in enumerate(optimizers)}
        return {
            "optimizer": [type(one).__qualname__ for one in optimizers],
            "scheduler": [
                f"{type(one).__qualname__} of {names.get(id(getattr(one, 'optimizer', None)), 'another optimizer')}"
                for one in schedulers
            ],
        }


def is_saved(trainer: Trainer, choice: Choice, resume: Resume, position: TrainerPosition) -> bool:
    """Return whether an autosave of this run holds the state of `position`, and a later start would take it.

    The autosave loads: it was just read. The directory can be written: the lock was taken in it.

    Args:
        trainer: The trainer that runs the fit.
        choice: The checkpoint that the fit continues from.
        resume: The resume from that checkpoint.
        position: The position of the first boundary.
    """
    if not choice.is_autosave or choice.parent is not None or resume.report is None:
        return False
    is_of_this_start = (resume.owed("origin"), resume.owed("world_size")) == (choice.origin, trainer.world_size)
    return is_of_this_start and resume.position == position and resume.report.is_exact

"""One resume: the state that a checkpoint holds, whether it fits this run, when each part is restored, the report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.checkpoint.schema import NOT_EXACT, PARENT, VERSION, CheckpointPart
from lightning_faulttolerant.checkpoint.verify import load_path
from lightning_faulttolerant.errors import CheckpointError, NotExactError
from lightning_faulttolerant.records.runs import Parent, parent_from
from lightning_faulttolerant.state.metrics import grow_trackers
from lightning_faulttolerant.state.objects.saved import filled_in
from lightning_faulttolerant.state.process_settings import set_process_settings
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import (
    continue_bar_at,
    restore_best_models,
    why_ended,
    without_masks,
)
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.loaders.trackers import loader_states
from lightning_faulttolerant.trainer.log import tell_resumed
from lightning_faulttolerant.trainer.objects.objects import SPLITS, refuse_lost
from lightning_faulttolerant.trainer.objects.splits import Splits
from lightning_faulttolerant.trainer.position import FINISHED, REMEDY_OF_CUT, TrainerPosition, load_into_loops, place_of
from lightning_faulttolerant.trainer.process import OBJECTS, SETTINGS
from lightning_faulttolerant.trainer.ranks.elastic import Resized
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, LIGHTNINGS, kept_apart, state_of
from lightning_faulttolerant.trainer.ranks.sharded import put_into
from lightning_faulttolerant.trainer.resume.choice import Choice, Content, Trust
from lightning_faulttolerant.trainer.resume.loaded import RestoredState
from lightning_faulttolerant.trainer.resume.parameters import convert_module
from lightning_faulttolerant.trainer.resume.proof import Proving, not_read_back
from lightning_faulttolerant.trainer.resume.report import LIGHTNINGS_PARTS, NO_PART, ResumeReport, of_all
from lightning_faulttolerant.trainer.resume.schedulers import SCHEDULERS
from lightning_faulttolerant.trainer.run.changes import CREATED, ChangedSettings
from lightning_faulttolerant.trainer.run.fingerprint import (
    Comparison,
    Fingerprint,
    as_carried_over,
    differences,
    surroundings,
    warn_late,
)
from lightning_faulttolerant.trainer.save.capture import put_instead
from lightning_faulttolerant.trainer.save.lightnings import as_captured
from lightning_faulttolerant.trainer.save.run_state import OF_RUN, PARTS, TITLES, RunState
from lightning_faulttolerant.trainer.settings import Options


@dataclass(kw_only=True, slots=True)
class _Differences:
    """The differences between this run and the one that saved.

    Args:
        ranks: All ranks. Each may have differences of its own.
        all: All that are reported, or refused.
        of_settings: Those of the settings that a branch may change; ``None`` if the fit doesn't begin a branch.
        applied: The settings that were applied over those of the checkpoint.
        shown: Notes that a user must see at once: why the last bits may differ, which batches were left out.
    """

    ranks: Ranks
    all: Comparison
    of_settings: Comparison | None
    applied: ChangedSettings | None = None
    shown: list[str] = field(default_factory=list)


class Resume:
    """Restores one fit from one checkpoint.

    Args:
        trainer: The trainer that runs the fit.
        choice: The checkpoint.
        loaders: The fit's loaders.
        fingerprint: The fingerprint of this run.
        files: The files that the run has written next to its autosaves.
        ranks: All ranks. The checkpoint holds a state for each of them.
        options: The callback's options. They decide what is an error.

    Raises:
        NotExactError: If the options are strict, and the checkpoint is not of this run or can't be resumed exactly.
    """

    def __init__(
        self,
        trainer: Trainer,
        choice: Choice,
        loaders: Loaders,
        fingerprint: Fingerprint,
        files: RunFiles,
        *,
        ranks: Ranks,
        options: Options,
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._fingerprint = fingerprint
        self._files = files
        self._options = options
        self._choice = choice.with_checkpoint(None)
        self._began = time.monotonic()
        self._surroundings = surroundings(trainer)  # what training has set is restored later
        self._differences = _Differences(
            ranks=ranks,
            all=Comparison(self._path, strict=options.strict, is_elastic=options.elastic, accepted=options.accepted),
            of_settings=Comparison(self._path, strict=False, is_elastic=True) if choice.parent else None,
        )
        self.notes: list[str] = []
        """Lines for the report that are worth knowing. None of them is about state that is not exact."""
        self._content = Content(part=choice.part, callback_states=(choice.checkpoint or {}).get("callbacks", {}))
        self.restored = RestoredState(trainer, self._read_again, wins=choice.is_autosave)
        """What Lightning restores."""
        self.proving = Proving(trainer, self._differences.all)
        self._report: ResumeReport | None = None
        if choice.part is None:
            self._differences.all.not_exact.append(NO_PART)
            self._loaders.note_checkpoint(lightning_restores=any(loader_states(choice.checkpoint or {})))
        else:
            self._read(choice.part, choice.checkpoint or {})

    @property
    def _path(self) -> str:
        return str(self._choice.path)

    @property
    def position(self) -> TrainerPosition | None:
        """Where the checkpoint was taken; ``None`` if the fit does not continue from there."""
        return self._content.position

    def _read(self, part: CheckpointPart, checkpoint: Mapping[str, object]) -> None:
        if part["version"] > VERSION:
            raise CheckpointError(
                f"{self._path} was written in format {part['version']}, but this version of the package reads formats "
                f"up to {VERSION}. Its state would be misread. Install the newer version."
            )
        self._content.position = position = TrainerPosition.from_state_dict(part["position"])
        if part.get("inexact"):
            self._fails(f"{self._path} can't be resumed exactly, {position}: {'; '.join(part['inexact'])}")
        if not position.is_resumable:
            self._content.position = None
            return
        # Fingerprints lack it, too.
        refuse_lost(part["ranks"][0].get(OBJECTS) or {}, self._path, strict=self._options.strict)
        self._differences.all.compare(part["fingerprint"], self._fingerprint.model(), ("module",))
        of_settings = self._differences.of_settings or self._differences.all
        texts = of_settings.compare_hyperparameters(part["fingerprint"], self._fingerprint.hyperparameters)
        if self._differences.of_settings is None:
            self.notes += texts
        else:
            self._differences.of_settings.not_exact += texts
        checkpoint = as_captured(checkpoint, part.get("instead"), self._trainer)
        if part["world_size"] == self._trainer.world_size:
            self._content.state = state_of(part, self._differences.ranks.rank, checkpoint)
            if not self._content.state:  # another rank has saved alone: what is of the run holds for this one, too
                first = state_of(part, 0, checkpoint)
                self._content.state = {one.name: first[one.name] for one in OF_RUN if one.name in first}
        else:
            self._redistribute(part, checkpoint, position)
        if "metrics" in self._content.state:  # before Lightning loads the weights: metrics may be in the state_dict
            grow_trackers(self._trainer.lightning_module, self._content.state["metrics"])
        self._content.part = {**part, "ranks": []}
        if loaders := self._content.state.get(FINGERPRINT):  # data sets may differ from rank to rank
            self._content.part["fingerprint"] = {**part["fingerprint"], "loaders": loaders}
        self._loaders.note_checkpoint(has_places="loaders" in self._content.state)
        lacking = [f"{TITLES[name]}: not in the checkpoint" for name in TITLES if name not in self._content.state]
        if lacking and self._options.strict:
            raise NotExactError(f"{self._path} can't be resumed exactly: {'; '.join(lacking)}. Pass strict=False.")
        self._differences.all.not_exact += lacking
        refuse_lost(self.saved(OBJECTS), self._path, strict=self._options.strict)
        if position.is_cut(self._trainer, checkpoint, self.saved("trainer")):
            self._fails(position.reason_of_cut(self._path), remedy=REMEDY_OF_CUT)

    def _redistribute(self, part: CheckpointPart, checkpoint: Mapping[str, object], position: TrainerPosition) -> None:
        """Build the state of this rank from the states of a different number of ranks."""
        self._content.resized = Resized(
            self._trainer,
            PARTS,
            [state_of(part, number, checkpoint) for number in range(len(part["ranks"]))],
            position,
            part["fingerprint"],
            rank=self._differences.ranks.rank,
            apart=kept_apart(part, checkpoint),
            is_per_sample=self._options.worker_rng == "per_sample",
        )
        self._content.state = self._content.resized.state
        self._take_lost(self._content.resized)

    def _take_lost(self, resized: Resized) -> None:
        lost, resized.lost = resized.lost, []
        if lost and self._options.strict and not self._options.elastic:
            raise NotExactError(
                f"{self._path} can't continue exactly with a different number of ranks ({resized.ranks}):\n"
                + "\n".join(f"  - {line}" for line in lost)
                + "\nThe run would differ from the uninterrupted one. Start with as many ranks as before, or pass "
                "FaultTolerance(elastic=True) to continue without this state."
            )
        self._differences.all.not_exact += [*lost, *resized.notes]
        resized.notes = []

    def show(self, lines: Iterable[str]) -> None:
        """Note what a user must see at once although the state is exact."""
        self._differences.shown += lines

    def fit_in(self) -> None:
        """Move the epoch in progress to its place with the current number of ranks. Call this once it is set up."""
        if self._content.resized is not None:
            self._content.position = self._content.resized.fit_in(self._loaders)
            self._take_lost(self._content.resized)
            self._content.state = self._content.resized.state

    def as_due(self) -> AbstractContextManager[None]:
        """Let the loop do, inside this context, what was due where the checkpoint was taken."""
        if self._content.resized is None or self.position is None:
            return nullcontext()
        return self._content.resized.as_due(self.position.where)

    def prepare(self, checkpoint: dict[str, Any]) -> None:
        """Adjust the checkpoint that Lightning restores from to the place where the run continues."""
        if self.position is None or self._content.part is None:
            return
        if "instead" in self._content.part:
            put_instead(checkpoint, self._content.part["instead"], self.position, self._trainer)
            if self._trainer.strategy.restore_checkpoint_after_setup:  # it has already loaded model and optimizers
                put_into(self._trainer, self._content.part["instead"])
            self._content.callback_states = checkpoint["callbacks"]
        if SCHEDULERS in self._content.state:
            checkpoint["lr_schedulers"] = self._content.state[SCHEDULERS]
        checkpoint.update(self._content.state.get(LIGHTNINGS, {}))
        if self._differences.of_settings is not None:
            self._forget_files(checkpoint)
        if "state_dict" in checkpoint:
            module = self._trainer.lightning_module
            self.restored.note_masks(checkpoint["state_dict"])
            checkpoint["state_dict"] = without_masks(checkpoint["state_dict"], module=module)
            if not self._trainer.strategy.restore_checkpoint_after_setup:  # it loads by itself, after the setup
                convert_module(self._trainer)
        if "loops" in checkpoint:
            if not self._content.state.get("loaders", {}).get("left"):
                loader_states(checkpoint).clear()  # we restore each loader's place, and only once
            load_into_loops(checkpoint["loops"]["fit_loop"], self.position)

    def _forget_files(self, checkpoint: dict[str, Any]) -> None:
        """Let each ModelCheckpoint begin without the parent's files: it would remove or replace them."""
        own = {one.state_key for one in self._trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)}
        states = checkpoint.get("callbacks", {})
        checkpoint["callbacks"] = {key: state for key, state in states.items() if key not in own}
        self._content.callback_states = checkpoint["callbacks"]
        if files := self._content.state.get("files"):
            files = {**files, "checkpoints": {**files["checkpoints"], "callbacks": {}}}
            self._content.state = {**self._content.state, "files": files}

    def _read_again(self) -> dict[str, Any]:
        """Read the checkpoint again, with the weights as they are after `prepare`."""
        checkpoint, instead = load_path(self._path), self.owed("instead")
        # If the checkpoint has averaged weights, Lightning stores those as the `state_dict`.
        weights = checkpoint.get("current_model_state", checkpoint.get("state_dict", {}))
        return {**checkpoint, "state_dict": {**weights, **(instead or {}).get("buffers", {}), **self.saved("buffers")}}

    def begin(self, splits: Splits) -> None:
        """Compare the settings when the fit begins, and let its loaders continue. If a finder ran before, it is done.

        Args:
            splits: The parts of splits in this process.

        Raises:
            FingerprintMismatchError: If `strict`, and this run is not the one that saved.
        """
        if self._content.part is None or self.position is None:
            return
        if self._choice.is_autosave:
            # As in the uninterrupted run: ModelCheckpoint never removes the file that a run was started from.
            compat.put_checkpoint_path(self._trainer, self._choice.origin)
        restore_best_models(self._trainer, self._content.callback_states)
        saved, settings = self._content.part["fingerprint"], self._fingerprint.settings()
        if self._content.resized is not None:
            saved = {**saved, "trainer": as_carried_over(saved["trainer"], settings["trainer"])}
        of_settings = self._differences.of_settings
        (of_settings or self._differences.all).compare(saved, settings, ("optimizers", "trainer"))
        if of_settings is not None:
            of_settings.not_exact += map(str, differences(saved.get("limits", {}), settings["limits"], "trainer"))
        notes, lost = splits.put_back(self.saved(OBJECTS).get(SPLITS, ()))
        self._differences.all.take_drawn(lost)
        self.notes += notes
        self._loaders.expect(lambda place, now: self._compare_loader(place, saved["loaders"].get(place), now))
        set_process_settings(self._content.state.get(SETTINGS, {}))  # workers inherit them
        self._loaders.resume_from(self._content.state.get("loaders", {}))
        if "files" in self._content.state:
            self._files.resume_checkpoints(self._content.state["files"], self._path)
        if self.place_in_epoch is not None:
            self._loaders.hold_back()
        elif "trainer" in self._content.state:
            # A fit that EarlyStopping had ended must not continue.
            self._trainer.should_stop = self._content.state["trainer"]["should_stop"]

    def _compare_loader(self, place: str, saved: Mapping[str, object] | None, now: Mapping[str, object]) -> None:
        num_known = len(self._differences.all.not_exact)
        if saved is not None:
            self._differences.all.compare_loader(
                place,
                saved,
                now,
                tracker=self._loaders.trackers.get(place),
                is_resized=self._content.resized is not None,
                restored=filled_in(self.saved(OBJECTS)),
            )
        if not self.is_pending:
            warn_late(self._differences.all.not_exact[num_known:])

    def admit(self, reasons: list[str]) -> None:
        """Report what can't be restored exactly.

        Raises:
            NotExactError: If `strict`, and `reasons` is not empty.
        """
        if reasons and self._options.strict:
            raise NotExactError(
                f"{self._path} can't be resumed exactly: {'; '.join(reasons)}. Change this, or pass strict=False."
            )
        self._differences.all.not_exact += reasons

    def _fails(self, reason: str, *, remedy: str | None = None) -> None:
        if self._options.strict:
            nearest = self._choice.sets_aside
            remedy = remedy or f"Resume from {'an autosave' if nearest is None else f'the autosave {nearest}'}"
            raise NotExactError(f"{reason}. {remedy}, or pass FaultTolerance(strict=False).")
        self._differences.all.not_exact.append(reason)

    @property
    def parent(self) -> Parent | None:
        """The parent of this run, if it is a branch, with all that the branch has changed."""
        if self._choice.parent is None or self._differences.of_settings is None:
            return parent_from(self.owed(PARENT))
        return replace(self._choice.parent, changed=tuple(dict.fromkeys(self._differences.of_settings.not_exact)))

    def apply_changes(self, changes: ChangedSettings) -> None:
        """Apply the settings of this start over those of the checkpoint, if the fit begins a branch.

        Args:
            changes: The settings of this start.
        """
        if self._differences.of_settings is not None and self._content.part is not None:
            self._differences.applied = changes
            self._differences.of_settings.not_exact += changes.apply(self.saved(CREATED))

    @property
    def is_pending(self) -> bool:
        """Whether the resume is not over yet: the state is not restored, or there is none to restore."""
        return self._report is None

    @property
    def place_in_epoch(self) -> TrainerPosition | None:
        """The position, if the state is from an epoch in progress and not restored yet."""
        if self.position is None or not self.is_pending or not self.position.is_in_epoch:
            return None
        return self.position

    def saved(self, name: str) -> Any:
        """Return one part of the state by its name in `PARTS`, or an empty mapping if it was not saved."""
        return self._content.state.get(name) or {}

    def owed(self, name: str) -> Any:
        """Return what the checkpoint notes about its run, or about a hook that was running: ``pending``."""
        return None if self._content.part is None else self._content.part.get(name)

    @property
    def is_after_the_end(self) -> bool:
        """Return whether the state is from a finished fit and not restored yet."""
        return self.is_pending and self.position is not None and self.position.where == FINISHED

    def continue_after_the_end(self) -> None:
        """Prepare a finished fit to train further, and check that it can.

        Raises:
            NotExactError: If `strict`, and the fit ended inside an epoch, or a callback closed it for good.
        """
        # The data setup has already begun an epoch, before the state was restored. It begins again.
        self._loaders.resume_from(self._content.state.get("loaders", {}))
        position = self.position
        if (ended := why_ended(self._trainer)) is not None:
            self._fails(f"{self._path} comes from a fit that {ended}, so it can't be trained further")
        num_batches = self._trainer.num_training_batches
        is_inside = position is not None and 0 < position.batch < num_batches
        if position is not None and (
            is_inside if self._content.resized is None else self._content.resized.was_inside_an_epoch
        ):
            self._fails(position.reason_of_cut(self._path))

    def restore(self, run_state: RunState) -> None:
        """Restore the state, and prove it. Call this when only the next fetch, or work still owed, comes after it.

        Raises:
            NotExactError: If `strict`, and a part of the state can't be restored.
        """
        self.admit(self.restored.put_back(self.saved(CREATED)))
        self._differences.all.not_exact += self.restored.not_exact
        state = Trust(self._options).unpickled(self._content.state, self._path)
        lost = run_state.load_state_dict(state)
        self.admit([*lost, *(run_state.objects_not_restored if self._options.strict else ())])
        self._prove(run_state, state)
        if self._differences.applied is not None:
            self._differences.applied.apply_window()
        self.notes = [*self.notes, *run_state.objects.notes]
        self.settle(without=run_state.objects_not_restored)

    def _prove(self, run_state: RunState, state: Mapping[str, Any]) -> None:
        """Read everything again, and report each leaf that is not as it was saved, unless it is reported already."""
        if self._content.part is None or self.position is None:
            return
        if self.restored.not_exact:  # a hook has changed what was loaded
            self.proving.forget()
        if self._differences.of_settings is not None:  # a branch has settings of its own
            self.proving.forget("optimizers", "schedulers")
        if self._content.resized is not None:
            self.proving.forget("loops")
            state = {}
            self.notes.append("what each rank keeps by itself is not compared: another number of ranks saved it")
        saved, now = self._content.part["fingerprint"]["loaders"], self._loaders.fingerprints
        if self._loaders.exactness.reasons or any(saved.get(place, one) != one for place, one in now.items()):
            state = {name: one for name, one in state.items() if name != "loaders"}
        named = [f"{OBJECTS}.{line.partition(': ')[0]}" for line in run_state.objects_not_restored]
        found = self.proving.differences(run_state, state, self.position, without=named)
        if refused := self._differences.all.take_read_back(found):
            raise not_read_back(refused, path=self._path)

    @property
    def is_of_run(self) -> bool:
        """Whether the checkpoint is an autosave of the run that continues."""
        return self._choice.is_autosave and not self._choice.parent

    @property
    def report(self) -> ResumeReport | None:
        """The report, updated with anything that has since turned out not to be exact: a worker may report late."""
        reasons = self._differences.all.not_exact
        reasons = [*reasons, *self._loaders.exactness.reasons]
        return self._report and replace(self._report, not_exact=tuple(reasons), proof=self.proving.proof)

    def settle(self, *, without: tuple[str, ...] = ()) -> None:
        """End the resume and report it.

        Args:
            without: A line for each part of the object state that is not as it was.
        """
        if not self.is_pending:
            return
        self.restored.close()
        self.notes += self.restored.notes
        self._loaders.resumed()
        self._files.settle()
        if not self._options.strict:  # otherwise, a rank that has lost something has raised, and is not here
            own = self._differences.all.not_exact
            own[:], without = of_all(self._differences.ranks, own, without)
        saved = self.owed("surroundings")
        changed = list(map(str, differences(saved, self._surroundings))) if saved else []
        parent = None if self._differences.of_settings is None else self.parent
        branched = () if parent is None else tuple(f"changed on this branch: {line}" for line in parent.changed)
        self.show(f"the arithmetic may differ in the last bits: {line}" for line in changed)
        report = ResumeReport(
            path=self._path,
            **place_of(self._trainer, self.position),
            global_step=self._trainer.global_step,
            restored=(*LIGHTNINGS_PARTS, *(TITLES[name] for name in TITLES if name in self._content.state)),
            objects=without,
            inherited=tuple(self.owed(NOT_EXACT) or ()),
            notes=(*self._differences.shown, *self.notes, *self._files.notes, *branched),
            seconds=time.monotonic() - self._began,
        )
        is_exact = not (without or self._differences.all.not_exact or self._content.resized)
        self.proving.begin_to_repeat(self._differences.ranks, self.position, is_exact=is_exact, changed=changed)
        self._report, self._content.state, self._content.callback_states = report, {}, {}
        tell_resumed(self.report or report, self._differences.shown, is_own=self.is_of_run)
        if self.position is not None and self.position.is_in_epoch:
            continue_bar_at(self._trainer, self.position)

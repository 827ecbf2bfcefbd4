"""The beginning of a fit: rank 0 opens the run and chooses what the fit continues from, and the others follow.

Rank 0 does so before its loggers begin their files, when no process group exists yet. The others learn the choice, or
its failure, as soon as one exists.

Whether the files of the checkpoint's run are this run's own, to continue, or another run's, to be left alone.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.checkpoint.schema import MARK, CheckpointPart
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.history import DONE, END
from lightning_faulttolerant.records.requests import replay_requested
from lightning_faulttolerant.trainer.files.compat import given_checkpoint
from lightning_faulttolerant.trainer.files.run_files import RunFiles, are_of_one_run, part_of
from lightning_faulttolerant.trainer.identity.finding import Finder, FoundFit, advise
from lightning_faulttolerant.trainer.identity.fingerprint import StartFingerprint, start_fingerprint
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import FIT, TrainerPosition
from lightning_faulttolerant.trainer.ranks.strategies import connect
from lightning_faulttolerant.trainer.resume.choice import Choice, choose, choose_evaluation, read_by_all, set_aside
from lightning_faulttolerant.trainer.run.derived_runs import Branch, ReplayedRun
from lightning_faulttolerant.trainer.run.directory import RunDirectory
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.settings import Options


def go_on_in_files(files: RunFiles, run: RunDirectory, choice: Choice) -> None:
    """Continue the files of the run that `choice` belongs to. Call it before loggers begin their own.

    An autosave always belongs to the run itself. Another checkpoint counts as the run's only if autosaves show that the
    run was killed. A user who starts again from a file of a finished run must not lose what that run logged after it.
    """
    _continue(files, run, choice)
    if not files.has_config:
        return
    ended_at_once = choice.autosave is None and (run.was_killed or _was_stopped(run))
    if files.continues or choice.is_autosave or ended_at_once:
        files.let_config_be_there()


def _was_stopped(run: RunDirectory) -> bool:
    """Return whether the last recorded end of the run is a stop: it may come before there is anything to save."""
    try:
        ends = [line for line in run.history.lines() if line.get("event") in (END, DONE)]
    except Exception as error:  # noqa: BLE001 - training does not depend on it
        run.history.announce(error)
        return False
    return bool(ends) and bool(ends[-1].get("by"))


def _continue(files: RunFiles, run: RunDirectory, choice: Choice) -> None:
    part = choice.part
    if part is None and choice.autosave is not None:
        autosave, given = part_of(choice.autosave), part_of(choice.path)
        # The file may be of another run in the same directory: that run must not lose what it logged and saved later.
        part = given if not _is_finished(autosave) and are_of_one_run(given, autosave) else None
    if part is not None and MARK in part:
        files.mark = part[MARK]
    written = _written(part)
    if part is None or written is None or part.get("inexact"):
        return
    # A finished fit must not drop what a later fit has logged to the same files.
    # Nor must an evaluation that ended by an exception which the script caught.
    position = TrainerPosition.from_state_dict(part["position"])
    later = run.later_autosaves() if position.is_finished or position.is_of_evaluation else []
    own = choice.path if choice.is_autosave else choice.autosave
    files.resume_loggers(written, later=[_written(part_of(path)) for path in later], autosave=own or "")
    files.continues = True


def _is_finished(part: CheckpointPart | None) -> bool:
    return part is not None and TrainerPosition.from_state_dict(part["position"]).is_finished


def _written(part: CheckpointPart | None) -> Mapping[str, object] | None:
    """Return what a checkpoint records about the files next to it; ``None`` if it was saved before the first batch."""
    return part["ranks"][0].get("files") if part is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _FirstRankMessage:
    """The message from rank 0 to the others once all are connected."""

    choice: Choice | None
    mark: str
    continues: bool
    moved_roots: Mapping[str, str]
    error: Exception | None
    place: PlaceOfFit


class _RunSearch:
    """Finds the run of a fit, and the checkpoint to continue from: its own, those of a branch, or those of a replay.

    Args:
        trainer: The trainer that runs the fit.
        options: The options of the callback.
        function: The Trainer's function that begins.
    """

    def __init__(self, trainer: Trainer, options: Options, function: str) -> None:
        self._trainer = trainer
        self.options = options
        self.function = function
        request = replay_requested()
        self.replayed = None if request is None else ReplayedRun(options, request)
        self._branch = Branch(options) if options.resume_from else None

    def _finder(self, checkpoint: object) -> Finder:
        options, function = self.options, self.function
        fingerprint = start_fingerprint(
            self._trainer,
            function=function,
            accepted=options.accepted,
            checkpoint=None if checkpoint is None else str(checkpoint),
        )
        return Finder(options, self._trainer.default_root_dir, fingerprint, function=function)

    def _own(self, finder: Finder) -> Finder:
        return finder if self._branch is None else self._branch.finder(finder)

    def find(self, checkpoint: object) -> tuple[FoundFit, StartFingerprint]:
        """Open the run.

        Args:
            checkpoint: What the script gave as ``ckpt_path``, if anything.
        """
        finder = self._finder(checkpoint)
        if self.replayed is not None:
            found = self.replayed.find(self._own(finder))
        else:
            found = finder.find() if self._branch is None else self._branch.find(finder)
        return found, finder.fingerprint

    def choose(self, found: FoundFit, path: object) -> Choice:
        """Choose what the fit continues from."""
        if self.replayed is not None:
            return self.replayed.choose(path)
        if self._branch is not None and self._branch.begins(found):
            return self._branch.choose(path)
        return choose(self._trainer, found.series, path, self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOfFit:
    """Where a fit is kept, as all ranks know it.

    Args:
        number: The number of the fit in its script, from 1; 0 while it is unknown.
        directory: The directory of the run, or its URL.
        token: A unique text that all ranks share.
        accepted: The names of the differences that this start or an earlier one accepts.
    """

    number: int
    directory: str
    token: str
    accepted: tuple[str, ...] = ()


class Beginning:
    """Decides what a fit continues from, and where it saves.

    Args:
        trainer: The trainer that runs the fit.
        options: The options of the callback.
        files: The files that the run has written besides its autosaves.
        function: The Trainer's function that begins.

    Raises:
        CheckpointError: If there is only one rank, and it can't save in its directory.
    """

    def __init__(self, trainer: Trainer, options: Options, files: RunFiles, *, function: str = FIT) -> None:
        self._trainer = trainer
        self._search = _RunSearch(trainer, options, function)
        self._files = files
        self._found: FoundFit | None = None
        """The run, held by this process, on rank 0."""
        self.place = PlaceOfFit(number=0, directory="", token=uuid.uuid4().hex)  # draws from no generator of the run
        self._error: Exception | None = None
        """The error that rank 0 tells the others once they are connected."""
        self.history = HistoryWriter(trainer)
        """The history of this fit, on rank 0."""
        self.ranks: Ranks = Alone()
        self.is_connected = trainer.world_size == 1
        self.choice: Choice | None = None
        """The checkpoint that the fit continues from; ``None`` until it is chosen."""

    def begin(self) -> None:
        """Open the run and choose, on rank 0. Call this before the loggers begin their files."""
        if self._trainer.local_rank or self._trainer.node_rank:  # the global rank is not always known yet
            return
        try:
            given = given_checkpoint(self._trainer)
            found = self._open(None if given is None else given[0])
            if self._search.function != FIT:
                self.choice = choose_evaluation(self._trainer, found.series, self._search.options)
                go_on_in_files(self._files, found.run, self.choice)
            elif given is not None:
                self.choice = self._search.choose(found, given[0])
                if self.choice.parent is None and self._search.replayed is None:  # otherwise the files stay as they are
                    self._files.experiments.tell_unknown()
                    go_on_in_files(self._files, found.run, self.choice)
        except Exception as error:
            if self._trainer.world_size == 1:
                raise
            self._error = error  # the others wait for the process group, and learn it then

    def _open(self, checkpoint: object) -> FoundFit:
        function = self._search.function
        found, fingerprint = self._search.find(checkpoint)
        self._found = found
        accepted = tuple(found.start["accepted"])
        self.place = replace(self.place, number=found.number, directory=str(found.run.directory), accepted=accepted)
        if function != FIT:
            self._set_other_aside(found, fingerprint)
        self.history = HistoryWriter(self._trainer, found.run.history, fit=found.number, function=function)
        self.history.begin(self._search.options.script, directory=self.place.directory)
        return found

    def _set_other_aside(self, found: FoundFit, fingerprint: StartFingerprint) -> None:
        """Set the autosaves of an evaluation aside that started otherwise than the one that begins."""
        lines = fingerprint.differs(found.start)
        if not lines:
            return
        aside = found.series.set_aside("another-evaluation")
        found.run.start_again(found.number, fingerprint.state_dict())
        if aside is not None:
            tell(f"This {self._search.function} starts over: {'; '.join(lines)}. Its autosaves are now in {aside}.")

    def connect(self) -> Ranks:
        """Connect the ranks, and send rank 0's choice to the others; a collective.

        Raises:
            Exception: The error of `begin` on rank 0, raised on every rank.
        """
        self.ranks = connect(self._trainer)
        self.is_connected = True
        self._tell()
        return self.ranks

    def choose(self, checkpoint_path: object) -> Choice:
        """Return what the fit continues from, and choose it first if that was not done before; a collective.

        Args:
            checkpoint_path: The checkpoint that Lightning would restore from.
        """
        if self.choice is None:
            self.choice = read_by_all(self.ranks, self._choose_on_first(checkpoint_path))
        return self.choice

    def _choose_on_first(self, checkpoint_path: object) -> Choice:
        """Choose on rank 0, and return its choice on every rank, or raise its error; a collective."""
        choice, error = None, None
        if self.ranks.rank == 0 and self._found is not None:
            try:
                choice = self._search.choose(self._found, checkpoint_path)
            except Exception as failure:
                if self.ranks.num_ranks == 1:
                    raise
                error = failure
        own = (choice and choice.with_checkpoint(None), error and _picklable(error))
        told: tuple[Choice, Exception | None] = self.ranks.from_first("what the fit continues from", own)
        if told[1] is not None:
            raise error or told[1]
        return choice or told[0]

    def _tell(self) -> None:
        if self.ranks.num_ranks == 1:
            return
        own = _FirstRankMessage(
            choice=self.choice and self.choice.with_checkpoint(None),
            mark=self._files.mark,
            continues=self._files.continues,
            moved_roots=self._files.moved_roots,
            place=self.place,
            error=self._error and _picklable(self._error),
        )
        told: _FirstRankMessage = self.ranks.from_first("what the fit continues from", own)
        if told.error is not None:
            raise self._error or told.error
        if self.ranks.rank > 0:
            self._files.mark, self._files.continues = told.mark, told.continues
            self._files.go_to_roots(told.moved_roots)
            self.choice, self.place = told.choice, told.place
        if self.choice is not None:
            self.choice = read_by_all(self.ranks, self.choice)

    @property
    def series(self) -> AutosaveSeries | None:
        """The autosaves of this fit, on rank 0."""
        return None if self._found is None else self._found.series

    @property
    def source(self) -> str | None:
        """The checkpoint that the fit started from, if any."""
        return None if self.choice is None else self.choice.path

    def has_later_autosaves(self) -> bool:
        """Return whether a later fit or evaluation of the script has autosaves; on rank 0, which tells the others."""
        found = self.ranks.rank == 0 and self._found is not None and bool(self._found.run.later_autosaves())
        return bool(self.ranks.from_first("later autosaves", found))

    def set_aside(self) -> None:
        """Set aside the autosaves that the choice does not continue from."""
        if self.series is not None and self.choice is not None:
            set_aside(self.series, self.choice)

    def forget_checkpoint(self) -> None:
        """Free the memory of the checkpoint: it is as large as the model and its optimizers together."""
        self.choice = self.choice and self.choice.with_checkpoint(None)

    def end(self, exception: BaseException | None) -> None:
        """Record how the fit ended, and advise on an error of a run that differs."""
        if exception is not None:
            advise(exception, self.choice)
            self._files.experiments.end(exception)
        self.history.end(exception)

    def end_fit(self) -> None:
        """Note that the fit finished."""
        if self._found is not None:
            self._found.run.end_fit(self._found.number)

    def close(self) -> None:
        """Close the connections. Leave the directory if this process was created for the fit. May be called twice."""
        self.ranks.close()
        if self._found is not None:
            self._found.run.leave()


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error that can't be sent is sent as text
        return CheckpointError(f"Rank 0: {type(error).__name__}: {error}")
    return error

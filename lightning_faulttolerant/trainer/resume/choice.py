"""The checkpoint that a fit continues from, and which autosaves are trusted.

It is our newest autosave, the one that the user passed, or none. Objects that ``weights_only=True`` would refuse are
unpickled only from trusted autosaves.
"""

from __future__ import annotations

import logging
import os
import pickle
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.ranks import RankReader, Ranks, check, identity_of
from lightning_faulttolerant.checkpoint.schema import (
    KEY,
    PICKLED,
    RANKS,
    CheckpointPart,
    checked_part,
    part_in,
    read_summary,
)
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.trust import Packed, classes_in, lines_to_allow, unpack, why_not_trusted
from lightning_faulttolerant.checkpoint.verify import load_written, unsafe_paths, verify_path
from lightning_faulttolerant.errors import (
    CheckpointError,
    NoValidCheckpointError,
    UnsafeCheckpointError,
    worded,
)
from lightning_faulttolerant.records.runs import Parent
from lightning_faulttolerant.state.objects.leaves import has_pickles, unpickled
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from lightning_faulttolerant.storage.store import is_url, local_path, open_file
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.files.run_files import are_of_one_run, load
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition, progress_of
from lightning_faulttolerant.trainer.process import OBJECTS, TRUST_VARIABLE
from lightning_faulttolerant.trainer.ranks.elastic import Resized
from lightning_faulttolerant.trainer.settings import Options

_log = logging.getLogger(__name__)

_GRANT = f"pass FaultTolerance(trust_autosaves=True) or set {TRUST_VARIABLE}=1"


@final
class Trust:
    """Decides which objects may be in autosaves, and which autosaves may be unpickled.

    Args:
        options: The callback's options: whether the user grants or forbids it, and whether a refusal is an error.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._known: set[str] = set()

    def why_not(self, path: str) -> str | None:
        """Return why an autosave, or a directory of autosaves, is not trusted, or ``None`` if it is."""
        if self._options.trust_autosaves is not None:
            return None if self._options.trust_autosaves else "trust_autosaves forbids it"
        reasons = map(why_not_trusted, _files_of(path) or [path])
        return next((reason for reason in reasons if reason is not None), None)

    def is_trusted_series(self, series: AutosaveSeries) -> bool:
        """Return whether autosaves in the series are trusted now."""
        return self._why_not_in(os.fspath(series.directory)) is None

    def _why_not_in(self, directory: str) -> str | None:
        """Return why a directory of autosaves is not trusted. Create the directory if it does not exist."""
        if not is_url(directory):
            os.makedirs(local_path(directory), exist_ok=True)
        return self.why_not(directory)

    def unpickled(self, state: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Return the state of a rank, with the objects unpickled that its object state holds as bytes.

        Raises:
            UnsafeCheckpointError: If there are such bytes, and the checkpoint is not trusted.
        """
        objects = state.get(OBJECTS) or {}
        if not has_pickles(objects):
            return state
        reason = self.why_not(path)
        if reason is not None:
            raise UnsafeCheckpointError(
                f"{path} is not trusted: {reason}. It holds parts of the object state as bytes, and unpickling them "
                f"can run any code. If you trust everyone who can write there, {_GRANT}."
            )
        return {**state, OBJECTS: unpickled(objects)}

    def check(self, packed: Packed, checkpoint: Mapping[str, object], directory: str) -> None:
        """Refuse to write objects that a resume could not load. Call this before the checkpoint is written.

        Args:
            packed: Lightning's checkpoint, with the objects that would not load packed as bytes.
            checkpoint: The checkpoint to write.
            directory: The directory to write to.

        Raises:
            UnsafeCheckpointError: If a value would not load, or, under ``strict``, only from a trusted directory.
        """
        _refuse_unsafe(checkpoint, packed.failures)
        new = packed.pool.keys() - self._known
        if not new:
            return
        self._known |= new
        reason = self._why_not_in(directory)
        if reason is None:
            return
        text = _refusal(packed, reason)
        if self._options.strict:
            raise UnsafeCheckpointError(text)
        _log.warning("%s\nBecause strict is off, they are saved anyway. The next start needs this trust.", text)

    def written(self, pool: Mapping[str, object], path: str, *, is_first: bool) -> None:
        """Let no other user write to an autosave that holds objects as bytes. Check that the first one can be loaded.

        Args:
            pool: The objects.
            path: The autosave.
            is_first: Whether it is the first of the fit.

        Raises:
            CheckpointError: If the first one can't be loaded.
        """
        if pool and not is_url(path):
            for place in (path, *_files_of(path)):
                if os.path.exists(place):
                    os.chmod(place, os.stat(place).st_mode & ~(stat.S_IWGRP | stat.S_IWOTH) & 0o7777)
        if is_first:
            checkpoint = load_written(path)
            for rank in range(len(checkpoint[KEY][RANKS])):  # the bytes have come over the network
                check(checkpoint[KEY], rank)
            if pool and self.why_not(path) is None:
                drawn = rng_state()
                unpack(checkpoint, checkpoint[KEY][PICKLED])
                set_rng_state(drawn)

    def restore(self, checkpoint: dict[str, object], pool: Mapping[str, object] | None, path: str, **more: Any) -> None:
        """Restore the objects that were kept as bytes.

        Args:
            checkpoint: The checkpoint that Lightning restores from.
            pool: The objects.
            path: The autosave that holds them.
            more: As in `unpack`.

        Raises:
            UnsafeCheckpointError: If there are any objects, and the autosave is not trusted.
            CheckpointError: If an object can't be created again.
        """
        if not pool:
            return
        reason = self.why_not(path)
        if reason is not None:
            raise UnsafeCheckpointError(
                f"{path} is not trusted: {reason}. It holds objects as bytes, and unpickling them can run any code:\n"
                f"{_listed(pool)}\n"
                f"If you trust everyone who can write there, {_GRANT}. If nobody else has written there, allow only "
                "yourself to write (chmod go-w)."
            )
        unpack(checkpoint, pool, **more)


def _files_of(path: str) -> list[str]:
    """Return the files and folders in an autosave that is a directory, and none for any other."""
    directory = local_path(path)
    if is_url(path) or not os.path.exists(os.path.join(directory, METADATA_NAME)):
        return []
    inside = ((root, name) for root, folders, files in os.walk(directory) for name in (*folders, *files))
    return sorted(os.path.join(root, name) for root, name in inside)


def _refuse_unsafe(checkpoint: Mapping[str, object], failures: Mapping[str, str]) -> None:
    paths = unsafe_paths(checkpoint)
    if paths:
        named = [f"{path} ({failures[path]})" if path in failures else path for path in paths]
        raise UnsafeCheckpointError(
            "These keys of the checkpoint would not load again with torch.load(weights_only=True), so this run could "
            f"not be resumed: {', '.join(named)}. Let state_dict, on_save_checkpoint, or save_hyperparameters return "
            "numbers, strings, tensors, lists, and dicts, or objects that can be pickled."
        )


def _refusal(packed: Packed, reason: str) -> str:
    lines = lines_to_allow(packed.values)
    allow = "" if lines is None else "\nOr allow the classes before the fit:\n\n    import torch\n    "
    return (
        "These keys of the checkpoint hold objects that torch.load(weights_only=True) refuses:\n"
        f"{_listed(packed.pool)}\n"
        f"A resume unpickles them only if nobody else can write there, but {reason}. Allow only yourself to write "
        "there (chmod go-w, umask 022), or save elsewhere: pass FaultTolerance(dirpath=...). Or, if you trust "
        f"everyone who can write there, {_GRANT}." + allow + "\n    ".join(lines or ())
    )


def _listed(pool: Mapping[str, object]) -> str:
    return "\n".join(f"  {place}: {kind}" for place, kind in classes_in(pool).items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The checkpoint that a fit starts from.

    Args:
        path: The checkpoint, or ``None`` for a fresh start.
        origin: The checkpoint that the user named for this fit, if any. The autosaves continue it.
        checkpoint: The content of the checkpoint, if it was read already.

    Raises:
        DamagedCheckpointError: If our part of the checkpoint lacks a key, or holds a value of the wrong type.
    """

    path: str | None
    origin: str | None
    checkpoint: dict[str, Any] | None = None
    sets_aside: str | None = None
    """The newest autosave of this run, if the autosaves are to be set aside once the fit has begun."""
    is_autosave: bool = False
    """Whether the checkpoint is one of our autosaves, which the user did not name."""
    autosave: str | None = None
    """The newest autosave of this run, if the fit starts from another checkpoint."""
    parent: Parent | None = None
    """The parent of the branch that begins here. The checkpoint is one of its autosaves."""

    part: CheckpointPart | None = field(init=False)
    """Our part of the checkpoint."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", part_in(self.checkpoint, self.path))

    @property
    def continues(self) -> bool:
        """Whether the fit continues where this run was, rather than starting over."""
        return self.is_autosave or (self.autosave is not None and self.sets_aside is None)

    def with_checkpoint(self, checkpoint: dict[str, object] | None) -> Choice:
        """Return the choice with the content that Lightning has read, or without content once it is restored."""
        return replace(self, checkpoint=checkpoint)


def origin_of(given: Any) -> str | None:
    """Return the checkpoint that the user named for a fit.

    Args:
        given: The path that Lightning derived from the ``ckpt_path`` of this fit.
    """
    return None if given is None else str(given) if is_url(given) else os.path.realpath(local_path(given))


def choose(trainer: Trainer, series: AutosaveSeries, given: object, options: Options) -> Choice:
    """Choose what the fit starts from.

    Args:
        trainer: The trainer that runs the fit.
        series: The autosaves of this fit.
        given: The path that Lightning derived from the ``ckpt_path`` of this fit.
        options: Say whether to resume at all.
    """
    path = origin_of(given)
    is_newest = path is not None and compat.is_newest_of_trainer(trainer, path)
    origin = None if is_newest else path
    if not options.auto_resume:
        series.set_aside("not-resumed")
        return Choice(path=_as_given(given), origin=origin)
    try:
        found = series.load_newest(_load_of(trainer))
    except NoValidCheckpointError as damages:
        if not is_newest:
            raise
        _log.warning("%s This fit continues from %s, to which ckpt_path resolves.", damages, path)
        found = None
    if found is None:
        return Choice(path=_as_given(given), origin=origin)
    newest, ours = found
    part = checked_part(ours.get(KEY), newest)
    if path is None or (origin is not None and part["origin"] == origin):
        return Choice(path=newest, origin=origin, checkpoint=ours, is_autosave=True)
    if not is_newest and not _is_of_the_run(path, part):
        return Choice(path=_as_given(given), origin=origin, sets_aside=newest, autosave=newest)
    origin = part["origin"]
    why = _why_not(path, ours)
    if why is None:
        tell(f"This fit continues from {path}, which is further than {newest}, the newest autosave of this run.")
        return Choice(path=_as_given(given), origin=origin, autosave=newest)
    why.tell(path, newest)
    return Choice(path=newest, origin=origin, checkpoint=ours, is_autosave=True)


def _load_of(trainer: Trainer) -> Callable[[str], dict[str, object]]:
    """Return what verifies a whole autosave and loads what rank 0 needs of it."""
    return partial(RankReader(rank=0, num_ranks=trainer.world_size).load, verifies_all=True)


def choose_evaluation(trainer: Trainer, series: AutosaveSeries, options: Options) -> Choice:
    """Choose what an evaluation continues from: its newest autosave, if it has any."""
    if not options.auto_resume:
        series.set_aside("not-resumed")
        return Choice(path=None, origin=None)
    found = series.load_newest(_load_of(trainer))
    if found is None:
        return Choice(path=None, origin=None)
    checked_part(found[1].get(KEY), found[0])
    return Choice(path=found[0], origin=None, checkpoint=found[1], is_autosave=True)


def set_aside(series: AutosaveSeries, choice: Choice) -> None:
    """Set aside the autosaves that `choice` does not continue from."""
    if choice.sets_aside is None:
        return
    aside = series.set_aside("another-ckpt_path")
    _log.warning(
        "This fit starts from %s. The earlier autosaves of this run, which had another ckpt_path, are now in %s.",
        choice.path, aside,
    )  # fmt: skip


def _as_given(given: object) -> str | None:
    return None if given is None else str(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Why:
    """The reason to prefer the newest autosave to a checkpoint that the user named."""

    reason: str
    is_damage: bool = False

    def tell(self, path: str, newest: str) -> None:
        """Report the reason, and how to start from the named checkpoint instead."""
        if self.is_damage:
            reason = f"{path} can't be used, so this run continues from its newest autosave: {self.reason}"
            advice = "To start from ckpt_path anyway, pass FaultTolerance(auto_resume=False) once:"
            _log.warning("%s %s the autosaves are then set aside.", reason, worded(advice))
        else:
            tell(
                f"This fit continues from {newest}, the newest autosave of this run: {path} {self.reason}. To start"
                " from ckpt_path anyway, pass FaultTolerance(auto_resume=False) once: the autosaves are then set"
                " aside."
            )


def _is_of_the_run(path: str, ours: CheckpointPart) -> bool:
    """Return whether a checkpoint that the user named was written by the run that wrote our autosave.

    A checkpoint that can't be read may be from any run. It is left to Lightning, like any other file of the user.
    """
    try:
        part = _content_of(path)[0].get(KEY)
    except Exception as error:  # noqa: BLE001 - torch.load raises a different error for each kind of damage
        _log.debug("%s can't be read: %s", path, error)
        return False
    return are_of_one_run(part, ours)


def _why_not(path: str, ours: Mapping[str, Any]) -> _Why | None:
    """Return the reason to prefer our autosave to a file of this run, or ``None`` if the file is further on.

    A file that can't be resumed exactly is never preferred: the autosave is exact, and costs a few batches at most. Nor
    is a file that is damaged, or that ``weights_only=True`` refuses: the fit would fail at each start.
    """
    try:
        if not is_url(path) and os.path.isdir(path) and not os.path.exists(os.path.join(path, METADATA_NAME)):
            raise CheckpointError(f"It has no {METADATA_NAME}: it is not complete.")
        theirs, is_refused = _content_of(path)
        part = theirs.get(KEY)
        if progress_of(ours, ours[KEY]) >= progress_of(theirs, part):
            return _Why(reason="is not further")
        if not _can_be_exact(part):
            return _Why(reason="can't be resumed exactly")
        verify_path(path)
        if not is_refused:
            return None
        reason = "It holds an object that torch.load(weights_only=True) refuses."
    except (FileNotFoundError, IsADirectoryError):
        return None
    except Exception as error:  # noqa: BLE001 - torch.load raises a different error for each kind of damage
        reason = _damage_of(path) or f"{type(error).__name__}: {error}."
    return _Why(reason=reason, is_damage=True)


def _content_of(path: str) -> tuple[Mapping[str, Any], bool]:
    """Return a checkpoint's content, and whether ``weights_only=True`` refuses it. If so, the content is a summary."""
    try:
        return load(path), False
    except pickle.UnpicklingError:
        with open_file(path) as file:
            content: Mapping[str, object] = read_summary(file, name=path).content
        return content, True


def _damage_of(path: str) -> str | None:
    try:
        verify_path(path)
    except (OSError, CheckpointError) as damage:
        return str(damage)
    return None


def _can_be_exact(part: CheckpointPart | None) -> bool:
    return (
        part is not None and TrainerPosition.from_state_dict(part["position"]).is_resumable and not part.get("inexact")
    )


def read_by_all(ranks: Ranks, choice: Choice) -> Choice:
    """Read the autosave on the other ranks, too, and return the choice with its content; a collective.

    Rank 0 has verified all of it. The others verify what they read. All must have read the same: a path may lead each
    node to a separate disk, with an autosave of that name.

    Args:
        ranks: The ranks that continue.
        choice: What rank 0 has chosen.

    Raises:
        CheckpointError: On each rank, if one of them can't read it, or reads another one.
    """
    if ranks.num_ranks == 1 or not choice.is_autosave:
        return choice
    failure, identity = "", ""
    try:
        if ranks.rank > 0:
            own = RankReader(rank=ranks.rank, num_ranks=ranks.num_ranks)
            choice = choice.with_checkpoint(own.load(str(choice.path), verifies_all=False))
        identity = identity_of(str(choice.path))
    except Exception as error:  # noqa: BLE001 - raised on all ranks below
        failure = f"{type(error).__name__}: {error}"
    if found := _wrong(ranks.to_all("read", (failure, identity))):
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
        raise CheckpointError(
            f"{choice.path} can't be read by all ranks. {lines}. Every rank resumes from the same file: pass"
            " FaultTolerance(dirpath=...) a directory or URL that all of them see."
        )
    return choice


def _wrong(read: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Return what is wrong with what the ranks have read, by their numbers."""
    _, first = read[0]
    other = "its file of this name differs from that of rank 0"
    found = {rank: failure or other * (identity != first) for rank, (failure, identity) in enumerate(read)}
    return {rank: text for rank, text in found.items() if text}


@dataclass(kw_only=True, slots=True)
class Content:
    """What a checkpoint holds for this rank.

    Args:
        part: Our part, if it has one, without the states of the ranks once this rank's is read.
        callback_states: The states of Lightning's callbacks, by their keys.
        state: The state of this rank by the names in `TITLES`; empty once it is restored.
        position: Where it was taken; ``None`` if the fit does not continue from there.
        resized: Builds the state, if a different number of ranks saved.
    """

    part: CheckpointPart | None
    callback_states: Mapping[str, Any]
    state: Mapping[str, Any] = field(default_factory=dict)
    position: TrainerPosition | None = None
    resized: Resized | None = None

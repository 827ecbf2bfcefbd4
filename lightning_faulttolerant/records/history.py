"""The history of a run: when it was started, resumed, saved, and ended, over all its processes.

Rank 0 writes it to ``<dirpath>/<run_id>/history.jsonl``, here or in an object store. It stays there when the autosaves
are removed. Each line is one JSON object. ``event`` is its kind, ``fit`` the number of the fit in its script (from 1),
and ``time`` the time in seconds since 1970. Evaluations (``validate``, ``test``, ``predict``) are recorded like fits,
and share their numbers. Places are ``epoch`` (from 0), ``batch`` (finished batches of the epoch), and ``global_step``;
in an evaluation and in a validation run also ``num_validated`` (its finished batches). Lines from inside a validation
run have ``validation``: ``since`` (when this process began or continued it), ``first`` (its first batch in this
process), ``waited`` (seconds of waiting for autosaves since then). The kinds, and their other keys:

- ``begin``: a fit begins, before anything is read or set up for it. ``process`` (a name for the process of the script,
  which may not be the one that trains), ``pid``, ``host``, ``process_began`` (when that process was started),
  ``function`` (``fit``, ``validate``, ``test``, or ``predict``; without it, ``fit``), ``hang``: ``since`` and ``until``
  of the last hang that a watcher of this run has noticed.
- ``start``: it can fetch its first batch. ``num_ranks``, the place where it resumes, ``continues`` (whether it
  continues where this run was), ``resumed``: ``null``, or ``path``, ``position`` (in words), ``seconds`` (for
  restoring), ``restored``, ``not_exact``, ``notes`` (lists of strings), ``repeats`` (how many batches ran again, or
  ``null``).
  A branch has ``parent``: the run and the autosave that it began from, its place, and ``changed`` (lines).
- ``autosave``: an autosave is written and verified. Its place, ``name`` (of its file), ``taken`` (when its state was
  taken), ``seconds`` (that training waited for it), ``bytes``, ``in_background`` (whether it was written so),
  ``slow``: the ranks that were slow over the last three autosaves (``rank``, ``section``, ``slower``, ``number``).
- ``autosaves``: replaces several older autosaves when the file is shortened. ``number``; ``seconds`` and ``bytes``, the
  sums; ``since`` (the time of the first); ``longest``: the line of the one that training waited longest for.
- ``validation``: a validation run inside a fit is over, or several short ones are. The place of the last one,
  ``number``, ``since``, ``until``, ``first``, ``num_batches`` (those that this process evaluated), ``seconds`` (without
  waiting for autosaves). Short ones are written together, before the next line.
- ``skipped``: a training batch is left out. Its place, ``text`` (why it could not be loaded, or empty). ``start`` has
  ``skipped``, a list of [epoch, batch], if earlier processes have left batches out.
- ``order``: the order of the samples in an epoch, once it is over. ``epoch``, and ``loaders``: by place, how all ranks
  share the samples (see `loader/remaining_batches.py`), or ``null`` where that is not known; ``num_batches``: how many
  batches the epoch has, or ``null``.
- ``unsaved``: nothing can be saved, because the disk is full or the store is not reached. For each stretch of time,
  only the last line counts. ``since`` (the time of the first try), ``until`` (when a save succeeded again, or
  ``null``), ``tries`` (saves that failed so far), ``text`` (why the last of them failed).
- ``incident``: the flight recorder has written an incident. The place of its step, ``step`` (its number over all
  epochs), ``text`` (what happened), ``name`` (of the file with the state before it, or empty).
- ``alive``: its place, every ten seconds, so that the time of a kill is known. A fit that is younger than a hundred
  seconds writes it whenever it is a tenth older, but at most once per second.
- ``end``: the fit is over, if the process could still write it. Its place, ``reason`` ("finished", "stopped by
  SIGTERM", or the name of an exception), ``by`` (what stopped it, such as "SIGTERM", if it was stopped), ``text`` (the
  reason at length, unless it has finished), ``saved``: the place of the last autosave, or ``null``.
- ``done``: the script ended normally, and its autosaves are removed. Without ``fit``.
- ``shortened``: the first line, if whole processes were removed from the file. ``number`` (of them), ``since``.

In a fit, ``autosave``, ``alive``, and ``end`` have ``data``: for how many seconds its training has waited for data.

A line belongs to the ``begin`` before it. ``history_parser.py`` reads the lines, and ``accounting.py`` accounts for
the time.

The time that each rank needs itself tells which ranks are slow, and in which section. Ranks that train
together wait for each other in each step. So all take equally long, and only the time that a rank spends before it
waits tells which one is slow. A rank is slow if the others would be done sooner without it: if a batch takes it 20 %
longer than it would take the median of the other ranks. With two ranks, that is the other one.

If user code waits for other ranks inside a section, what a rank loses there the others lose by waiting. Their sums are
then equal, and none is called slow.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from lightning_faulttolerant.records.runs import Parent

BEGIN = "begin"
START = "start"
AUTOSAVE = "autosave"
AUTOSAVES = "autosaves"
VALIDATION = "validation"
UNSAVED = "unsaved"
INCIDENT = "incident"
SKIPPED = "skipped"
ALIVE = "alive"
END = "end"
DONE = "done"
SHORTENED = "shortened"

FINISHED = "finished"
"""The reason of a fit that has finished."""
FIT = "fit"
EVALUATIONS = ("validate", "test", "predict")

FILE_NAME = "history.jsonl"
DEFAULT_FOLDER = "fault_tolerance"
"""The folder for runs below the Trainer's directory, if no other place is given."""
ALIVE_EVERY_SECONDS = (1.0, 10.0)
"""The shortest and the longest interval."""
ALIVE_EVERY_SHARE = 0.1
"""The share of the fit's age: this way the time of a kill is known for a short run too."""


def name_of(path: str) -> str:
    r"""Return the name of a file or directory, as in ``autosave`` lines.

    Args:
        path: A path of this system or another one, or a URL.

    Example:
        >>> name_of("s3://bucket/fit-1/a.ckpt"), name_of("C:\\runs\\fit-1\\a.ckpt"), name_of("/runs/a.ckpt/")
        ('a.ckpt', 'a.ckpt', 'a.ckpt')
    """
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """A place in a run.

    Args:
        epoch: The epoch, from 0.
        batch: The number of its finished batches.
        global_step: The number of finished optimizer steps.
        num_validated: The number of finished batches of an evaluation, or of the validation run after that batch;
            ``None`` elsewhere.
    """

    epoch: int
    batch: int
    global_step: int
    num_validated: int | None = None

    @property
    def order(self) -> tuple[int, int, float]:
        """A value that is greater for later places. A validation run after a batch is over before the next batch."""
        return self.epoch, self.batch, math.inf if self.num_validated is None else self.num_validated


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The checkpoint that a fit was resumed from.

    Args:
        path: The checkpoint.
        position: Where it was taken, in words.
        seconds: How long restoring took, until the first batch could be fetched.
        restored: The parts that were restored.
        not_exact: What did not continue exactly, each with the reason.
        notes: What is worth knowing.
        continues: Whether it continues where this run was; if not, it begins a new run from a given checkpoint.
        repeats: How many batches an earlier process had run from there on; ``None`` if that is not known.
    """

    path: str
    position: str
    seconds: float
    restored: tuple[str, ...] = ()
    not_exact: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    continues: bool = True
    repeats: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Autosave:
    """One autosave, or several older ones with only known sums.

    Args:
        time: When it was written and verified; for several, the last one. In seconds since 1970, like all times.
        taken: When its state was taken.
        place: Where its state was taken; for several, that of the one that training waited longest for.
        seconds: How long training waited, in total.
        num_bytes: The size of all; ``None`` if not known.
        is_in_background: Whether it was written in the background.
        name: The name of its file; empty for several.
        number: The number of autosaves that it stands for.
        longest: How many seconds training waited for the one that took longest.
        slow: The ranks that were slow then.
    """

    time: float
    taken: float
    place: RunPlace | None
    seconds: float
    num_bytes: int | None
    is_in_background: bool = False
    name: str = ""
    number: int = 1
    longest: float
    slow: tuple[SlowRank, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """A stretch of time in which nothing could be saved.

    Args:
        since: The time of the first save that failed.
        until: When a save succeeded again; ``None`` if none has in that fit.
        tries: How many saves failed.
        text: Why the last of them failed.
    """

    since: float
    until: float | None = None
    tries: int = 1
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validations:
    """A validation run inside a fit, or the part of it that one process ran; or several of which only sums are known.

    Args:
        since: When the process began or continued it; for several, the first one.
        until: When it ended, or its last known moment; for several, the last one.
        place: After which batch it came; for several, the last one.
        seconds: How long it took, without waiting for autosaves; for several, the sum.
        num_batches: How many of its batches the process evaluated; for several, the sum.
        number: The number of validation runs that it stands for.
        is_over: Whether it came to its end.
    """

    since: float
    until: float
    place: RunPlace | None
    seconds: float
    num_batches: int
    number: int = 1
    is_over: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedBatch:
    """A training batch that was left out.

    Args:
        epoch: Its epoch, from 0.
        batch: Its number in the epoch, from 0.
        text: Why it could not be loaded; empty if it was, or if that is not known.
    """

    epoch: int
    batch: int
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitHistory:
    """One fit in one process, or one evaluation.

    Args:
        number: Its number in its script, from 1.
        function: The Trainer's function: ``fit``, ``validate``, ``test``, or ``predict``.
        began: When it began.
        started: When it could fetch its first batch; ``None`` if it never got that far.
        num_ranks: How many ranks trained.
        place: Where it continued.
        resumed: What it was resumed from; ``None`` if it began at the beginning.
        autosaves: Its autosaves, in order of time.
        unsaved: The stretches in which nothing could be saved, in order of time.
        validations: Its validation runs, in order of time.
        incidents: What its flight recorder has written, each in words, in order of time.
        alive: Times and places at which it is known to have been alive; at least the last one.
        data: Times, and for how many seconds its training had waited for data by then.
        last_seen: Its last known moment, including its end.
        reason: Why it ended: "finished", "stopped by SIGTERM", the name of an exception. ``None`` if it could not write
            the reason: it was killed, or still runs.
        by: What stopped it: "SIGTERM"; empty if it was not stopped.
        text: The reason at length.
        last_place: The last known place.
        saved: Where its last autosave was taken, as recorded at its end.
        parent: What the run began from, if it is a branch.
        skipped: The training batches that it has left out, in order of time, and those that earlier processes had.
    """

    number: int
    function: str = FIT
    began: float
    started: float | None = None
    num_ranks: int | None = None
    place: RunPlace | None = None
    resumed: Resumed | None = None
    autosaves: tuple[Autosave, ...] = ()
    unsaved: tuple[Unsaved, ...] = ()
    validations: tuple[Validations, ...] = ()
    incidents: tuple[str, ...] = ()
    alive: tuple[tuple[float, RunPlace], ...] = ()
    data: tuple[tuple[float, float], ...] = ()
    last_seen: float
    reason: str | None = None
    by: str = ""
    text: str = ""
    last_place: RunPlace | None = None
    saved: RunPlace | None = None
    skipped: tuple[SkippedBatch, ...] = ()
    parent: Parent | None = None

    @property
    def is_evaluation(self) -> bool:
        """Whether it is a ``validate``, ``test``, or ``predict``."""
        return self.function != FIT

    @property
    def name(self) -> str:
        """Its name, which is that of the directory of its autosaves: ``fit-1``, ``test-2``."""
        return f"{self.function}-{self.number}"

    @property
    def num_autosaves(self) -> int:
        """How many autosaves were written and verified."""
        return sum(autosave.number for autosave in self.autosaves)

    @property
    def is_finished(self) -> bool:
        """Whether it has finished."""
        return self.reason == FINISHED

    @property
    def has_trained(self) -> bool:
        """Whether it did any work beyond its start; a finished fit that is only restored has not."""
        if self.started is None:
            return False
        return not (self.is_finished and self.last_place == self.place and not self.autosaves)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One start of the script.

    Args:
        began: When its process was started.
        pid: The process id; ``None`` if not known.
        host: The name of the machine.
        fits: Its fits, in order of their numbers.
        hang: When the last hang before it began, and when it was noticed; ``None`` if there was none.
    """

    began: float
    hang: tuple[float, float] | None = None
    pid: int | None = None
    host: str = ""
    fits: tuple[FitHistory, ...] = ()

    @property
    def last_seen(self) -> float:
        """The last time at which it is known to have been alive."""
        return max((fit.last_seen for fit in self.fits), default=self.began)

    @property
    def reason(self) -> str | None:
        """Why its last fit ended; ``None`` if it could not write the reason."""
        return self.fits[-1].reason if self.fits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """From a start at the beginning to the end of the script, over all processes that this took.

    Args:
        processes: The processes, in order of time.
        done: When the script ended normally; ``None`` if it has not, or could not record it.
    """

    processes: tuple[Process, ...]
    done: float | None = None

    @property
    def fits(self) -> tuple[FitHistory, ...]:
        """All fits of all processes."""
        return tuple(fit for process in self.processes for fit in process.fits)

    def skipped(self) -> dict[int, list[SkippedBatch]]:
        """Return the training batches that were left out, by the number of the fit, each once."""
        found: dict[int, dict[tuple[int, int], SkippedBatch]] = {}
        for fit in self.fits:
            for one in fit.skipped:
                of_fit = found.setdefault(fit.number, {})
                if one.text or (one.epoch, one.batch) not in of_fit:
                    of_fit[one.epoch, one.batch] = one
        return {number: [skips[place] for place in sorted(skips)] for number, skips in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Everything that is known of a run.

    Args:
        chapters: The chapters, the oldest first.
        num_forgotten: The number of processes at the beginning that are forgotten because the file was shortened.
        num_unread: The number of lines that could not be read: torn by a kill, or damaged.
    """

    chapters: tuple[Chapter, ...] = field(default=())
    num_forgotten: int = 0
    num_unread: int = 0


SECTIONS = ("data", "step", "evaluation", "save")
"""Waiting for data; hooks and the forward pass of a step, and everything after its backward pass; evaluation until its
last batch is done; the own state for a save until all states are gathered.
"""
SLOWER = 0.2
NUM_SAVES = 3

OwnSeconds = tuple[float, float, float, float]
"""The seconds that a rank has spent itself in each of the `SECTIONS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """A rank that keeps the others waiting.

    Args:
        rank: Its number.
        section: The section in which it loses most; one of `SECTIONS`.
        slower: By which share it takes longer than the median of the others, such as 0.2.
        number: For how many autosaves this was found.
    """

    rank: int
    section: str
    slower: float
    number: int = 1


def slow_ranks(of_ranks: Sequence[OwnSeconds], seconds: float) -> tuple[SlowRank, ...]:
    """Return the ranks that are slow.

    Args:
        of_ranks: What each rank has spent itself.
        seconds: How long all of them took together.

    Example:
        >>> slow_ranks([(0.1, 1.0, 0.0, 0.0), (0.6, 1.0, 0.0, 0.0)], 2.5)
        (SlowRank(rank=1, section='data', slower=0.25, number=1),)
    """
    if len(of_ranks) < 2:
        return ()
    totals = [sum(own) for own in of_ranks]
    in_order = sorted(totals)
    found = []
    for rank, total in enumerate(totals):
        lost = total - _median_of_others(in_order, total)
        if lost > SLOWER * (seconds - lost) > 0:
            section = _worst_section(of_ranks, rank)
            found.append(SlowRank(rank=rank, section=section, slower=round(lost / (seconds - lost), 3)))
    return tuple(found)


def _median_of_others(in_order: Sequence[float], one: float) -> float:
    """Return the median of sorted numbers without one of them, in constant time: there may be thousands of ranks."""
    place, number = bisect_left(in_order, one), len(in_order) - 1
    left, right = (in_order[index + (index >= place)] for index in ((number - 1) // 2, number // 2))
    return (left + right) / 2


def _worst_section(of_ranks: Sequence[OwnSeconds], rank: int) -> str:
    def lost(section: int) -> float:
        others = (own[section] for index, own in enumerate(of_ranks) if index != rank)
        return of_ranks[rank][section] - median(others)

    return SECTIONS[max(range(len(SECTIONS)), key=lost)]


def summed_times(found: Sequence[SlowRank]) -> list[SlowRank]:
    """Return one entry for each rank and section, the most frequent first, with the mean of how much slower it was.

    Args:
        found: The slow ranks of several autosaves.
    """
    sums: dict[tuple[int, str], tuple[int, float]] = {}
    for each in found:
        number, slower = sums.get((each.rank, each.section), (0, 0.0))
        sums[each.rank, each.section] = number + each.number, slower + each.number * each.slower
    made = [
        SlowRank(rank=rank, section=section, slower=slower / number, number=number)
        for (rank, section), (number, slower) in sums.items()
    ]
    return sorted(made, key=lambda each: (-each.number, each.rank))

"""How a run spent its time: which part of it counted, and what the rest was spent on.

The wall time of a chapter, from the start of its first process to its last known moment, is cut into **segments**
without gaps, each of one kind. So the sums of the kinds add up to the whole. These times are measured: the starts of
processes (by the system), the starts and ends of fits, the seconds that training waited for an autosave, the seconds
that restoring took, and the time of each autosave's state. The time of a kill is estimated: the process is taken to
have ended at its last sign of life, an autosave or the mark that it leaves every ten seconds (more often in its first
hundred seconds). Up to ten seconds of work after that (more if a single batch takes longer; sixty below a URL) are lost
and count as `DOWN` instead of `REDONE`. Both are lost time, so goodput does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_faulttolerant.records.history import Chapter

STARTING = "starting"
"""From the start of the first process until its fit could fetch its first batch, except the time for restoring."""
TRAINING = "training"
"""From the first batch of a fit to its end, except other kinds of time in between: the time that counted. It includes
the user's own checkpoints and everything else that the fit does.
"""
EVALUATION = "evaluation"
"""Validation runs inside a fit, and ``validate``, ``test``, and ``predict`` from their first batch to their end: this
time counts, too.
"""
DATA = "data"
"""Training waited for data. It is told apart in an `Account` only: in segments, it is a part of `TRAINING`."""
SAVING = "saving"
"""Training waited for an autosave."""
OUTSIDE = "outside"
"""From the end of a fit or evaluation of a script to the first batch of its next one, and from the last one to the
script's normal end.
"""
RESTORING = "restoring"
"""From the choice of a checkpoint until the first batch could be fetched, with that checkpoint restored."""
REDONE = "redone"
"""Training and evaluation that was done again: after the autosave that a later process resumed from."""
HUNG = "hung"
"""A process hung, until what watches the run noticed it. If nothing watches a run, a hang counts as `TRAINING` up to
the last sign of life, and then as `DOWN`.
"""
DOWN = "down"
"""No process: from the last sign of life of one process to the start of the next."""
RESTARTING = "restarting"
"""From the start of a later process until its fit could fetch its first batch, except the time for restoring. It
includes all earlier work that was already done, such as restoring finished fits.
"""

KINDS = (TRAINING, EVALUATION, DATA, SAVING, OUTSIDE, STARTING, RESTORING, REDONE, HUNG, DOWN, RESTARTING)
USEFUL = (TRAINING, EVALUATION)
"""The time that counted."""
LOST = (REDONE, HUNG, DOWN, RESTARTING)
"""The cost of faults, except restoring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of time in which one thing happened.

    Args:
        kind: One of `KINDS`.
        began: When it began, in seconds since 1970.
        ended: When it ended, in seconds since 1970.
        process: The index of the process in its chapter; for `HUNG` and `DOWN`, of the process that was gone.
        fit: The number of the fit that it belongs to; ``None`` outside fits.
    """

    kind: str
    began: float
    ended: float
    process: int
    fit: int | None = None

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.ended - self.began


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The seconds of each kind; together they are the total.

    Args:
        training: Training that counted, without waiting for data.
        evaluation: Evaluation that counted.
        data: Training that counted waited for data.
        saving: Training or evaluation waited for autosaves.
        outside: Between fits and evaluations, and after the last.
        starting: The first process, until its first batch.
        restoring: Checkpoints were restored.
        redone: Training and evaluation that was done again.
        hung: A process hung.
        down: No process.
        restarting: Later processes, until their first batch.
    """

    training: float = 0.0
    evaluation: float = 0.0
    data: float = 0.0
    saving: float = 0.0
    outside: float = 0.0
    starting: float = 0.0
    restoring: float = 0.0
    redone: float = 0.0
    hung: float = 0.0
    down: float = 0.0
    restarting: float = 0.0

    @property
    def total(self) -> float:
        """The wall time."""
        return math.fsum(getattr(self, kind) for kind in KINDS)

    @property
    def lost(self) -> float:
        """The cost of faults, except restoring."""
        return math.fsum(getattr(self, kind) for kind in LOST)

    @property
    def useful(self) -> float:
        """The time that counted: training and evaluation that was not done again."""
        return math.fsum(getattr(self, kind) for kind in USEFUL)

    @property
    def goodput(self) -> float:
        """The share of the wall time in which training or evaluation made lasting progress, from 0 to 1."""
        return self.useful / self.total if self.total > 0 else 0.0

    @property
    def goodput_while_up(self) -> float:
        """The same share of the time in which a process existed: waiting for a machine is not the run's fault."""
        up = self.total - self.down
        return self.useful / up if up > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChapterReport:
    """A chapter with the account of its time.

    Args:
        number: Its number in the history, from 1.
        chapter: The chapter.
        account: How its time was spent.
        segments: The same in order of time, without gaps.
    """

    number: int
    chapter: Chapter
    account: Account
    segments: tuple[Segment, ...]

    @property
    def began(self) -> float:
        """When its first process was started."""
        return self.segments[0].began

    @property
    def ended(self) -> float:
        """The last known moment."""
        return self.segments[-1].ended


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The content of a report about a run.

    Args:
        run_id: The id of the run.
        path: Its directory or URL.
        made: When the report was made, in seconds since 1970.
        chapters: The chapters to show, the oldest first; at least one.
        num_chapters: The number of all chapters.
        num_forgotten: The number of processes at the beginning that are no longer known.
        num_unread: The number of lines of its history that could not be read.
    """

    run_id: str
    path: str
    made: float
    chapters: tuple[ChapterReport, ...]
    num_chapters: int
    num_forgotten: int = 0
    num_unread: int = 0

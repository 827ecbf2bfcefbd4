"""Where the time of a run has gone: which part of it counted, and what the rest was spent on.

The wall time of a chapter, from the start of its first process to the last that is known of it, is cut into
**segments** without gaps, each of one kind. So the sums of the kinds add up to the whole. Measured are: the starts of
processes (by the system), the starts and ends of fits, the seconds that training waited for an autosave, those that
restoring took, and the time of which the state of each autosave is. Estimated is when a process was killed: it is taken
to have ended at its last sign of life, an autosave or the mark that it leaves every ten seconds (in its first hundred
seconds more often). Up to ten seconds of work (more if a single batch takes longer; sixty below a URL) that were done
after that, and lost, count as `DOWN` instead of `REDONE`; both are lost, so goodput does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_faulttolerant.records.history import Chapter

STARTING = "starting"
"""From the start of the first process until its fit could fetch its first batch, what was restored then aside."""
TRAINING = "training"
"""From the first batch of a fit to its end, what was saved or lost meanwhile aside: the time that counted. Validation
runs, the user's own checkpoints and all else that the fit does is in it.
"""
SAVING = "saving"
"""Training waited for an autosave."""
OUTSIDE = "outside"
"""From the end of a fit of a script to the first batch of its next one, and from the last fit to its normal end."""
RESTORING = "restoring"
"""From the choice of a checkpoint until the first batch could be fetched, with that checkpoint restored."""
REDONE = "redone"
"""Training that was done again: after the autosave that a later process has resumed from."""
DOWN = "down"
"""No process: from the last sign of life of one to the start of the next."""
RESTARTING = "restarting"
"""From the start of a later process until its fit could fetch its first batch, what was restored then aside; with all
that it did before which had been done already, such as restoring fits that were finished.
"""

KINDS = (TRAINING, SAVING, OUTSIDE, STARTING, RESTORING, REDONE, DOWN, RESTARTING)
LOST = (REDONE, DOWN, RESTARTING)
"""What faults cost, restoring aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of time in which one thing happened.

    Args:
        kind: One of `KINDS`.
        began: Seconds since 1970.
        ended: Likewise.
        process: Index of the process in its chapter; of `DOWN`, the one that was gone.
        fit: Number of the fit that it belongs to; ``None`` outside of fits.
    """

    kind: str
    began: float
    ended: float
    process: int
    fit: int | None = None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Seconds of each kind; together they are the total.

    Args:
        training: Training that counted.
        saving: Training waited for autosaves.
        outside: Between fits, and after the last.
        starting: The first process, until its first batch.
        restoring: Checkpoints were restored.
        redone: Training that was done again.
        down: No process.
        restarting: Later processes, until their first batch.
    """

    training: float = 0.0
    saving: float = 0.0
    outside: float = 0.0
    starting: float = 0.0
    restoring: float = 0.0
    redone: float = 0.0
    down: float = 0.0
    restarting: float = 0.0

    @property
    def total(self) -> float:
        """The wall time."""
        return math.fsum(getattr(self, kind) for kind in KINDS)

    @property
    def lost(self) -> float:
        """What faults cost, restoring aside."""
        return math.fsum(getattr(self, kind) for kind in LOST)

    @property
    def goodput(self) -> float:
        """Share of the wall time in which training went forward for good, from 0 to 1."""
        return self.training / self.total if self.total > 0 else 0.0

    @property
    def goodput_while_up(self) -> float:
        """The same share of the time in which there was a process: waiting for a machine is no fault of the run's."""
        up = self.total - self.down
        return self.training / up if up > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChapterReport:
    """A chapter with the account of its time.

    Args:
        number: In the history, from 1.
        chapter: What happened.
        account: Where its time has gone.
        segments: The same in the order of time, without gaps.
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
        """The last that is known of it."""
        return self.segments[-1].ended


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a report tells of a run.

    Args:
        run_id: Names the run.
        path: Its directory, or URL.
        made: When the report was made, seconds since 1970.
        chapters: Those that are shown, the oldest first; at least one.
        num_chapters: How many there are in all.
        num_forgotten: Processes at the beginning of which nothing is known any more.
        num_unread: Lines of its history that could not be read.
    """

    run_id: str
    path: str
    made: float
    chapters: tuple[ChapterReport, ...]
    num_chapters: int
    num_forgotten: int = 0
    num_unread: int = 0

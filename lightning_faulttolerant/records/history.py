"""The history of a run: when it was started, resumed, saved and ended, over all its processes.

Rank 0 writes it to ``<dirpath>/<run_id>/history.jsonl``, here or in an object store; it stays there when the autosaves
are removed. Each line is one JSON object with its kind under ``event``, the number of the fit in its script under
``fit`` (from 1), and the time, seconds since 1970, under ``time``. Places are ``epoch`` (from 0), ``batch`` (batches of
the epoch done) and ``global_step``. Kinds, and what they have besides:

- ``begin``: a fit begins, before anything is read or set up for it. ``process`` (names the process of the script, which
  may not be the one that trains), ``pid``, ``host``, ``process_began`` (when that process was started).
- ``start``: it can fetch its first batch. ``num_ranks``, the place where it resumes, ``resumes`` (whether it resumes
  where this run was), ``resumed``: ``null``, or ``path``, ``position`` (in words), ``seconds`` (that restoring took),
  ``exact``, ``not_exact``, ``notes`` (lists of texts).
- ``autosave``: one is written and verified. Its place, ``name`` (of its file), ``taken`` (the time of which its state
  is), ``seconds`` (that training waited for it), ``bytes``, ``after`` (whether it was written in the background).
- ``autosaves``: stands for several older ones, when the file was shortened. ``number``, ``seconds`` and ``bytes``, the
  sums; ``since`` (the time of the first); ``longest``: the line of the one that training waited longest for.
- ``unsaved``: nothing can be saved, because the disk is full or the store is not reached; of one stretch of time the
  last line counts. ``since`` (the time of the first try), ``until`` (when a save succeeded again, or ``null``),
  ``tries`` (saves that failed so far), ``text`` (why the last of them did).
- ``alive``: its place, every ten seconds, so that the time of a kill is known; of a fit that is younger than a hundred
  seconds whenever it is a tenth older, but at most each second.
- ``end``: the fit is over, if the process could still say so. Its place, ``reason`` ("finished", "stopped by SIGTERM",
  or the name of an exception), ``text`` (the same at length), ``saved``: the place of the last autosave, or ``null``.
- ``done``: the script came to its normal end, its autosaves are removed. Without ``fit``.
- ``shortened``: the first line, where the file was shortened by whole processes. ``number`` (of them), ``since``.

A line belongs to the ``begin`` before it. How lines are read is in ``chapters.py``, how time is accounted for in
``goodput.py``, how a file is shortened in ``shortening.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

BEGIN = "begin"
START = "start"
AUTOSAVE = "autosave"
AUTOSAVES = "autosaves"
UNSAVED = "unsaved"
ALIVE = "alive"
END = "end"
DONE = "done"
SHORTENED = "shortened"

FINISHED = "finished"
"""The reason of a fit that came to its end."""
STOPPED = "stopped by "
"""What the reason of a fit that was stopped begins with."""

FILE_NAME = "history.jsonl"
DEFAULT_FOLDER = "fault_tolerance"
"""Where runs are kept, below the Trainer's directory, if no other place is given."""
ALIVE_EVERY_SECONDS = (1.0, 10.0)
"""At least and at most."""
ALIVE_EVERY_SHARE = 0.1
"""Of the age of the fit: also of a short run it is known when it was killed."""


def name_of(path: str) -> str:
    r"""Return the name of a file or directory, as ``autosave`` lines have it.

    Args:
        path: Of this system or of another one, or a URL.

    Example:
        >>> name_of("s3://bucket/fit-1/a.ckpt"), name_of("C:\\runs\\fit-1\\a.ckpt"), name_of("/runs/a.ckpt/")
        ('a.ckpt', 'a.ckpt', 'a.ckpt')
    """
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in a run.

    Args:
        epoch: From 0.
        batch: Batches of it done.
        global_step: Optimizer steps done.
    """

    epoch: int
    batch: int
    global_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What a fit was resumed from.

    Args:
        path: The checkpoint.
        position: Where it was taken, in words.
        seconds: That restoring took, until the first batch could be fetched.
        exact: What continued exactly.
        not_exact: What did not, each with the reason.
        notes: What is worth knowing.
        continues: Whether it continues where this run was; if not, it begins a new one from somebody's checkpoint.
    """

    path: str
    position: str
    seconds: float
    exact: tuple[str, ...] = ()
    not_exact: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    continues: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Autosave:
    """One autosave, or several older ones of which only the sums are known.

    Args:
        time: When it was written and verified, of several the last. Seconds since 1970, like all times.
        taken: The time of which its state is.
        place: Where that was; of several, where the one was that training waited longest for.
        seconds: That training waited, in all.
        num_bytes: Of all; ``None`` if not known.
        is_behind: Whether it was written in the background.
        name: Of its file; empty for several.
        number: How many it stands for.
        longest: Seconds that training waited for the one that took longest.
    """

    time: float
    taken: float
    place: Place | None
    seconds: float
    num_bytes: int | None
    is_behind: bool = False
    name: str = ""
    number: int = 1
    longest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """A stretch of time in which nothing could be saved.

    Args:
        since: The time of the first save that failed.
        until: When a save succeeded again; ``None`` if none has in that fit.
        tries: How many saves failed.
        text: Why the last of them did.
    """

    since: float
    until: float | None = None
    tries: int = 1
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One fit in one process.

    Args:
        number: In its script, from 1.
        began: When it began.
        started: When it could fetch its first batch; ``None`` if it never came so far.
        num_ranks: How many ranks trained.
        place: Where it continued.
        resumed: What it was resumed from; ``None`` if it began at the beginning.
        autosaves: In the order of time.
        unsaved: When nothing could be saved, in the order of time.
        alive: Times and places at which it is known to have been alive, the last one at least.
        last_seen: The last that is known of it, its end included.
        reason: Why it ended: "finished", "stopped by SIGTERM", the name of an exception; ``None`` if it could not say
            so: it was killed, or still runs.
        text: The same at length.
        last_place: The last place that is known.
        saved: Where its last autosave was taken, as it said at its end.
    """

    number: int
    began: float
    started: float | None = None
    num_ranks: int | None = None
    place: Place | None = None
    resumed: Resumed | None = None
    autosaves: tuple[Autosave, ...] = ()
    unsaved: tuple[Unsaved, ...] = ()
    alive: tuple[tuple[float, Place], ...] = ()
    last_seen: float
    reason: str | None = None
    text: str = ""
    last_place: Place | None = None
    saved: Place | None = None

    @property
    def num_autosaves(self) -> int:
        """How many autosaves were written and verified."""
        return sum(autosave.number for autosave in self.autosaves)

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end."""
        return self.reason == FINISHED

    @property
    def has_trained(self) -> bool:
        """Whether it continued from where it started; a finished fit that is only restored does not."""
        if self.started is None:
            return False
        return not (self.is_finished and self.last_place == self.place and not self.autosaves)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One start of the script.

    Args:
        began: When its process was started.
        pid: Its number; ``None`` if not known.
        host: The machine's name.
        fits: In the order of their numbers.
    """

    began: float
    pid: int | None = None
    host: str = ""
    fits: tuple[Fit, ...] = ()

    @property
    def last_seen(self) -> float:
        """The last time at which it is known to have been alive."""
        return max((fit.last_seen for fit in self.fits), default=self.began)

    @property
    def reason(self) -> str | None:
        """Why its last fit ended; ``None`` if it could not say so."""
        return self.fits[-1].reason if self.fits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """From a start at the beginning to the end of the script, over all processes that this took.

    Args:
        processes: In the order of time.
        done: When the script came to its normal end; ``None`` if it has not, or nobody could say so.
    """

    processes: tuple[Process, ...]
    done: float | None = None

    @property
    def fits(self) -> tuple[Fit, ...]:
        """All fits of all processes."""
        return tuple(fit for process in self.processes for fit in process.fits)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All that is known of a run.

    Args:
        chapters: The oldest first.
        num_forgotten: Processes at the beginning of which nothing is known any more, because the file was shortened.
        num_unread: Lines that could not be read: torn by a kill, or damaged.
    """

    chapters: tuple[Chapter, ...] = field(default=())
    num_forgotten: int = 0
    num_unread: int = 0

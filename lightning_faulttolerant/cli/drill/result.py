"""What a drill has found: all that its printing and its page are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EXACT = "exact"
DIFFERS = "differs"
NOT_JUDGED = "not judged"
EXIT_CODES = {EXACT: 0, DIFFERS: 1, NOT_JUDGED: 2}

UNINTERRUPTED = "uninterrupted"
REPEATED = "repeated"
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One training batch of a run, as it counts in the end: of one that was done twice, the second time.

    Args:
        number: Training batches of the run before it, over all fits and epochs.
        fit: Number of its fit in the script, from 1.
        epoch: Of the fit, from 0.
        batch: Of the epoch, from 0.
        loss: On rank 0; None if the step gave none.
        process: Number of the process that did it, from 0.
    """

    number: int
    fit: int
    epoch: int
    batch: int
    loss: float | None
    process: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault that the drill made.

    Args:
        number: From 1.
        kind: ``KILL``, ``TERM`` or ``exception``.
        fit: Where it hit: the first training batch that was not finished.
        epoch: Of the fit.
        batch: Of the epoch.
        at: The same as a number of batches over the whole run: so many were done before it.
        resumed_at: So many batches did not have to be done again: where the restart continued.
        resumed_text: The same place in the words of the restart.
        num_twice: Batches that were done before the strike and again after it.
        seconds_in_process: From the start of the struck process to the strike.
        seconds_to_first_batch: From the restart to its first finished batch; None if it finished none.
        exit_code: Of the struck process; negative for a signal that ended it.
        hook: Where in the batch an exception was raised: ``start``, ``step`` or ``end``; empty for a signal.
    """

    number: int
    kind: str
    fit: int
    epoch: int
    batch: int
    at: int
    resumed_at: int
    resumed_text: str
    num_twice: int
    seconds_in_process: float
    seconds_to_first_batch: float | None
    exit_code: int
    hook: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOfDrill:
    """One run of the script, from its first process to the end.

    Args:
        name: ``uninterrupted``, ``repeated`` (of ``--check``) or ``interrupted``.
        curve: Its training batches in order.
        num_processes: How often the command was started.
        num_ranks: How many processes trained together.
        num_fits: Fits of the script.
        num_validations: Validation runs.
        num_logs: How often values were logged.
        num_autosaves: Autosaves that were written.
        seconds: From its first start to its end, restarts and all.
        is_complete: Whether it came to its end.
    """

    name: str
    curve: tuple[Point, ...]
    num_processes: int
    num_ranks: int
    num_fits: int
    num_validations: int
    num_logs: int
    num_autosaves: int
    seconds: float
    is_complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One value that differs between the two runs.

    Args:
        name: In words, such as ``loss`` or ``learning rate 0``.
        expected: In the uninterrupted run, as text for people.
        found: In the other.
    """

    name: str
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first event in which two runs differ.

    Args:
        place: In words, such as ``batch 31 of epoch 2``.
        number: Training batches of the run before it, over the whole run.
        rank: Of the process.
        values: What differs in it.
        equal: What of it is equal.
        num_equal: So many training batches before it are equal.
        process: Of the interrupted run, from 0: the one that did it.
    """

    place: str
    number: int
    rank: int
    values: tuple[Value, ...]
    equal: tuple[str, ...]
    num_equal: int
    process: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What is likely behind a difference, and what to do.

    Args:
        part: Of the state: ``data order``, ``augmentation``, ``main RNG``, ``weights``, ``metrics``, ``logged values``,
            ``surroundings``, or what else keeps a drill from being judged, such as ``no seed``.
        text: Why, in a sentence or two.
        advice: What to do, one thing each.
    """

    part: str
    text: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the drill says in the end.

    Args:
        word: ``exact``, ``differs`` or ``not judged``.
        text: One sentence.
        cause: Where it is not ``exact``: why that may be.
        difference: The first event that differs, if one does.
        notes: What else is to be known, one sentence each.
    """

    word: str
    text: str
    cause: Cause | None = None
    difference: Difference | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit status that goes with it."""
        return EXIT_CODES[self.word]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """A whole drill.

    Args:
        command: What was run, in words as they were given.
        verdict: What came of it.
        strikes: Those that count, in order.
        num_wanted: How many strikes were asked for.
        kind: ``KILL``, ``TERM`` or ``exception``.
        seed: Of the moments of the strikes.
        began: When it began, seconds since 1970.
        seconds: How long it took.
        directory: Where the ledgers and the output of the script are.
        versions: Of this package and of what the script computed with: versions, device, threads.
        uninterrupted: None if it never came to train.
        repeated: The second uninterrupted run of ``--check``.
        interrupted: None if the drill ended before it.
        last_words: The end of what the script has printed, if it failed by itself.
    """

    command: tuple[str, ...]
    verdict: Verdict
    strikes: tuple[Strike, ...]
    num_wanted: int
    kind: str
    seed: int
    began: float
    seconds: float
    directory: str
    versions: Mapping[str, str] = field(default_factory=dict)
    uninterrupted: RunOfDrill | None = None
    repeated: RunOfDrill | None = None
    interrupted: RunOfDrill | None = None
    last_words: tuple[str, ...] = ()

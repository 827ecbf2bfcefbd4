"""The result of a drill: everything that its printed text and its page need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_faulttolerant.cli.drill.progress import evaluation_batches
from lightning_faulttolerant.cli.page.numbers import plural

EXACT = "exact"
DIFFERS = "differs"
NOT_JUDGED = "not judged"
EXIT_CODES = {EXACT: 0, DIFFERS: 1, NOT_JUDGED: 2}

UNINTERRUPTED = "uninterrupted"
REPEATED = "repeated"
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One training batch of a run, as it counts in the end: the second time, if it was done twice.

    Args:
        number: Number of training batches of the run before it, over all fits and epochs.
        fit: Number of its fit in the script, from 1.
        epoch: Epoch in the fit, from 0.
        batch: Batch in the epoch, from 0.
        loss: Loss on rank 0; None if the step returned none.
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
    """One fault that the drill caused.

    Args:
        number: Number of the strike, from 1.
        kind: ``KILL``, ``TERM`` or ``exception``.
        stage: What it hit: ``train``, ``validation``, ``test`` or ``predict``.
        place: The batch that it hit, the first one that was not finished, in words.
        fit: The number of the fit, or of the call of the evaluation's function.
        epoch: Epoch in the fit; None in an evaluation outside a fit.
        batch: Batch in the epoch, or in the validation run or evaluation.
        at: Number of training batches of the whole run that were done before it.
        resumed_at: Number of training batches before the place where the restart continued.
        resumed_batch: The batch of the validation run or evaluation where the restart continued; None if the strike hit
            training, or if the restart continued before that run.
        resumed_text: The same place in the words of the restart.
        num_twice: Number of batches, of training and of evaluations, that were done before the strike and again after.
        seconds_in_process: Time from the start of the struck process to the strike.
        seconds_to_first_batch: Time from the restart to its first finished batch; None if it finished none.
        exit_code: Exit code of the struck process; negative for a signal that ended it.
        hook: The place in the batch where an exception was raised: ``start``, ``step`` or ``end``; empty for a signal.
    """

    number: int
    kind: str
    stage: str
    place: str
    fit: int
    epoch: int | None
    batch: int
    at: int
    resumed_at: int
    resumed_batch: int | None
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
        num_fits: Number of fits in the script.
        num_validations: Number of validation runs.
        num_evaluated: Number of batches of validation runs and evaluations.
        num_logs: How often values were logged.
        num_autosaves: Number of autosaves that were written.
        seconds: Time from the first start to the end, including restarts.
        is_complete: Whether the run finished.
    """

    name: str
    curve: tuple[Point, ...]
    num_processes: int
    num_ranks: int
    num_fits: int
    num_validations: int
    num_evaluated: int
    num_logs: int
    num_autosaves: int
    seconds: float
    is_complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One value that differs between the two runs.

    Args:
        name: Name in words, such as ``loss`` or ``learning rate 0``.
        expected: The value in the uninterrupted run, as readable text.
        found: The value in the other run.
    """

    name: str
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first event in which two runs differ.

    Args:
        place: Place in words, such as ``batch 31 of epoch 2``.
        number: Number of training batches of the run before it, over the whole run.
        rank: Number of the rank.
        values: The values of the event that differ.
        equal: The names of the values of the event that are equal.
        num_equal: Number of training batches before the event that are equal.
        num_evaluated_equal: Number of batches of validation runs and evaluations before it that are equal.
        process: Number of the process of the interrupted run that wrote the event, from 0.
    """

    place: str
    number: int
    rank: int
    values: tuple[Value, ...]
    equal: tuple[str, ...]
    num_equal: int
    num_evaluated_equal: int = 0
    process: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """The likely cause of a difference, and the advice for it.

    Args:
        part: Part of the state: ``data order``, ``augmentation``, ``main RNG``, ``weights``, ``metrics``,
            ``logged values``, ``surroundings``; or another reason why the drill can't be judged, such as ``no seed``.
        text: The explanation, in a sentence or two.
        advice: The steps to take, one thing each.
    """

    part: str
    text: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillVerdict:
    """The final verdict of a drill.

    Args:
        word: ``exact``, ``differs`` or ``not judged``.
        text: The verdict in one sentence.
        cause: The likely cause, if the word is not ``exact``.
        difference: The first event that differs, if any.
        notes: Further facts, one sentence each.
    """

    word: str
    text: str
    cause: Cause | None = None
    difference: Difference | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit status for this verdict."""
        return EXIT_CODES[self.word]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """The result of a whole drill.

    Args:
        command: The command, as the words that were given.
        verdict: The verdict.
        strikes: The strikes that count, in order.
        num_wanted: Number of requested strikes.
        kind: ``KILL``, ``TERM`` or ``exception``.
        seed: Seed of the moments of the strikes.
        began: Time when the drill began, seconds since 1970.
        seconds: Duration of the drill.
        directory: The directory with the ledgers and the output of the script.
        versions: Versions of this package and of the software that the script computed with, its device and threads.
        uninterrupted: The uninterrupted run; None if it never trained.
        repeated: The second uninterrupted run of ``--check``.
        interrupted: The interrupted run; None if the drill ended before it.
        last_words: The end of the script's output, if the script failed by itself.
    """

    command: tuple[str, ...]
    verdict: DrillVerdict
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


def equal_before(difference: Difference, strikes: Sequence[Strike]) -> str:
    """Return a sentence about the batches before a difference, all of which are equal.

    Args:
        difference: The first event that differs.
        strikes: The strikes of the drill that count, in order.
    """
    number = difference.num_equal
    where = f" on rank {difference.rank}" if difference.rank else ""
    if not number and not difference.num_evaluated_equal:
        return f"No batch{where} comes before it."
    num_after = number - strikes[0].resumed_at if strikes else 0
    since = f", {num_after:,} of them after a restart" if num_after > 0 else ""
    batches = [f"{plural(number, 'batch')}{since}"] if number else []
    batches += [evaluation_batches(difference.num_evaluated_equal)] if difference.num_evaluated_equal else []
    return f"Equal before it{where}: {', and '.join(batches)}."

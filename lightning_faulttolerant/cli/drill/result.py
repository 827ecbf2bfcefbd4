"""The result of a drill, and its progress until then: everything that its printed text and its page need.

The progress is live on a terminal with rich, otherwise a line from time to time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, TextIO

from lightning_faulttolerant.cli.text import plural, safe

_PLAIN_EVERY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The progress of a run.

    Args:
        run: Name of the run.
        done: Number of finished training batches of the whole run. The last ones may be done again.
        num_evaluated: Number of finished batches of evaluations.
        evaluating: The evaluation in progress and its finished batches, in words; empty while the process trains.
        num_batches: Number of training batches of the whole run; None while unknown, or if it has none.
        num_strikes: Number of strikes so far.
        num_wanted: Number of strikes in total; 0 in a run that is not struck.
        saved: Training batches before the last autosave; None if there is none.
        batches_per_second: Speed of this process; None before its second batch.
        is_starting: Whether the fit of the process has not begun yet.
        text: What the drill is waiting for; empty while the process trains.
    """

    run: str
    done: int = 0
    num_evaluated: int = 0
    evaluating: str = ""
    num_batches: int | None = None
    num_strikes: int = 0
    num_wanted: int = 0
    saved: int | None = None
    batches_per_second: float | None = None
    is_starting: bool = False
    text: str = ""


class Progress(Protocol):
    """Shows the progress of a drill."""

    def update(self, status: Status) -> None:
        """Show the progress of a run. Called often."""

    def tell(self, text: str) -> None:
        """Show a line that stays."""

    def end(self, status: Status, seconds: float) -> None:
        """Show that a run has ended."""


def ended_text(status: Status, seconds: float) -> str:
    """Return the line about a run that has ended."""
    struck = f", {plural(status.num_strikes, 'strike')}" if status.num_wanted else ""
    batches = [plural(status.done, "batch")] if status.done or not status.num_evaluated else []
    batches += [evaluation_batches(status.num_evaluated)] if status.num_evaluated else []
    return f"{status.run:<13}  {', '.join(batches)}{struck}, {duration(seconds)}"


def evaluation_batches(number: int) -> str:
    """Return a number of batches of validation runs and evaluations, with the noun."""
    return plural(number, "evaluation batch")


def duration(seconds: float) -> str:
    """Return a duration in short form.

    Args:
        seconds: From 0.

    Example:
        >>> duration(0.34), duration(41.2), duration(3700)
        ('0.3 s', '41 s', '1:01:40')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02} min"


class PlainProgress:
    """Prints the progress as lines of text.

    Args:
        stream: The stream to print to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._run = ""
        self._shown_at = 0.0
        self._shown: Status | None = None

    def update(self, status: Status) -> None:
        """Print the progress every ten seconds."""
        now = time.monotonic()
        if status.run != self._run:
            self._run, self._shown_at = status.run, now
            self.tell(f"{status.run}: started")
        elif now - self._shown_at >= _PLAIN_EVERY_SECONDS and status != self._shown:
            self._shown_at, self._shown = now, status
            self.tell(f"{status.run}: {', '.join([_place(status), *_more(status)])}")

    def tell(self, text: str) -> None:
        """Print a line."""
        print(safe(text), file=self._stream, flush=True)

    def end(self, status: Status, seconds: float) -> None:
        """Print that a run has ended."""
        self._run = ""
        self.tell(ended_text(status, seconds))


def _place(status: Status) -> str:
    if status.is_starting and not status.done:
        return "starting"
    if status.evaluating and not status.done:
        return status.evaluating
    of = "" if status.num_batches is None else f" of {status.num_batches:,}"
    place = f"batch {status.done:,}{of}"
    return f"{place}, {status.evaluating}" if status.evaluating else place


def _more(status: Status) -> list[str]:
    parts = []
    if status.num_wanted:
        parts.append(f"{status.num_strikes} of {plural(status.num_wanted, 'strike')}")
    if status.saved is not None:
        parts.append(f"autosave at {status.saved:,}")
    if status.text:
        parts.append(status.text)
    elif status.is_starting and status.done:
        parts.append("starting again")
    elif status.batches_per_second is not None:
        parts.append(f"{status.batches_per_second:.3g} batches/s")
    return parts


class RichProgress:
    """Shows two live lines, and one lasting line for each run.

    Args:
        stream: A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._is_live = False

    def __enter__(self) -> RichProgress:
        self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._live.stop()

    def update(self, status: Status) -> None:
        """Redraw the live lines."""
        self._live.update(self._lines(status))

    def tell(self, text: str) -> None:
        """Print a line above the live lines."""
        self._console.print(safe(text), markup=False, soft_wrap=True)

    def end(self, status: Status, seconds: float) -> None:
        """Print a line that stays."""
        from rich.text import Text

        self._live.update(Text(""))
        self.tell(ended_text(status, seconds))

    def _lines(self, status: Status) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=status.num_batches, completed=status.done, width=24, pulse=status.num_batches is None)
        line.add_row(Text(f"{status.run:<13}", style="bold"), bar, Text(_place(status)))
        more = Text(f"{'':<15}{', '.join(_more(status))}", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(line, more)


@contextlib.contextmanager
def progress_on(stream: TextIO) -> Iterator[Progress]:
    """Yield a progress display: live if rich is installed and the stream is a terminal that can redraw lines.

    Args:
        stream: The stream, such as ``sys.stderr``.
    """
    # On a dumb terminal, rich would show nothing until a run has ended.
    can_move = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if can_move and stream.isatty() and find_spec("rich") is not None:
        with RichProgress(stream) as live:
            yield live
    else:
        yield PlainProgress(stream)


EXACT = "exact"
DIFFERS = "differs"
NOT_RESUMED = "not resumed"
NOT_JUDGED = "not judged"
EXIT_CODES = {EXACT: 0, DIFFERS: 1, NOT_RESUMED: 1, NOT_JUDGED: 2}

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
        word: ``exact``, ``differs``, ``not resumed`` (a restart failed, was refused, or started over: nothing was
            compared), or ``not judged``.
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

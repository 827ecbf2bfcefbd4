"""The progress of a drill: live on a terminal with rich, otherwise a line from time to time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, TextIO

from lightning_faulttolerant.cli.page.numbers import plural
from lightning_faulttolerant.cli.text import safe

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

"""Print the result of a drill on a terminal: the strikes, then the verdict and the advice."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence
from typing import TextIO

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.cli.drill.ledgers import TRAIN
from lightning_faulttolerant.cli.drill.progress import duration
from lightning_faulttolerant.cli.drill.result import Cause, Difference, DrillResult, Strike, equal_before
from lightning_faulttolerant.cli.text import safe, table

_WIDTH = 80
_STYLES = {result.EXACT: "1;32", result.DIFFERS: "1;31", result.NOT_JUDGED: "1;33"}
_BOLD = "1"
_LONGEST_VALUE = 24
_MOST_VALUES = 8


def print_result(found: DrillResult, stream: TextIO, *, is_kept: bool) -> None:
    """Print the result of a drill.

    Args:
        found: The result of the drill.
        stream: The stream to print to.
        is_kept: Whether the ledgers and outputs are kept.
    """
    lines = []
    if found.strikes:
        lines += ["", *_strikes(found.strikes)]
    verdict = found.verdict
    lines += ["", _styled(verdict.word.upper(), _STYLES[verdict.word], stream), *_wrapped(verdict.text)]
    if verdict.difference is not None:
        lines += ["", *_difference(verdict.difference, found)]
    if verdict.cause is not None:
        lines += ["", *_cause(verdict.cause, stream)]
    for note in verdict.notes:
        lines += ["", *_wrapped(note)]
    if is_kept:
        lines += ["", f"Ledgers and outputs: {safe(found.directory)}"]
    print("\n".join(lines), file=stream)


def _strikes(strikes: Sequence[Strike]) -> list[str]:
    header = ["STRIKE", "IN", "AT BATCH", "EPOCH", "RESUMED AT", "DONE TWICE", "FIRST BATCH IN"]
    rows = [
        [
            f"{strike.number} {strike.kind}",
            *_places(strike),
            f"{strike.num_twice:,}",
            "-" if strike.seconds_to_first_batch is None else duration(strike.seconds_to_first_batch),
        ]
        for strike in strikes
    ]
    return table(header, rows, right=header[2:])


def _places(strike: Strike) -> list[str]:
    """Return the cells for what was struck, and where: in training the batch of the run, else of the evaluation."""
    number = "" if strike.fit == 1 else f" {strike.fit}"
    stage = f"{strike.stage}{number}" if strike.epoch is None else strike.stage
    epoch = "-" if strike.epoch is None else f"{strike.epoch} of fit{number}" if number else f"{strike.epoch}"
    if strike.stage == TRAIN:
        return [stage, f"{strike.at:,}", epoch, f"{strike.resumed_at:,}"]
    resumed = f"{TRAIN} {strike.resumed_at:,}" if strike.resumed_batch is None else f"{strike.resumed_batch:,}"
    return [stage, f"{strike.batch:,}", epoch, resumed]


def _difference(difference: Difference, found: DrillResult) -> list[str]:
    other = "AGAIN" if found.verdict.word == result.NOT_JUDGED else "INTERRUPTED"
    rows = [[value.name, _short(value.expected), _short(value.found)] for value in difference.values]
    lines = table(["", "UNINTERRUPTED", other], rows[:_MOST_VALUES], right=[], indent=2)
    if len(rows) > _MOST_VALUES:
        lines.append(f"  and {len(rows) - _MOST_VALUES} more values")
    if difference.equal:
        lines += _wrapped(f"Equal there: {', '.join(difference.equal)}.", indent="  ")
    return [*lines, *_wrapped(equal_before(difference, found.strikes), indent="  ")]


def _cause(cause: Cause, stream: TextIO) -> list[str]:
    lines = [_styled(f"Likely cause: {cause.part}", _BOLD, stream), *_wrapped(cause.text, indent="  ")]
    for advice in cause.advice:
        lines += _wrapped(advice, indent="    ", first="  - ")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _wrapped(text: str, *, indent: str = "", first: str | None = None) -> list[str]:
    begin = indent if first is None else first
    return textwrap.wrap(
        safe(text),
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _styled(text: str, style: str, stream: TextIO) -> str:
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


def command_text(words: Sequence[str]) -> str:
    """Return a command as the user would type it.

    Args:
        words: Words of the command.
    """
    return safe(shlex.join(words))

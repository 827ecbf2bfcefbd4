"""Plain text for a terminal or a pipe: tables, readable numbers, sizes, and times, commands, and errors.

It has no terminal control characters, and errors have no traceback. Numbers and durations have few digits and a unit,
and are never rounded to look better than they are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.storage.store import is_url

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_GAP = "  "


def safe(text: object) -> str:
    r"""Return text with escapes in place of all characters that a terminal might obey or can't show.

    Args:
        text: Text from a file, which may be anything.

    Example:
        >>> safe("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))


def size_text(num_bytes: int) -> str:
    """Return a size with three digits and a unit.

    Args:
        num_bytes: The size, from 0.

    Example:
        >>> size_text(999), size_text(28453), size_text(1_250_000_000)
        ('999 B', '28.5 kB', '1.25 GB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def moment_text(seconds: float | None) -> str:
    """Return a point in time as local time.

    Args:
        seconds: Seconds since 1970, or None if unknown.
    """
    return "?" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def moment_json(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC.

    Args:
        seconds: Seconds since 1970, or None if unknown.
    """
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc).isoformat(timespec="seconds")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str], indent: int = 0) -> list[str]:
    """Return the lines of a table.

    On a terminal, the first column is shortened in the middle if the lines would wrap. A pipe gets the full text.

    Args:
        header: Names of the columns.
        rows: Their cells.
        right: The columns that are aligned to the right.
        indent: Number of spaces before each line.
    """
    cells = [list(header), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    room = width - indent - sum(widths[1:]) - len(_GAP) * (len(header) - 1)
    widths[0] = min(widths[0], max(room, len(header[0]), 16))
    for row in cells:
        row[0] = _shortened(row[0], widths[0])
    padded = (
        (cell.rjust(width) if name in right else cell.ljust(width))
        for row in cells
        for name, cell, width in zip(header, row, widths, strict=True)
    )
    return [" " * indent + _GAP.join(line).rstrip() for line in zip(*[padded] * len(header), strict=True)]


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    front = (width - 3) // 2
    return f"{text[:front]}...{text[len(text) - (width - 3 - front) :]}"


@contextlib.contextmanager
def remote_errors(path: str) -> Iterator[None]:
    """Turn any error of the package that opens a URL into an ``OSError``. Local files raise no others.

    Args:
        path: Path or URL that the block reads.
    """
    if not is_url(path):
        yield
        return
    from lightning_faulttolerant.storage import file_systems

    with file_systems.remote_errors(path):
        yield


def reason_of(error: OSError | FaultToleranceError) -> str:
    """Return the reason for an error, on one line and without the error number.

    Args:
        error: The error.
    """
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def add_command_words(parser: argparse.ArgumentParser) -> None:
    """Declare the command that starts the user's script.

    Args:
        parser: The parser of our command.
    """
    parser.add_argument(
        "words",
        metavar="COMMAND",
        nargs=argparse.PARSER,  # all words after the first belong to the script's command, even without --
        help="the command that starts your script, with its arguments; after --",
    )


def command_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command. Before 3.12.5, Python leaves the ``--`` in front of it."""
    return tuple(words[1:] if words[0] == "--" else words)


def fault_of_command(program: str) -> str | None:
    """Return why a program can't be started, or ``None`` if it can."""
    if shutil.which(program) is not None:
        return None
    if not os.path.isfile(program):
        return f"{program}: no such command"
    may_be = f"did you mean: python {program}" if program.endswith(".py") else f"chmod +x {program} makes it one"
    return f"{program}: a file, but not a command; {may_be}"


def at_least_1(text: str) -> int:
    """Return a number of an option.

    Raises:
        argparse.ArgumentTypeError: If it is not a whole number from 1.
    """
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def batch_to_skip(text: str) -> tuple[int, int]:
    """Return epoch and batch that an option names."""
    from lightning_faulttolerant.records.requests import skip_from

    try:
        return skip_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


MINUTE, HOUR, DAY = 60, 3600, 86400

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count_text(number: int) -> str:
    """Return a count with thousands separators.

    Args:
        number: Any integer.

    Example:
        >>> count_text(1234567)
        '1,234,567'
    """
    return f"{number:,}"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun.

    Args:
        number: Any integer.
        noun: The noun for one thing.
        nouns: The noun for other counts. By default, an s is appended, or es after endings like "batch" and "process".

    Example:
        >>> plural(1, "strike"), plural(1200, "batch"), plural(2, "child", "children")
        ('1 strike', '1,200 batches', '2 children')
    """
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun if number == 1 else nouns or noun + ending}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units.

    Args:
        seconds: Any duration; "?" if it is not finite.

    Example:
        >>> duration_text(0.0042), duration_text(4.21), duration_text(192), duration_text(7500), duration_text(9e5)
        ('4.2 ms', '4.2 s', '3 min 12 s', '2 h 5 min', '10 d 10 h')
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, names in ((DAY, HOUR, ("d", "h")), (HOUR, MINUTE, ("h", "min")), (MINUTE, 1, ("min", "s"))):
        if whole >= large:
            first, second = divmod(round(whole / small), large // small)
            return f"{first:,} {names[0]} {second} {names[1]}" if second else f"{first:,} {names[0]}"
    return f"{whole} s"


def share_text(share: float) -> str:
    """Return a share in percent. A share below 1 is never shown as 100 %, and one above 0 is never shown as 0 %.

    Args:
        share: From 0 to 1; "?" if it is not finite.

    Example:
        >>> share_text(0.9423), share_text(0.99999), share_text(1), share_text(0.00001), share_text(0)
        ('94.2 %', '99.9 %', '100 %', '< 0.1 %', '0 %')
    """
    if not math.isfinite(share):
        return "?"
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if 0 < share < 0.001:
        return "< 0.1 %"
    percent = 100 * share
    return f"{min(percent, 99.9) if share < 1 else percent:.1f} %"


def value_text(value: float) -> str:
    """Return a measured value with five significant digits.

    Args:
        value: Any float.

    Example:
        >>> value_text(0.123456789), value_text(float("nan")), value_text(1234567.0)
        ('0.12346', 'nan', '1.2346e+06')
    """
    return f"{value:.5g}"


def short_text(value: float, *, step: float) -> str:
    """Return the label of a tick, with enough digits to distinguish it from the next tick.

    Args:
        value: A multiple of `step`.
        step: The distance to the next tick.

    Example:
        >>> short_text(0.25, step=0.05), short_text(15000, step=5000), short_text(4e6, step=2e6)
        ('0.25', '15,000', '4 M')
    """
    if value == 0:
        return "0"
    size = max(abs(value), step)
    if size < 1e-3 or size >= 1e15:
        digits = max(0, math.floor(math.log10(abs(value))) - _exponent(step)) if step else 0
        return f"{value:.{min(digits, 6)}e}"
    for factor, unit in _LARGE:
        if size >= max(factor, 1e5) and step >= factor / 100:
            return f"{value / factor:.{max(0, -_exponent(step / factor))}f} {unit}"
    return f"{value:,.{max(0, -_exponent(step))}f}"


def _exponent(step: float) -> int:
    """Return the decimal place of the last digit of a step, such as 0.25 (-2), 0.5 (-1) or 20 (1)."""
    place = math.floor(math.log10(step) + 1e-9)
    leading = step / 10.0**place
    return place if abs(leading - round(leading)) < 1e-6 else place - 1

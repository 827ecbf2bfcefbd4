"""Plain text for a terminal or a pipe: aligned tables, readable sizes and times, no terminal control characters."""

from __future__ import annotations

import datetime
import shutil
import sys
from collections.abc import Sequence

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
    room = _terminal_width() - indent - sum(widths[1:]) - len(_GAP) * (len(header) - 1)
    widths[0] = min(widths[0], max(room, len(header[0]), 16))
    for row in cells:
        row[0] = _shortened(row[0], widths[0])
    padded = (
        (cell.rjust(width) if name in right else cell.ljust(width))
        for row in cells
        for name, cell, width in zip(header, row, widths, strict=True)
    )
    return [" " * indent + _GAP.join(line).rstrip() for line in zip(*[padded] * len(header), strict=True)]


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    front = (width - 3) // 2
    return f"{text[:front]}...{text[len(text) - (width - 3 - front) :]}"

"""The ``metrics.csv`` of a CSVLogger: counting its rows, and removing rows that were logged too late."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_faulttolerant.checkpoint.atomic import atomic_write_bytes


class MetricsFile:
    """A file of rows and named columns, as Python's ``csv`` module writes it.

    Args:
        path: The path of the file, which may not exist yet; on any file system that Lightning can write to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file_system = get_filesystem(path)

    def columns(self) -> list[str]:
        """Return the names in the first line; none if the file does not exist."""
        return next(self._lines(), [])

    def num_rows(self) -> int:
        """Return the number of rows."""
        return max(0, sum(1 for _ in self._lines()) - 1)

    def cut(self, num_rows: int, columns: Sequence[str]) -> None:
        """Keep only the first `num_rows` rows and the given `columns`; write nothing if that changes nothing.

        A process that is killed during this leaves the file as it was.
        """
        names = self.columns()
        if names == list(columns) and self.num_rows() == num_rows:
            return
        self._write_rows(columns, self.rows()[:num_rows])

    def rows(self) -> list[dict[str, str]]:
        """Return all rows, by column."""
        names, *rows = list(self._lines()) or [[]]
        return [dict(zip(names, row, strict=False)) for row in rows]

    def put_back(self, columns: Sequence[str], rows: Sequence[Mapping[str, str]], *, num_kept: int) -> None:
        """Undo `cut`: rows that were added after the `num_kept` rows stay, after all of `rows`.

        Args:
            columns: The columns before the cut.
            rows: The rows before the cut.
            num_kept: How many of the rows were kept.
        """
        added, now = self.rows()[num_kept:], self.columns()
        if added and not set(now) <= set(columns):
            columns = sorted({*columns, *now})
        self._write_rows(columns, [*rows, *added])

    def _write_rows(self, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore")
        if rows:
            writer.writeheader()
            writer.writerows(rows)
        self._write(text.getvalue())

    def _write(self, text: str) -> None:
        if not text:
            self._file_system.rm_file(self.path)
        elif _is_local(self._file_system):
            atomic_write_bytes(text.encode(), self.path)
        else:
            atomic_write_bytes(text.encode(), self._file_system.unstrip_protocol(self.path))

    def _lines(self) -> Iterator[list[str]]:
        if self._file_system.isfile(self.path):
            with self._file_system.open(self.path, "r", newline="", encoding="utf-8") as file:
                yield from csv.reader(file)


def _is_local(file_system: Any) -> bool:
    return type(file_system).__name__ == "LocalFileSystem"

"""Writes data sets of lines: JSON, CSV, TSV, XSV."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning_faulttolerant.streaming.format.encoding import expect_type
from lightning_faulttolerant.streaming.format.index import SEPARATORS, TEXT_ENCODINGS
from lightning_faulttolerant.streaming.format.writer import DatasetWriter, table_of_offsets

_TYPES: dict[str, type] = {"str": str, "int": int, "float": float}


class TextWriter(DatasetWriter):
    r"""Writes a data set with shards of lines.

    Args:
        columns: ``str``, ``int``, or ``float`` for each column, by its name.
        newline: The end of a line.
        **options: Options of ``DatasetWriter``.

    Raises:
        TypeError: If an encoding doesn't exist.
    """

    def __init__(self, *, columns: Mapping[str, str], newline: str = "\n", **options: Any) -> None:
        unknown = [encoding for encoding in columns.values() if encoding not in TEXT_ENCODINGS]
        if unknown:
            raise TypeError(f"The encoding {unknown[0]!r} is unknown here. Use one of {', '.join(TEXT_ENCODINGS)}.")
        if not newline:
            raise ValueError("newline='': a line can't be read if it is empty.")
        self.columns = dict(columns)
        self.newline = newline
        super().__init__(**options)

    @abstractmethod
    def _line(self, sample: Mapping[str, object]) -> str:
        """Return the line of a sample without its line end."""

    def _header(self) -> str:
        """Return the text before the first line."""
        return ""

    def encode_sample(self, sample: Mapping[str, object]) -> bytes:
        """Return the line of a sample."""
        for name, encoding in self.columns.items():
            expect_type(sample[name], _TYPES[encoding], encoding=encoding)
        return (self._line(sample) + self.newline).encode()

    def _encoded_shard(self, samples: list[bytes]) -> dict[str, bytes]:
        header = self._header().encode()
        config = json.dumps(self.get_config(), sort_keys=True).encode()
        meta = table_of_offsets(samples, first=len(header)) + config
        return {"data": b"".join([header, *samples]), "meta": meta}


class JSONWriter(TextWriter):
    """Writes a data set with a JSON object on each line of its shards."""

    format = "json"

    def get_config(self) -> dict[str, object]:
        """Return the description of each shard in the index and in its meta file."""
        return {**super().get_config(), "columns": self.columns, "newline": self.newline}

    def _line(self, sample: Mapping[str, object]) -> str:
        return json.dumps({name: sample[name] for name in self.columns}, sort_keys=True)


class XSVWriter(TextWriter):
    r"""Writes a data set with separated values on each line of its shards, and the columns on the first line.

    Nothing is quoted: a value that contains the separator or the newline is refused.

    Args:
        columns: ``str``, ``int``, or ``float`` for each column, by its name.
        separator: The separator of values.
        newline: The end of a line.
        **options: Options of ``DatasetWriter``.

    Raises:
        TypeError: If an encoding doesn't exist.
        ValueError: If the name of a column contains the separator or the newline.
    """

    format = "xsv"

    def __init__(self, *, columns: Mapping[str, str], separator: str, newline: str = "\n", **options: Any) -> None:
        if not separator or not newline:
            raise ValueError(f"separator={separator!r}, newline={newline!r}: a line can't be read if one is empty.")
        self.separator = separator
        self.column_names = sorted(columns)
        self.column_encodings = [columns[name] for name in self.column_names]
        for name in self.column_names:
            self._check_plain(name, newline)
        super().__init__(columns=columns, newline=newline, **options)

    def get_config(self) -> dict[str, object]:
        """Return the description of each shard in the index and in its meta file."""
        config = {
            **super().get_config(),
            "column_names": self.column_names,
            "column_encodings": self.column_encodings,
            "newline": self.newline,
        }
        return config if self.format in SEPARATORS else {**config, "separator": self.separator}

    def _header(self) -> str:
        return self.separator.join(self.column_names) + self.newline

    def _line(self, sample: Mapping[str, object]) -> str:
        values = [str(_TYPES[self.columns[name]](sample[name])) for name in self.column_names]
        for value in values:
            self._check_plain(value, self.newline)
        return self.separator.join(values)

    def _check_plain(self, text: str, newline: str) -> None:
        if self.separator in text or newline in text:
            raise ValueError(f"{text!r:.200} holds the separator {self.separator!r} or the newline {newline!r}.")


class CSVWriter(XSVWriter):
    r"""Writes a data set of comma-separated values: ``XSVWriter`` with ``separator=","``."""

    format = "csv"

    def __init__(self, *, columns: Mapping[str, str], newline: str = "\n", **options: Any) -> None:
        super().__init__(columns=columns, separator=SEPARATORS["csv"], newline=newline, **options)


class TSVWriter(XSVWriter):
    r"""Writes a data set of tab-separated values: ``XSVWriter`` with ``separator="\t"``."""

    format = "tsv"

    def __init__(self, *, columns: Mapping[str, str], newline: str = "\n", **options: Any) -> None:
        super().__init__(columns=columns, separator=SEPARATORS["tsv"], newline=newline, **options)

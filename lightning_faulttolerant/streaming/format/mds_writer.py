"""Writes data sets of the MDS format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_faulttolerant.streaming.format.encodings import encoding_of
from lightning_faulttolerant.streaming.format.writer import DatasetWriter, table_of_offsets

_UINT32_BYTES = 4


class MDSWriter(DatasetWriter):
    """Writes a data set of MDS shards.

    Args:
        columns: The encoding of each column, by its name.
        **options: Options of ``DatasetWriter``.

    Raises:
        TypeError: If an encoding doesn't exist.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with MDSWriter(columns={"x": "ndarray:float32:3", "y": "int"}, out=directory) as writer:
        ...     writer.write({"x": np.zeros(3, np.float32), "y": 1})
    """

    format = "mds"
    _bytes_per_sample = _UINT32_BYTES

    def __init__(self, *, columns: Mapping[str, str], **options: Any) -> None:
        self.columns = dict(columns)
        self.column_names = sorted(columns)
        self.column_encodings = [columns[name] for name in self.column_names]
        try:
            self._encodings = [encoding_of(encoding) for encoding in self.column_encodings]
        except ValueError as error:
            raise TypeError(f"MDSWriter can't write columns {self.columns}: {error}") from error
        self.column_sizes = [encoding.size for encoding in self._encodings]
        super().__init__(**options)

    def get_config(self) -> dict[str, Any]:
        """Return the description of each shard in the index and in its file."""
        return {
            **super().get_config(),
            "column_names": self.column_names,
            "column_encodings": self.column_encodings,
            "column_sizes": self.column_sizes,
        }

    def _empty_bytes(self) -> int:
        return 2 * _UINT32_BYTES + len(self._config_text())

    def _config_text(self) -> bytes:
        return json.dumps(self.get_config(), sort_keys=True).encode()

    def encode_sample(self, sample: Mapping[str, Any]) -> bytes:
        """Return the bytes of a sample: lengths of the columns of variable size, then all payloads."""
        lengths, payloads = [], []
        for name, encoding in zip(self.column_names, self._encodings, strict=True):
            value = sample[name]
            # Bytes are stored unchanged in any column: images then need not be encoded again.
            payload = value if isinstance(value, bytes) else encoding.encode(value)
            if encoding.size is None:
                lengths.append(len(payload))
            elif len(payload) != encoding.size:
                raise ValueError(f"Column {name!r} holds {encoding.size} bytes, got {len(payload)}.")
            payloads.append(payload)
        return np.array(lengths, "<u4").tobytes() + b"".join(payloads)

    def _encoded_shard(self, samples: list[bytes]) -> dict[str, bytes]:
        config = self._config_text()
        first = _UINT32_BYTES * (len(samples) + 2) + len(config)
        return {"data": b"".join([table_of_offsets(samples, first=first), config, *samples])}

"""Damage to a checkpoint: a part that is missing, a changed bit, an object that runs code."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def bytes_of(content: object, **options: Any) -> bytes:
    """Return the file that torch saves of a content."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def cut_file(path: Path) -> None:
    """Keep only the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_weight(path: Path | str) -> None:
    """Flip a bit of a file's first weight, which torch.load does not notice."""
    with zipfile.ZipFile(path) as archive:
        first = next(record for record in archive.infolist() if "/data/" in record.filename)
    content = bytearray(Path(path).read_bytes())
    name_bytes, extra_bytes = content[first.header_offset + 26], content[first.header_offset + 28]
    content[first.header_offset + 30 + name_bytes + extra_bytes + first.file_size // 2] ^= 1
    Path(path).write_bytes(content)

from __future__ import annotations

from pathlib import Path

from lightning_faulttolerant.cli.found import find_checkpoints
from lightning_faulttolerant.cli.histories import runs_of
from lightning_faulttolerant.records.history import Chapter


def chapter_of(directory: Path | str) -> Chapter:
    """Return the only chapter of the only run below a directory."""
    [found] = runs_of(find_checkpoints(str(directory)))
    [chapter] = found.history.chapters
    return chapter

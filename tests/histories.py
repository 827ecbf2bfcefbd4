"""The history of the only run below a directory."""

from __future__ import annotations

from pathlib import Path

from lightning_faulttolerant.cli.found import find_checkpoints
from lightning_faulttolerant.cli.histories import runs_of
from lightning_faulttolerant.records.history import Chapter, RunHistory


def history_of(directory: Path | str) -> RunHistory:
    """Return the history of the only run below a directory."""
    [found] = runs_of(find_checkpoints(str(directory)))
    return found.history


def chapter_of(directory: Path | str) -> Chapter:
    """Return the only chapter of the only run."""
    [chapter] = history_of(directory).chapters
    return chapter


def ends(chapter: Chapter) -> list[str | None]:
    """Return why each process ended."""
    return [process.reason for process in chapter.processes]

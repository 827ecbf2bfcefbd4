"""Texts that differ from run to run only in paths, times, and processes are the same text."""

from __future__ import annotations

from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from tests.messages import plain


def test_plain_names_what_differs(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A path, a time, an age, and a process have names."""
    text = (
        f"\x1b[1mSaved {tmp_path}/autosave-00000002.ckpt\x1b[0m at 2026-01-30 12:00:01 UTC (3 min old), process 4711  "
    )
    assert plain(text, DIR=tmp_path) == snapshot

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.records.lines import append_line, each_line, parse_lines, read_lines


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    """Objects come back in the order in which they were appended."""
    path = tmp_path / "file.jsonl"
    for number in range(3):
        append_line(path, {"number": number, "text": "a\nb"})
    assert read_lines(path) == [{"number": number, "text": "a\nb"} for number in range(3)]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    """A run that has written nothing yet has no lines."""
    assert read_lines(tmp_path / "none.jsonl") == []
    assert list(each_line(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_torn_line_costs_itself_only(tmp_path: Path, kept: int) -> None:
    """Wherever a kill tears the last line, the line before it and the next process's lines are read."""
    path = tmp_path / "file.jsonl"
    append_line(path, {"a": 1})
    append_line(path, {"b": 22222})
    path.write_bytes(path.read_bytes()[: len(b'{"a": 1}\n') + kept])
    append_line(path, {"c": 3})
    assert read_lines(path) == list(each_line(path)) == [{"a": 1}, {"c": 3}]


def test_what_is_no_object_is_passed_over() -> None:
    """Lines of other JSON values, or without JSON, do not count."""
    assert parse_lines(b"[1]\nnull\n\n\xff\n" + 100_000 * b"[" + b'\n{"a": 1}\n{"b"') == [{"a": 1}]

"""Lines are read back as they were written, whole or torn, and steps are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.records.ledger import path_of_rank
from lightning_faulttolerant.records.lines import LineFile, append_line, each_line, parse_lines, read_lines
from lightning_faulttolerant.records.requests import StepPlace


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_torn_line_costs_itself_only(tmp_path: Path, kept: int) -> None:
    """Wherever a kill tears the last line, the line before it and the next process's lines are read."""
    path = tmp_path / "file.jsonl"
    assert read_lines(path) == list(each_line(path)) == []
    append_line(path, {"a": "1\n2"})
    end = path.stat().st_size
    append_line(path, {"b": 22222})
    path.write_bytes(path.read_bytes()[: end + kept])
    append_line(path, {"c": 3})
    assert read_lines(path) == list(each_line(path)) == [{"a": "1\n2"}, {"c": 3}]


def test_a_link_is_not_followed_for_writing(tmp_path: Path) -> None:
    """Others may have put it there: what it points to is not written."""
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(PermissionError, match="It is a link"):
        append_line(tmp_path / "link", {})
    assert not (tmp_path / "victim").exists()


def test_what_is_no_object_is_passed_over() -> None:
    """Lines of other JSON values, or without JSON, do not count."""
    assert parse_lines(b"[1]\nnull\n\n\xff\n" + 100_000 * b"[" + b'\n{"a": 1}\n{"b"') == [{"a": 1}]


def test_processes_add_to_a_file_that_each_keeps_open(tmp_path: Path) -> None:
    """A file that was torn gets a new line; to close it twice is no error; rank 0 has the requested file."""
    path = tmp_path / "ledger.jsonl"
    for number in range(3):
        file = LineFile(path)
        file.append({"number": number})
        file.append({"event": "end"})
        file.close(), file.close()
        path.write_bytes(path.read_bytes()[:-5])
    assert read_lines(path) == [{"number": number} for number in range(3)]
    assert [path_of_rank("a.jsonl", rank) for rank in (0, 11)] == ["a.jsonl", "a.jsonl.rank-11"]


@pytest.mark.parametrize("limit", ["10", "1:2"])
def test_places_are_in_order(limit: str) -> None:
    """A place that is known in full is before, at, or after one that is named either way."""
    places = [StepPlace(number=number, epoch=number // 8, batch=number % 8) for number in (9, 10, 11, 16)]
    named = StepPlace.parse(limit)
    assert [place.is_before(named) for place in places] == [True, False, False, False]
    assert [place.is_after(named) for place in places] == [False, False, True, True]


@pytest.mark.parametrize("text", ["", "-1", "1:", "1:2:3", "a", "1.5"])
def test_what_is_no_step_is_refused(text: str) -> None:
    """A step is a number, or an epoch and a batch."""
    with pytest.raises(ValueError, match="neither the number of a step"):
        StepPlace.parse(text)

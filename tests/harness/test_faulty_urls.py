"""A remote file system with steps that are counted and fail as chosen."""

from __future__ import annotations

import errno

import fsspec
import pytest

from tests.file_faults import FaultyURLs, fail_with, write_short


def test_steps_are_counted_and_files_are_kept():
    """Each step must be seen in its block, and the written files must exist after it."""
    fs = fsspec.filesystem("faulty")
    with FaultyURLs() as files:
        with fsspec.open("faulty://counted/a", "wb") as file:
            file.write(b"12")
        fs.mv("faulty://counted/a", "faulty://counted/b")
        fs.ls("faulty://counted")
        assert fs.cat_file("/counted/b") == b"12"
        fs.rm_file("/counted/b")
        fs.pipe_file("/counted/c", b"345")
    assert [step.kind for step in files.steps] == ["open", "write", "close", "rename", "list", "unlink", "write"]
    assert [str(step.path) for step in files.steps][3] == "/counted/b"
    assert fs.cat_file("/counted/c") == b"345"
    assert fs.find("/counted") == ["/counted/c"]
    assert len(files.steps) == 7


def test_chosen_steps_go_wrong():
    """An upload must be able to fail in its middle and at its end, with a part of the file visible."""
    fs = fsspec.filesystem("faulty")
    with (
        FaultyURLs(fail_with(errno.EIO), kind="close"),
        pytest.raises(OSError, match="Input/output error"),
        fs.open("/wrong/a", "wb") as file,
    ):
        file.write(b"12")
    assert fs.cat_file("/wrong/a") == b"12"
    with FaultyURLs(write_short, kind="write"), fs.open("/wrong/b", "wb") as file:
        assert file.write(b"12345") == 3
    assert fs.cat_file("/wrong/b") == b"123"

"""A function that is to be called at the end of a process is called in each kind of process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from lightning_faulttolerant.processes import call_at_end


def end_in(directory: Path, is_remote: bool) -> None:
    """Let the end of this process leave a file."""
    call_at_end((directory / "ended").touch, is_remote=is_remote)


@pytest.mark.parametrize("is_remote", [False, True])
def test_process_of_multiprocessing(tmp_path: Path, is_remote: bool) -> None:
    """Such a process calls no functions of atexit, but it calls ours."""
    process = multiprocessing.get_context("fork").Process(target=end_in, args=(tmp_path, is_remote))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "ended").exists()

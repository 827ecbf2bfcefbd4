"""The store law where a save is an upload and a move: whichever step fails, the last committed autosave loads."""

from __future__ import annotations

import errno
import itertools
import os

import fsspec
import pytest
import torch

from lightning_faulttolerant.checkpoint.saving import atomic_torch_save
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file
from tests.checkpoint.writers import content
from tests.file_faults import FaultyURLs, fail_with, lose, write_short

_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    """Return a URL of an unused directory."""
    return f"faulty://law/{next(_numbers)}"


def _save(url: str, number: int) -> None:
    AutosaveSeries(url, keep_last=2).save(content(number), epoch=0, batch=number, global_step=number)


def _number(url: str) -> int:
    found = AutosaveSeries(url).load_newest()
    assert found is not None
    assert torch.equal(found[1]["weights"], content(found[1]["number"])["weights"])
    return found[1]["number"]


def _names(url: str) -> list[str]:
    fs = fsspec.filesystem("faulty")
    return [path.rpartition("/")[2] for path in fs.find(url.removeprefix("faulty:/"))]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_error_at_any_step_is_raised_and_keeps_what_is_there(url, number):
    """Each error must be raised; the old save must load, or the new one if it was moved already."""
    for saved in (1, 2, 3):
        _save(url, saved)
    before = 3
    for at in range(1, 100):
        raised = None
        with FaultyURLs(fail_with(number), at=at) as files:
            try:
                _save(url, before + 1)
            except OSError as error:
                raised = error
        if raised is None:
            assert len(files.steps) < at, f"the error at {files.steps[at - 1]} was swallowed"
            assert {"open", "write", "close", "rename", "unlink"} <= {step.kind for step in files.steps}
            return
        # EIO on a network does not mean what it means on a disk, so it gets another number.
        assert raised.errno == number or number == errno.EIO
        assert os.strerror(number) in str(raised)
        is_published = any(step.kind == "rename" for step in files.steps[: at - 1])
        assert _number(url) in ((before, before + 1) if is_published else (before,))
        _save(url, before + 2)
        assert _number(url) == before + 2
        before += 2
    raise AssertionError("the save does not end")


@pytest.mark.parametrize("kind", ["open", "write", "close", "rename"])
def test_nothing_is_left_of_an_upload_that_fails(url, kind):
    """A failed upload must leave no part of itself, under its own name or another."""
    atomic_torch_save(content(1), f"{url}/a.ckpt")
    with FaultyURLs(fail_with(errno.EIO), kind=kind), pytest.raises(OSError, match="Input/output error"):
        atomic_torch_save(content(2), f"{url}/a.ckpt")
    assert _names(url) == ["a.ckpt"]
    assert load_file(f"{url}/a.ckpt")["number"] == 1


def test_short_upload_is_noticed(url):
    """If the store has fewer bytes than were sent, this must be an error, and the old file must stay."""
    atomic_torch_save(content(1), f"{url}/a.ckpt")
    with FaultyURLs(write_short, kind="write"), pytest.raises(OSError, match="bytes"):
        atomic_torch_save(content(2), f"{url}/a.ckpt")
    assert _names(url) == ["a.ckpt"]
    assert load_file(f"{url}/a.ckpt")["number"] == 1


def test_lost_move_is_noticed(url):
    """A move that is reported as done and is not must be an error."""
    _save(url, 1)
    with FaultyURLs(lose, kind="rename"), pytest.raises(OSError, match=r".+"):
        _save(url, 2)
    assert _number(url) == 1

"""The index of a data set always matches its remote, and shards of two indexes never meet in one directory."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import pytest

from lightning_faulttolerant.errors import IndexFileError
from lightning_faulttolerant.streaming.cache import fetch_index
from tests.processes import in_child
from tests.streaming.cache.children import run_all
from tests.streaming.cache.remotes import assert_tidy, flaky, make_data, web, write

OLD, NEW = b'{"shards": ["old"]}', b'{"shards": ["new"]}'


def test_a_changed_index_has_its_own_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Shards of the previous index are not mixed with those of the current one, and the log says where they are."""
    found = []
    for text in (OLD, NEW, NEW, OLD):
        with flaky({"index.json": text}) as (remote, _), caplog.at_level(logging.WARNING):
            found.append(fetch_index(local=str(tmp_path), remote=remote))
    assert [fetched.text for fetched in found] == [OLD, NEW, NEW, OLD]
    assert found[0] == found[3]
    assert found[1] == found[2]
    assert found[1].directory == str(tmp_path / f"index-{found[1].digest}")
    assert Path(found[1].directory, "index.json").read_bytes() == NEW
    assert found[1].directory in caplog.text


def test_many_processes_agree_on_the_directory(tmp_path: Path) -> None:
    """Of two data sets that begin at the same time in one directory, one gets it, and the other a folder in it."""

    def fetch(text: bytes) -> None:
        with flaky({"index.json": text}) as (remote, _):
            found = fetch_index(local=str(tmp_path), remote=remote)
        assert Path(found.directory, "index.json").read_bytes() == text

    assert run_all([functools.partial(fetch, text) for text in (OLD, NEW) * 3]) == [0] * 6
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("index-")]) == 1


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
def test_an_index_is_tried_again_too(tmp_path: Path) -> None:
    """A server that fails, hangs, or breaks off is asked for the index again, as for a shard."""
    faults = {"index.json": ["503", "hang", "short", ""]}
    with web({"index.json": OLD}, faults) as (remote, seen):
        assert fetch_index(local=str(tmp_path), remote=remote, retry=3, timeout=0.2).text == OLD
        assert len(seen.asked) == 4


def test_an_index_that_can_not_be_had_is_an_error(tmp_path: Path) -> None:
    """A missing index is requested once, a broken one up to the limit; the local one is not used instead."""
    (tmp_path / "index.json").write_bytes(OLD)
    with web({}) as (remote, faults):
        with pytest.raises(IndexFileError, match=f"{remote}/index.json: 1 attempt.*remote="):
            fetch_index(local=str(tmp_path), remote=remote)
        assert len(faults.asked) == 1
    with flaky({"index.json": b"<html>"}) as (remote, _), pytest.raises(IndexFileError, match="3 attempts"):
        fetch_index(local=str(tmp_path), remote=remote)


def test_an_index_without_a_remote_is_only_read(tmp_path: Path) -> None:
    """Without a remote, or with the directory itself as the remote, the index is read where it is."""
    with pytest.raises(IndexFileError, match=f"{tmp_path}/index.json does not exist"):
        fetch_index(local=str(tmp_path), remote=None)
    write(tmp_path, make_data().files)
    before = sorted(tmp_path.iterdir())
    for remote in (None, str(tmp_path), f"file://{tmp_path}"):
        assert fetch_index(local=str(tmp_path), remote=remote).directory == str(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_killed_process_leaves_no_lock_on_the_index(tmp_path: Path) -> None:
    """A process that is killed while it writes the index blocks no other process."""

    def killed(*args: object) -> None:
        os._exit(9)

    def first() -> None:
        os.replace = killed  # type: ignore[assignment]
        with flaky({"index.json": OLD}) as (remote, _):
            fetch_index(local=str(tmp_path), remote=remote)

    assert in_child(first) == 9
    with flaky({"index.json": OLD}) as (remote, _):
        fetch_index(local=str(tmp_path), remote=remote, timeout=1)
    assert (tmp_path / "index.json").read_bytes() == OLD
    assert_tidy(tmp_path)

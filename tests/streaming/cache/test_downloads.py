"""Whatever fails on the way, the data that arrive match the index, or an error names what is missing and why."""

from __future__ import annotations

import random
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.errors import DamagedShardError, IndexFileError, MissingShardError, ShardError
from lightning_faulttolerant.streaming import merge_index
from tests.messages import error_of, plain
from tests.processes import wait_for
from tests.streaming.remotes import SHARD, assert_tidy, assert_whole, data_of, flaky, opened, put, web
from tests.streaming.shards import files


@pytest.mark.parametrize("scheme", ["path", "file", "memory", "http", "s3"])
def test_shards_come_from_every_kind_of_remote(tmp_path: Path, scheme: str, request: pytest.FixtureRequest) -> None:
    """Each kind of remote gives the same index and shards, also in subfolders; one that is not there is missing."""
    remote, data = tmp_path / "remote", data_of(compression="zstd")
    put(remote / "train" / "part", data)
    merge_index(str(remote / "train"))
    put(remote / "lost", {name: content for name, content in data.items() if SHARD not in name})
    address = {"path": str(remote), "file": f"file://{remote}", "memory": f"memory://{tmp_path.name}"}.get(scheme, "")
    if scheme == "s3":
        address = request.getfixturevalue("s3")
    if scheme in ("memory", "s3"):
        fsspec.filesystem(scheme).pipe({f"{address}/{name}": content for name, content in files(remote).items()})
    with web(files(remote)) as (http, _):
        local = tmp_path / "local"
        dataset = opened(local, address or http, split="train", validate_hash="sha1")
        assert not [*local.rglob("*.mds")]
        assert_whole(dataset)
        assert (local / "train" / "index.json").read_bytes() == (remote / "train" / "index.json").read_bytes()
        assert len([*local.glob("train/part/*.mds")]) == 3
        with pytest.raises(MissingShardError, match=f"{address or http}/lost/{SHARD}.zstd: 1 attempt"):
            opened(local, address or http, split="lost").prepare_shard(1)


def test_downloads_leave_the_generators_alone(tmp_path: Path) -> None:
    """Pauses, names, retries, and connections draw nothing from the generators that a training uses."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with flaky(data_of(), {SHARD: ["fail"]}) as (remote, _):
        assert_whole(opened(tmp_path / "1", remote))
    with web(data_of()) as (remote, _):
        opened(tmp_path / "2", remote).prepare_shard(1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
def test_a_download_that_hangs_leaves_nothing_behind(tmp_path: Path) -> None:
    """Once an abandoned attempt moves again, its thread ends, and its file is removed."""

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "shard-download"]

    with flaky(data_of(), {SHARD: ["hang"]}) as (remote, faults):
        opened(tmp_path, remote, download_timeout=0.05).prepare_shard(1)
        assert all(thread.daemon for thread in threads())
        faults.is_over.set()
        wait_for(lambda: not threads())
    assert_tidy(tmp_path)


def test_passwords_and_signatures_are_not_shown(tmp_path: Path) -> None:
    """A signature in a URL reaches the server, and no error message."""
    data = data_of()
    with web({name: data[name] for name in ("index.json", SHARD)}) as (remote, faults):
        dataset = opened(tmp_path, f"{remote}?sig=secret")
        dataset.prepare_shard(1)
        assert faults.addresses == ["/data/index.json?sig=secret", f"/data/{SHARD}?sig=secret"]
        said = error_of(MissingShardError, lambda: dataset.prepare_shard(0))
    assert f"{remote}/shard.00000.mds: " in said
    assert "secret" not in said


INDEX = "index.json"
FAULTS: list[tuple[str, str, list[str], dict[str, Any], int, type[Exception] | None]] = [
    *(("flaky", SHARD, [fault] * 2, {}, 3, None) for fault in ("fail", "flip", "short", "empty", "hang", "drip")),
    *(("web", SHARD, [fault], {}, 2, None) for fault in ("500", "flip", "short", "hang", "drip")),
    ("web", INDEX, ["503", "hang", "short"], {"download_retry": 3}, 4, None),
    *(("flaky", SHARD, [fault] * 9, {}, 3, ShardError) for fault in ("fail", "hang")),
    ("flaky", SHARD, ["flip"] * 9, {"download_retry": 0}, 1, DamagedShardError),
    ("flaky", SHARD, ["short"] * 9, {"download_retry": 1, "validate_hash": None}, 2, DamagedShardError),
    ("flaky", SHARD, ["missing"], {}, 1, MissingShardError),
    *(("flaky", SHARD, [fault], {}, 1, ShardError) for fault in ("denied", "full")),
    *(("web", SHARD, [status] * 9, {}, num_asked, ShardError) for status, num_asked in (("403", 1), ("503", 3))),
    ("web", SHARD, ["404"], {}, 1, MissingShardError),
    ("web", INDEX, ["404"], {}, 1, IndexFileError),
]


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
@pytest.mark.parametrize(("kind", "name", "faults", "options", "num_asked", "error"), FAULTS, ids=str)
def test_an_attempt_that_fails_is_followed_by_others_or_an_error(
    tmp_path: Path,
    kind: str,
    name: str,
    faults: list[str],
    options: dict[str, Any],
    num_asked: int,
    error: type[Exception] | None,
    snapshot: SnapshotAssertion,
) -> None:
    """What fails, brings other bytes, or takes too long is tried again, unless it is final; then all is as before."""
    options, local = {"validate_hash": "sha1", "download_timeout": 0.1, **options}, tmp_path / "local"
    put(local, {INDEX: b'{"version": 2, "shards": []}'})  # it is not used instead
    with (flaky if kind == "flaky" else web)(data_of(), {name: faults}) as (remote, seen):
        seen.drip_seconds = 1.0
        if error is None:
            opened(local, remote, **options).prepare_shard(1)
        else:
            said = error_of(error, lambda: opened(local, remote, **options).prepare_shard(1))
            assert plain(said, DIR=tmp_path, REMOTE=remote) == snapshot
        assert seen.asked.count(name) == num_asked
        seen.by_name.clear()
        assert_whole(opened(local, remote, **options))


def _of_remote(files: dict[str, bytes]) -> Callable[[Path], Any]:
    def fetch(local: Path) -> None:
        with flaky({**data_of(), **files}) as (remote, _):
            opened(local, remote).prepare_shard(1)

    return fetch


def _directory(local: Path) -> None:
    put(local.parent / "remote", {f"{SHARD}/file": b"", INDEX: data_of()[INDEX]})
    opened(local, local.parent / "remote").prepare_shard(1)


def _far_damage(local: Path) -> None:
    data = data_of(compression="zstd", hashes=())
    _of_remote({**data, f"{SHARD}.zstd": b"x" * len(data[f"{SHARD}.zstd"])})(local)


def _unwritable(local: Path) -> None:
    with flaky(data_of()) as (remote, _):
        dataset = opened(local, remote)
        shutil.rmtree(local)
        local.write_bytes(b"")  # not even root can create a directory there
        dataset.prepare_shard(1)


def _alone(local: Path, shard: int) -> None:
    put(local, {"shard.00000.mds": b"0123456789", INDEX: data_of()[INDEX]})
    opened(local, None).prepare_shard(shard)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "unknown protocol": (lambda local: opened(local, "nonsense://bucket/data"), ValueError),
    "no client": (lambda local: opened(local, "gs://bucket/data"), ImportError),
    "no index": (_of_remote({INDEX: b"<html>"}), IndexFileError),
    "a directory": (_directory, ShardError),
    "a cache that can't be written": (_unwritable, ShardError),
    "damage far away": (_far_damage, DamagedShardError),
    "a short only copy": (lambda local: _alone(local, 0), DamagedShardError),
    "no copy": (lambda local: _alone(local, 1), MissingShardError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_fetched_is_an_error(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """The error names the argument or the shard, what is missing, and why; no file of a download stays."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    call, kind = REFUSED[case]
    said = error_of(kind, lambda: call(tmp_path / "local"))
    assert re.sub(r"\.tmp-[\w.-]+", ".tmp-NAME", plain(said, DIR=tmp_path)) == snapshot
    assert_tidy(tmp_path)

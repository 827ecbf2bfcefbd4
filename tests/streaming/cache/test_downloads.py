"""Whatever fails on the way, the data that arrive match the index, or an error names what is missing and why."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError, ShardError
from lightning_faulttolerant.streaming.cache import CacheLimit, fetch_index
from lightning_faulttolerant.streaming.cache.downloads import Remote
from tests.messages import plain
from tests.streaming.cache.children import wait_for
from tests.streaming.cache.remotes import HASH, assert_tidy, assert_whole, cache_of, flaky, make_data, web, write

SHARD = "shard.00001.mds"


def download_threads() -> list[threading.Thread]:
    """Return the threads of all downloads."""
    return [thread for thread in threading.enumerate() if thread.name == "shard-download"]


@pytest.mark.parametrize("scheme", ["path", "file", "memory", "http"])
def test_shards_come_from_every_kind_of_remote(tmp_path: Path, scheme: str) -> None:
    """A path, file://, memory://, and http:// give the same index and the same shards, also in subfolders."""
    data = make_data(folder="part/")
    write(tmp_path / "remote", data.files)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "remote"), "/cache-test", recursive=True)
    with web(data.files) as (http, _):
        remote = {
            "path": str(tmp_path / "remote"),
            "file": f"file://{tmp_path / 'remote'}",
            "memory": "memory://cache-test",
            "http": http,
        }[scheme]
        index = fetch_index(local=str(tmp_path / "local"), remote=remote)
        cache = cache_of(data, tmp_path / "local", remote, validate_hash=HASH)
        assert not cache.is_here(1)
        assert_whole(cache, data)
        assert cache.is_here(1)
    memory.rm("/cache-test", recursive=True)
    assert index.text == data.files["index.json"]
    assert index.directory == str(tmp_path / "local")
    assert sorted(path.name for path in (tmp_path / "remote" / "part").iterdir()) == sorted(
        Path(name).name for name in data.raw
    )


def test_shards_come_from_s3(tmp_path: Path, s3: str) -> None:
    """An S3 API serves the index and the shards, and an object that does not exist is missing, with its address."""
    data = make_data(compression="zstd:3")
    fsspec.filesystem("s3").pipe({f"{s3}/data/{name}": content for name, content in data.files.items()})
    index = fetch_index(local=str(tmp_path), remote=f"{s3}/data")
    cache = cache_of(data, tmp_path, f"{s3}/data", validate_hash=HASH)
    cache.fetch(0)
    assert index.text == data.files["index.json"]
    assert (tmp_path / "shard.00000.mds").read_bytes() == data.raw["shard.00000.mds"]
    fsspec.filesystem("s3").rm(f"{s3}/data/{SHARD}.zip")
    with pytest.raises(MissingShardError, match=re.escape(f"{s3}/data/{SHARD}.zip: 1 attempt")):
        cache.fetch(1)


def test_downloads_leave_the_generators_alone(tmp_path: Path) -> None:
    """Pauses and names are random, but draw nothing from the generators that a training uses."""
    data = make_data()
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with flaky(data.stored, {SHARD: ["fail"]}) as (remote, _):
        assert_whole(cache_of(data, tmp_path, remote), data)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_clients_of_remotes_draw_from_generators_of_their_own(tmp_path: Path) -> None:
    """Asynchronous clients do not draw from the run's generators for their retries and connections."""
    data = make_data()
    with web(data.stored) as (remote, _):
        cache_of(data, tmp_path, remote).fetch(1)
        http = fsspec.filesystem("http")
    assert sys.modules["aiohttp.connector"].random is not random
    assert http.client_kwargs == {}  # other clients stay as they are
    assert Remote("s3://bucket").file_system().config_kwargs == {"retries": {"mode": "legacy"}}
    assert Remote("http://localhost").file_system().client_kwargs["timeout"].total is None


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
@pytest.mark.parametrize("fault", ["hang", "late"])
def test_a_download_that_hangs_leaves_nothing_behind(tmp_path: Path, fault: str) -> None:
    """Once an abandoned attempt moves again, its thread ends, and its file is removed or never created."""
    data = make_data()
    with flaky(data.stored, {SHARD: [fault]}) as (remote, faults):
        cache_of(data, tmp_path, remote, download_timeout=0.05).fetch(1)
        wait_for(lambda: len(download_threads()) == 1)  # the thread of the attempt that succeeded may still be alive
        [thread] = download_threads()
        assert thread.daemon
        faults.is_over.set()
        thread.join()
    assert_tidy(tmp_path)


def test_passwords_and_signatures_are_not_shown(tmp_path: Path) -> None:
    """A signature in a URL reaches the server, and no error message."""
    data = make_data()
    with web({SHARD: data.stored[SHARD]}) as (remote, faults):
        cache = cache_of(data, tmp_path, f"{remote}?sig=secret")
        cache.fetch(1)
        assert faults.addresses == [f"/data/{SHARD}?sig=secret"]
        with pytest.raises(MissingShardError) as caught:
            cache.fetch(0)
    assert f"{remote}/shard.00000.mds: " in str(caught.value)
    assert "secret" not in str(caught.value)


FAULTS: list[tuple[str, list[str], dict[str, Any], int, type[Exception] | None]] = [
    *(("flaky", [fault] * 2, {}, 3, None) for fault in ("fail", "flip", "short", "empty", "hang", "drip")),
    *(("web", [fault], {}, 2, None) for fault in ("500", "flip", "short", "hang", "drip")),
    *(("flaky", [fault] * 9, {}, 3, ShardError) for fault in ("fail", "hang")),
    ("flaky", ["flip"] * 9, {"download_retry": 0}, 1, DamagedShardError),
    ("flaky", ["short"] * 9, {"download_retry": 1, "validate_hash": None}, 2, DamagedShardError),
    ("flaky", ["missing"], {}, 1, MissingShardError),
    ("flaky", ["denied"], {}, 1, ShardError),
    *(("web", [status] * 9, {}, num_asked, ShardError) for status, num_asked in (("403", 1), ("429", 3), ("503", 3))),
    ("web", ["404"], {}, 1, MissingShardError),
]


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
@pytest.mark.parametrize(("kind", "faults", "options", "num_asked", "error"), FAULTS, ids=str)
def test_an_attempt_that_fails_is_followed_by_others_or_an_error(
    tmp_path: Path,
    kind: str,
    faults: list[str],
    options: dict[str, Any],
    num_asked: int,
    error: type[Exception] | None,
    snapshot: SnapshotAssertion,
) -> None:
    """What fails, brings other bytes, or takes too long is tried again, unless it is final; then all is as before."""
    data = make_data()
    with (flaky if kind == "flaky" else web)(data.stored, {SHARD: faults}) as (remote, seen):
        seen.drip_seconds = 1.0
        options = {"validate_hash": HASH, "download_timeout": 0.1, **options}
        cache = cache_of(data, tmp_path / "local", remote, **options)
        cache.fetch(0)
        if error is not None:
            with pytest.raises(error) as caught:
                cache.fetch(1)
            assert type(caught.value) is error
            assert plain(str(caught.value), DIR=tmp_path, REMOTE=remote) == snapshot
        else:
            cache.fetch(1)
        assert seen.asked.count(SHARD) == num_asked
        seen.by_name.clear()
        assert_whole(cache, data)


def _directory(local: Path) -> None:
    (local.parent / "remote" / SHARD).mkdir(parents=True)
    cache_of(make_data(), local, str(local.parent / "remote")).fetch(1)


def _unwritable(local: Path) -> None:
    local.write_bytes(b"")  # not even root can create a directory there
    with flaky(make_data().files) as (remote, _):
        cache_of(make_data(), local, remote).fetch(1)


def _far_damage(local: Path) -> None:
    data = make_data(compression="zstd", hashes=())
    with flaky({f"{SHARD}.zip": b"x" * len(data.stored[f"{SHARD}.zip"])}) as (remote, _):
        cache_of(data, local, remote).fetch(1)


def _alone(local: Path, shard: int) -> None:
    write(local, {"shard.00000.mds": b"0123456789"})
    cache_of(make_data(), local, None).fetch(shard)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "retry": (lambda local: cache_of(make_data(), local, "memory://x", download_retry=-1), ValueError),
    "timeout": (lambda local: cache_of(make_data(), local, "memory://x", download_timeout=0), ValueError),
    "unknown hash": (lambda local: cache_of(make_data(), local, "memory://x", validate_hash="md6"), ValueError),
    "absent hash": (lambda local: cache_of(make_data(), local, "memory://x", validate_hash="sha256"), ValueError),
    "unknown protocol": (lambda local: cache_of(make_data(), local, "nonsense://bucket/data"), ValueError),
    "no client": (lambda local: cache_of(make_data(), local, "gs://bucket/data"), ImportError),
    "no client for the index": (lambda local: fetch_index(local=str(local), remote="gs://bucket/data"), ImportError),
    "a limit below a shard": (
        lambda local: cache_of(make_data(), local, "memory://x", limit=CacheLimit(999)),
        ValueError,
    ),
    "no size": (lambda local: CacheLimit("1xb"), ValueError),
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
    with pytest.raises(kind) as caught:
        call(tmp_path / "local")
    message = re.sub(r"\.tmp-[\w.-]+", ".tmp-NAME", plain(str(caught.value), DIR=tmp_path))
    assert message == snapshot
    assert_tidy(tmp_path)

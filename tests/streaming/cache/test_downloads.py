"""Whatever fails on the way, the data that arrive match the index, or an error names what is missing and why."""

from __future__ import annotations

import random
import re
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError, ShardError
from lightning_faulttolerant.streaming.cache import downloads, fetch_index
from lightning_faulttolerant.streaming.cache.downloads import Remote
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


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
@pytest.mark.parametrize("fault", ["fail", "flip", "short", "empty", "hang", "drip"])
def test_what_goes_wrong_twice_goes_well_the_third_time(tmp_path: Path, fault: str) -> None:
    """An attempt that fails, brings other bytes, or takes too long counts as one attempt, and the next one is used."""
    data = make_data()
    with flaky(data.stored, {SHARD: [fault, fault]}) as (remote, faults):
        faults.drip_seconds = 1.0
        cache = cache_of(data, tmp_path, remote, validate_hash=HASH, download_timeout=0.1)
        assert_whole(cache, data)
        assert faults.asked.count(SHARD) == 3


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
@pytest.mark.parametrize("fault", ["500", "flip", "short", "empty", "hang", "drip"])
def test_what_goes_wrong_on_the_web_is_tried_again(tmp_path: Path, fault: str) -> None:
    """The same holds for an asynchronous client."""
    data = make_data()
    with web(data.stored, {SHARD: [fault]}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote, validate_hash=HASH, download_timeout=0.3)
        assert_whole(cache, data)
        assert faults.asked.count(SHARD) == 2


@pytest.mark.usefixtures("_only_what_hangs_is_timed")
@pytest.mark.parametrize("retry", [0, 1])
@pytest.mark.parametrize("fault", ["fail", "flip", "hang"])
def test_attempts_come_to_an_end(tmp_path: Path, fault: str, retry: int) -> None:
    """After 1 + download_retry attempts, an error names the shard, the address, the attempts, and the findings."""
    data = make_data()
    kind = DamagedShardError if fault == "flip" else ShardError
    found = {"fail": "connection was reset", "flip": data.infos[1].files[0].hashes[HASH], "hang": "0.05 s"}[fault]
    with flaky(data.stored, {SHARD: [fault] * 9}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote, validate_hash=HASH, download_timeout=0.05, download_retry=retry)
        cache.fetch(0)
        with pytest.raises(kind, match=rf"Shard 1 .*flaky://data/{SHARD}: {1 + retry} attempt.*{found}"):
            cache.fetch(1)
        assert faults.asked.count(SHARD) == 1 + retry
        faults.by_name.clear()
        assert_whole(cache, data)


@pytest.mark.parametrize(("fault", "kind"), [("missing", MissingShardError), ("denied", ShardError)])
def test_what_is_not_there_is_not_tried_again(tmp_path: Path, fault: str, kind: type[ShardError]) -> None:
    """A shard that is missing or forbidden is requested once."""
    data = make_data()
    with flaky(data.stored, {SHARD: [fault]}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        with pytest.raises(kind, match="1 attempt"):
            cache.fetch(1)
        assert faults.asked == [SHARD]
    assert_tidy(tmp_path)


@pytest.mark.parametrize(("status", "num_asked"), [("404", 1), ("403", 1), ("429", 3), ("503", 3)])
def test_what_a_web_server_says_decides_whether_it_is_asked_again(tmp_path: Path, status: str, num_asked: int) -> None:
    """A client error is final, but a server error or a request to slow down is not."""
    data = make_data()
    kind = MissingShardError if status == "404" else ShardError
    with web(data.stored, {SHARD: [status] * 9}) as (remote, faults):
        cache = cache_of(data, tmp_path, remote)
        with pytest.raises(kind, match=f"{num_asked} attempt") as caught:
            cache.fetch(1)
        assert type(caught.value) is kind
        assert faults.asked == [SHARD] * num_asked


def test_a_size_is_checked_without_a_hash_too(tmp_path: Path) -> None:
    """Without validate_hash, a file of another size is still refused, and the error names both sizes."""
    data = make_data(hashes=())
    with flaky(data.stored, {SHARD: ["short"] * 3}) as (remote, _):
        cache = cache_of(data, tmp_path, remote)
        with pytest.raises(DamagedShardError, match="it has 500 bytes, but the index says 1000"):
            cache.fetch(1)


def test_a_directory_in_the_place_of_a_shard_is_no_shard(tmp_path: Path) -> None:
    """A directory with a shard's name is an error, and no directory is created in the cache."""
    data = make_data()
    (tmp_path / "remote" / SHARD).mkdir(parents=True)
    cache = cache_of(data, tmp_path / "local", str(tmp_path / "remote"))
    with pytest.raises(ShardError, match="is a directory"):
        cache.fetch(1)
    assert_tidy(tmp_path / "local")


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


def test_pauses_between_attempts_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is between half and all of twice the previous one, up to 30 s, and counts toward the longest time."""
    pauses: list[float] = []

    def fail() -> None:
        raise OSError("again")

    monkeypatch.setattr(downloads, "pause", pauses.append)
    monkeypatch.setattr(downloads, "_FIRST_PAUSE_SECONDS", 0.5)
    tried = downloads.Attempts(retry=8, timeout_seconds=10)
    with pytest.raises(downloads.FailedError, match="9 attempts, the last: OSError: again"):
        tried.run(fail)
    longest = [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert all(most / 2 <= found <= most for found, most in zip(pauses, longest, strict=True))
    assert tried.longest_seconds >= 9 * 10 + sum(longest)


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


def test_a_client_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing package for a kind of remote is named when the cache is created."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="pip install gcsfs"):
        cache_of(make_data(), tmp_path, "gs://bucket/data")
    with pytest.raises(ImportError, match="pip install gcsfs"):
        fetch_index(local=str(tmp_path), remote="gs://bucket/data")
    with pytest.raises(ValueError, match="nonsense"):
        cache_of(make_data(), tmp_path, "nonsense://bucket/data")


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


@pytest.mark.parametrize(
    "options",
    [{"download_retry": -1}, {"download_timeout": 0}, {"validate_hash": "md6"}, {"validate_hash": "sha256"}],
)
def test_arguments_that_can_not_be_right_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    """Numbers out of range, unknown hashes, and hashes that the index lacks are named when the cache is created."""
    with pytest.raises(ValueError, match=next(iter(options))):
        cache_of(make_data(), tmp_path, "memory://x", **options)

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.storage.lock import open_lock
from lightning_faulttolerant.storage.store import open_store
from tests.checkpoint.writers import SHARD, begin_objects, save_objects
from tests.cli.checkpoints import call, checkpoint, flip, foreign, save, save_series
from tests.s3 import CREDENTIALS, s3_server

Capture = pytest.CaptureFixture[str]


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """Return an empty place in an object store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/runs"
    return f"memory://{uuid.uuid4().hex}/runs"


@pytest.fixture(scope="module")
def strict_endpoint() -> Iterator[str]:
    """Yield the address of an S3 API that knows no user."""
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as endpoint:
        yield endpoint


@pytest.fixture
def refusing_s3(strict_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a bucket on a server that refuses the credentials in the environment."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": strict_endpoint}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://bucket"
    s3fs.S3FileSystem.clear_instance_cache()


def put(directory: str, name: str, local: Path) -> str:
    """Copy a local file into a store."""
    store = open_store(directory)
    with store.writer(name) as file:
        file.write(local.read_bytes())
    return store.path(name)


def test_all_commands_take_urls(url: str, tmp_path: Path, capsys: Capture) -> None:
    """Autosaves in an object store are listed, inspected, verified, and pruned like local ones."""
    paths = save_series(f"{url}/run/fit-1", 3)
    found = call(capsys, "list", url, "--json")
    assert (found.status, found.err) == (0, "")
    entries = json.loads(found.out)["checkpoints"]
    assert [entry["path"] for entry in entries] == paths
    assert [(entry["step"], entry["state"]) for entry in entries] == [(1, "verified"), (2, "verified"), (3, "verified")]
    assert all(entry["saved_at"].startswith("20") and entry["num_bytes"] > 1000 for entry in entries)

    shown = json.loads(call(capsys, "inspect", paths[0], "--json").out)
    assert (shown["path"], shown["fault_tolerance"]["position"]["global_step"]) == (paths[0], 1)

    assert call(capsys, "verify", f"{url}/run").lines == [f"{path}: verified" for path in paths]
    flip(save(tmp_path / "a.ckpt", checkpoint()))
    damaged = put(url, "damaged.ckpt", tmp_path / "a.ckpt")
    found = call(capsys, "verify", damaged, paths[0])
    assert found.status == 1
    assert found.lines[0].startswith(f"{damaged}: damaged: record ")

    found = call(capsys, "prune", url, "--keep-last", 1)
    assert (found.status, found.lines[-1].partition(",")[0]) == (0, "2 autosaves deleted")
    assert [str(path) for path in AutosaveSeries(f"{url}/run/fit-1").paths()] == paths[2:]
    assert open_store(url).names() == ["damaged.ckpt", "run"]
    assert open_store(f"{url}/run").names() == ["fit-1"]


def test_superseded_and_set_aside_ones_are_known_by_their_urls(url: str, capsys: Capture) -> None:
    """Files that a series has set aside in an object store are listed as such, and pruned only on demand."""
    folder = f"{url}/run/fit-1"
    save_series(folder, 2)
    AutosaveSeries(folder).set_aside("another-ckpt_path")
    save_series(folder, 2)
    kinds = [entry["kind"] for entry in json.loads(call(capsys, "list", url, "--json").out)["checkpoints"]]
    assert kinds == ["autosave", "autosave", "superseded", "superseded"]
    assert call(capsys, "prune", url, "--keep-last", 1).lines[-1].startswith("1 autosave deleted")
    assert call(capsys, "prune", url, "--keep-last", 1, "--superseded").lines[-1].startswith("2 autosaves deleted")


def test_a_directory_with_a_manifest_is_found_in_a_store(url: str, tmp_path: Path, capsys: Capture) -> None:
    """A committed directory is one checkpoint there too, and a missing file in it is damage."""
    from lightning_faulttolerant.checkpoint.contents import write_manifest

    for name in ("a.ckpt", "b.ckpt"):
        save(tmp_path / "sharded" / name)
    write_manifest(tmp_path / "sharded")
    for path in (tmp_path / "sharded").iterdir():
        put(f"{url}/sharded", path.name, path)
    [entry] = json.loads(call(capsys, "list", url, "--json").out)["checkpoints"]
    assert (entry["path"], entry["kind"], entry["state"]) == (f"{url}/sharded", "directory", "verified")
    assert call(capsys, "verify", f"{url}/sharded").lines == [f"{url}/sharded: verified"]
    open_store(f"{url}/sharded").delete("b.ckpt")
    assert call(capsys, "verify", f"{url}/sharded").status == 1


def test_a_run_in_use_is_left_alone(url: str, capsys: Capture) -> None:
    """While a run holds its lock in the store, none of its files is deleted."""
    save_series(f"{url}/run/fit-1", 2)
    lock = open_lock(f"{url}/run")
    lock.acquire()
    try:
        found = call(capsys, "prune", url, "--keep-last", 1)
    finally:
        lock.release()
    assert found.status == 1
    assert f"in use by process {os.getpid()}" in found.err
    assert len(AutosaveSeries(f"{url}/run/fit-1").paths()) == 2


def test_nothing_below_a_url_is_nothing_found(url: str, capsys: Capture) -> None:
    """An object store has no directories, so a missing one is empty."""
    assert call(capsys, "list", url).status == 1
    found = call(capsys, "verify", f"{url}/missing.ckpt")
    assert (found.status, found.out.startswith(f"{url}/missing.ckpt: missing: ")) == (1, True)
    found = call(capsys, "inspect", f"{url}/missing.ckpt")
    assert found.status == 2
    assert f"{url}/missing.ckpt" in found.err


def test_of_a_remote_file_only_ranges_are_read(
    s3: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To inspect a file of 24 MB on S3, at most three blocks of 1 MB are transferred."""
    content = foreign()
    content["state_dict"] = {str(number): torch.zeros(1_000_000) for number in range(6)}
    path = put(s3, "large.ckpt", save(tmp_path / "large.ckpt", content))
    fetch, num_bytes = s3fs.S3File._fetch_range, []

    def counted(file: Any, start: int, end: int) -> Any:
        num_bytes.append(end - start)
        return fetch(file, start, end)

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", counted)
    found = call(capsys, "inspect", path, "--json")
    assert found.status == 0
    assert json.loads(found.out)["num_bytes"] > 24_000_000
    assert 0 < sum(num_bytes) <= 3 * 1024 * 1024


@pytest.mark.parametrize("command", [["list"], ["inspect"], ["verify"], ["prune", "--keep-last=1"]], ids=lambda c: c[0])
def test_wrong_credentials_are_an_error_without_a_traceback(
    refusing_s3: str, capsys: Capture, command: list[str]
) -> None:
    """If the store refuses, each command says so, names the URL, and gives status 2."""
    found = call(capsys, *command, f"{refusing_s3}/run.ckpt")
    assert found.status == 2
    assert f"{refusing_s3}/run.ckpt" in found.out + found.err
    assert "Forbidden" in found.out + found.err or "Access" in found.out + found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("command", [["list"], ["inspect"], ["verify"], ["prune", "--keep-last=1"]], ids=lambda c: c[0])
def test_an_unknown_kind_of_url_is_an_error_without_a_traceback(capsys: Capture, command: list[str]) -> None:
    """A URL that fsspec doesn't know is named, with status 2."""
    found = call(capsys, *command, "nothing://bucket/run")
    assert found.status == 2
    assert "nothing://bucket/run" in found.out + found.err


def test_shards_in_a_store_are_like_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Sets of objects must be listed, inspected, verified, and pruned; one without a manifest must not count."""
    root = f"memory://shards-{os.getpid()}"
    series = AutosaveSeries(f"{root}/run/fit-1", keep_last=100)
    urls = [save_objects(series, number) for number in range(3)]
    begun = begin_objects(series, 3)
    rows = [line.split() for line in call(capsys, "list", root).out.splitlines() if "autosave-" in line]
    assert [(row[0], row[-1]) for row in rows if row[0] in {url.rpartition("/")[2] for url in urls}] == [
        (url.rpartition("/")[2], "verified") for url in urls
    ]
    assert call(capsys, "inspect", urls[0]).status == 0
    assert call(capsys, "verify", urls[0]).status == 0
    assert call(capsys, "verify", begun).status != 0
    open_store(urls[2]).delete(SHARD)
    assert call(capsys, "verify", urls[2]).status == 1
    assert call(capsys, "prune", root, "--keep-last", "1").status == 0
    left = {name.partition("/")[0] for name in series.store.tree()}
    assert left == {url.rpartition("/")[2] for url in (*urls[1:], begun)}

"""The commands on object stores."""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.storage.lock import open_lock
from lightning_faulttolerant.storage.store import open_store
from tests.checkpoint.writers import SHARD, begin_objects, save_objects, write_manifest
from tests.cli.checkpoints import call, checkpoint, foreign, save, save_series, told
from tests.damage import change_a_weight
from tests.s3 import CREDENTIALS, s3_server

Capture = pytest.CaptureFixture[str]
COMMANDS = [["list"], ["inspect"], ["verify"], ["prune", "--keep-last=1"]]


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """Return an empty place in an object store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/runs"
    return f"memory://{uuid.uuid4().hex}/runs"


def put(directory: str, name: str, local: Path) -> str:
    """Copy a local file into a store."""
    store = open_store(directory)
    with store.writer(name) as file:
        file.write(local.read_bytes())
    return store.path(name)


def test_all_commands_take_urls(url: str, tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """What a store holds is listed, inspected, verified, and pruned like local files, but for a run in use."""
    folder = f"{url}/run/fit-1"
    save_series(folder, 2)
    AutosaveSeries(folder).set_aside("another-ckpt_path")
    paths = save_series(folder, 3)
    change_a_weight(save(tmp_path / "a.ckpt", checkpoint()))
    put(url, "damaged.ckpt", tmp_path / "a.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        save(tmp_path / "sharded" / name)
    write_manifest(tmp_path / "sharded")
    for path in (tmp_path / "sharded").iterdir():
        for name in ("whole", "lost"):
            put(f"{url}/{name}", path.name, path)
    open_store(f"{url}/lost").delete("b.ckpt")
    lock = open_lock(f"{url}/run")
    lock.acquire()
    found = [call(capsys, "prune", url, "--keep-last", 1)]
    lock.release()
    found += [call(capsys, *command, url) for command in COMMANDS if command != ["inspect"]]
    assert [each.status for each in found] == [1, 0, 1, 0]
    # A store may tell times in seconds, so the order of files differs.
    assert "\n\n".join("\n".join(sorted(told(each, URL=url).splitlines())) for each in found) == snapshot
    shown = json.loads(call(capsys, "inspect", paths[2], "--json").out)
    assert (shown["path"], shown["fault_tolerance"]["position"]["global_step"]) == (paths[2], 3)
    assert call(capsys, "prune", url, "--keep-last", 1, "--superseded").lines[-1].startswith("2 autosaves deleted")
    assert open_store(f"{url}/run").names() == ["fit-1"]


def test_of_a_remote_file_only_ranges_are_read(
    s3: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To inspect a file of 24 MB on S3, at most three blocks of 1 MB are transferred."""
    content = {**foreign(), "state_dict": {str(number): torch.zeros(1_000_000) for number in range(6)}}
    path = put(s3, "large.ckpt", save(tmp_path / "large.ckpt", content))
    fetch, num_bytes = s3fs.S3File._fetch_range, []

    def counted(file: Any, start: int, end: int) -> Any:
        num_bytes.append(end - start)
        return fetch(file, start, end)

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", counted)
    assert json.loads(call(capsys, "inspect", path, "--json").out)["num_bytes"] > 24_000_000
    assert 0 < sum(num_bytes) <= 3 * 1024 * 1024


def test_what_can_not_be_reached_is_an_error(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store refuses the credentials, or the kind of URL is unknown, each command names the URL, and gives 2."""
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as endpoint:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        for command in COMMANDS:
            for place, why in (("s3://bucket/run.ckpt", "Forbidden|Access"), ("nothing://bucket/run", "nothing")):
                found = call(capsys, *command, place)
                said = found.out + found.err
                assert (found.status, place in said, "Traceback" in found.err) == (2, True, False)
                assert re.search(why, said)
        s3fs.S3FileSystem.clear_instance_cache()


def test_shards_in_a_store_are_like_files(capsys: Capture) -> None:
    """Sets of objects are listed, inspected, verified, and pruned; one without a manifest does not count."""
    root = f"memory://shards-{os.getpid()}"
    series = AutosaveSeries(f"{root}/run/fit-1", keep_last=100)
    urls = [save_objects(series, number) for number in range(3)]
    begun = begin_objects(series, 3)
    rows = [line.split() for line in call(capsys, "list", root).out.splitlines() if "autosave-" in line]
    assert [row[-1] for row in rows if row[0] in {url.rpartition("/")[2] for url in urls}] == ["verified"] * 3
    assert [call(capsys, each, urls[0]).status for each in ("inspect", "verify")] == [0, 0]
    assert call(capsys, "verify", begun).status != 0
    open_store(urls[2]).delete(SHARD)
    assert call(capsys, "verify", urls[2]).status == 1
    assert call(capsys, "prune", root, "--keep-last", "1").status == 0
    left = {name.partition("/")[0] for name in series.store.tree()}
    assert left == {url.rpartition("/")[2] for url in (*urls[1:], begun)}

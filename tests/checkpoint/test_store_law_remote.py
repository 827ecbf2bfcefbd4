"""The store law where a save is requests to a store: whichever fails or comes after a kill, the last autosave loads."""

import errno
import functools
import os
import signal
import uuid

import aiohttp
import fsspec
import pytest
import torch

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.saving import atomic_torch_save
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file
from tests.checkpoint.writers import SHARD, content, load_objects, save_file, save_objects
from tests.emulators import WARNING
from tests.faulty_files import FaultyURLs, fail_with, lose, write_short
from tests.processes import in_child
from tests.s3 import client


def save_large(series, number):
    """Save a file of three parts."""
    return save_file(series, number, more=torch.zeros(3_000_000))


def newest(url):
    """Return the number of the autosave that a restart would use, whole."""
    path, checkpoint = AutosaveSeries(url).load_newest()
    if AutosaveSeries(path).store.tree():
        return load_objects(path)["number"]
    assert torch.equal(checkpoint["weights"], content(checkpoint["number"])["weights"])
    return checkpoint["number"]


@pytest.fixture
def url():
    """Return the URL of an unused directory in a store that fails."""
    return f"memory://law/{uuid.uuid4().hex}"


ALL = [(save, number, 1) for save in (save_file, save_objects) for number in (errno.EIO, errno.EACCES, errno.ENOSPC)]


@pytest.mark.parametrize(
    ("save", "number", "every"),
    [ALL[0], (save_objects, errno.EIO, 11), *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL[1:])],
)
def test_an_error_at_any_step_is_raised_and_keeps_what_is_there(url, save, number, every):
    """Each error is raised; the old save loads, or the new one if it was published already; the next one succeeds."""
    for before in (1, 2, 3):
        save(AutosaveSeries(url), before)
    for at in range(1, 300, every):
        raised = None
        with FaultyURLs(fail_with(number), at=at) as files:
            try:
                save(AutosaveSeries(url), before + 1)
            except (OSError, RuntimeError) as error:  # torch raises the second if its file fails
                raised = error
        if raised is None:
            assert len(files.steps) < at or save is save_objects, f"the error at {files.steps[at - 1]} was swallowed"
            if len(files.steps) < at:
                break
        elif save is save_file:
            assert os.strerror(number) in str(raised)
            is_published = any(step.kind == "rename" for step in files.steps[: at - 1])
            assert newest(url) in ((before, before + 1) if is_published else (before,))
        assert newest(url) in (before, before + 1)
        before = newest(url) + 1
        save(AutosaveSeries(url), before)
        assert newest(url) == before
    assert at > 10
    assert {"open", "write", "close", "rename" if save is save_file else "unlink"} <= {s.kind for s in files.steps}


FAULTS = {
    **{f"error at {kind}": (fail_with(errno.EIO), kind) for kind in ("open", "write", "close", "rename")},
    "short upload": (write_short, "write"),
}


@pytest.mark.parametrize(("fault", "kind"), FAULTS.values(), ids=FAULTS)
def test_nothing_is_left_of_an_upload_that_fails(url, fault, kind):
    """An error, or a store that has fewer bytes than were sent, leaves the old file, and nothing of the new one."""
    atomic_torch_save(content(1), f"{url}/a.ckpt")
    with FaultyURLs(fault, kind=kind), pytest.raises(OSError, match=r".+"):
        atomic_torch_save(content(2), f"{url}/a.ckpt")
    names = [path.rpartition("/")[2] for path in fsspec.filesystem("memory").find(url.removeprefix("memory:/"))]
    assert names == ["a.ckpt"]
    assert load_file(f"{url}/a.ckpt")["number"] == 1
    save_file(AutosaveSeries(f"{url}/run"), 1)
    with FaultyURLs(lose, kind="rename"), pytest.raises(OSError, match=r".+"):
        save_file(AutosaveSeries(f"{url}/run"), 2)
    assert newest(f"{url}/run") == 1


def _save_and_be_killed(url, number, save, at):
    """Save in this process, which is killed before the request `at` of those that change the store."""
    num_changes, real = 0, aiohttp.ClientSession._request

    async def request(self, method, *args, **arguments):
        nonlocal num_changes
        num_changes += method not in ("GET", "HEAD")
        if num_changes == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return await real(self, method, *args, **arguments)

    aiohttp.ClientSession._request = request
    save(AutosaveSeries(url), number)


_STORES = [(store, save, 1) for store in ("s3", "azurite", "fake-gcs-server") for save in (save_objects, save_file)]
_SLOW = [pytest.mark.slow, pytest.mark.filterwarnings(WARNING)]


@pytest.mark.parametrize(
    ("store", "save", "every"),
    [
        *(("s3", save_large, 3), ("s3", save_objects, 4)),
        *(pytest.param(*row, marks=_SLOW) for row in [*_STORES, ("s3", save_large, 1)]),
    ],
)
def test_killed_before_a_request_that_changes_the_store(request, s3_endpoint, small_parts, store, save, every):
    """The old save or the one in flight loads, parts that were sent are dropped, and the next save leaves no rest."""
    bucket = request.getfixturevalue("s3") if store == "s3" else request.getfixturevalue("emulated")(store)
    url = f"{bucket}/run"
    for last in (1, 2):
        save(AutosaveSeries(url), last)
    committed, num_orphans = [], 0
    for at in range(1, 100, every):
        code = in_child(functools.partial(_save_and_be_killed, url, last + 1, save, at))
        assert code in (0, -signal.SIGKILL)
        series = AutosaveSeries(url)
        if store == "s3":
            plain, name = client(s3_endpoint), bucket.removeprefix("s3://")
            num_orphans += len(plain.list_multipart_uploads(Bucket=name).get("Uploads", []))
            series.store.abort_uploads()
            assert "Uploads" not in plain.list_multipart_uploads(Bucket=name)
        found = newest(url)
        assert found in (last, last + 1)
        committed.append(found == last + 1)
        paths = [*series.paths()[-1:], save(series, found + 1)]
        last = found + 1
        assert newest(url) == last
        inner = [f"/{name}" for name in (SHARD, MANIFEST_NAME, METADATA_NAME)] if save is save_objects else [""]
        names = {path.rpartition("/")[2] for path in paths}
        assert series.store.tree() == sorted(name + suffix for name in names for suffix in inner)
        if code == 0:
            break
    assert code == 0
    assert committed == sorted(committed), "an autosave counted that was not complete, or no longer counted"
    assert (num_orphans > 0) == (save is save_large)
    # Shards: the name is reserved, two files and the manifest are sent, and the oldest autosave's three are deleted.
    assert at - 1 >= (7 if save is save_objects else 2)
    assert committed.count(False) >= (4 if save is save_objects else 1) / every

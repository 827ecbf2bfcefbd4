"""The store law, by requests: killed before any that changes the store, the last committed autosave loads."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from tests.checkpoint.writers import SHARD, content, load_objects, save_objects
from tests.emulators import WARNING

FORK = multiprocessing.get_context("fork")
_READS = frozenset({"GET", "HEAD"})


def _save_file(series: AutosaveSeries, number: int) -> str:
    return series.save(content(number), epoch=0, batch=number, global_step=number)


def _save_and_be_killed(url: str, number: int, save: Callable[[AutosaveSeries, int], str], at: int) -> None:
    """Save in this process, which is killed before the request `at` of those that change the store."""
    num_changes = 0
    real = aiohttp.ClientSession._request

    async def request(self: Any, method: str, *args: Any, **arguments: Any) -> Any:
        nonlocal num_changes
        num_changes += method not in _READS
        if num_changes == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return await real(self, method, *args, **arguments)

    aiohttp.ClientSession._request = request  # type: ignore[method-assign]
    save(AutosaveSeries(url), number)


def _newest(url: str) -> int:
    """Return the number of the autosave that a restart would use."""
    found = AutosaveSeries(url).load_newest()
    assert found is not None
    return load_objects(found[0]) if AutosaveSeries(found[0]).store.tree() else found[1]["number"]


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize(
    ("store", "save"),
    [
        ("s3", save_objects),
        ("azurite", save_objects),
        ("fake-gcs-server", save_objects),
        ("azurite", _save_file),
        ("fake-gcs-server", _save_file),
    ],
)
def test_killed_before_each_request_that_changes_the_store(
    request: pytest.FixtureRequest, store: str, save: Callable[[AutosaveSeries, int], str]
) -> None:
    """At each request, the old save or the one in flight must load, and the next save must leave nothing else."""
    bucket = request.getfixturevalue("s3") if store == "s3" else request.getfixturevalue("emulated")(store)
    url = f"{bucket}/run"
    for number in (1, 2):
        save(AutosaveSeries(url), number)
    newest, committed = 2, []
    for at in range(1, 100):
        process = FORK.Process(target=_save_and_be_killed, args=(url, newest + 1, save, at))
        process.start()
        process.join(60)
        found = _newest(url)
        assert found in (newest, newest + 1)
        committed.append(found == newest + 1)
        series = AutosaveSeries(url)
        paths = [*series.paths()[-1:], save(series, found + 1)]
        newest = found + 1
        assert _newest(url) == newest
        names = {path.rpartition("/")[2] for path in paths}
        inner = [f"/{name}" for name in (SHARD, MANIFEST_NAME, METADATA_NAME)] if save is save_objects else [""]
        assert series.store.tree() == sorted(name + suffix for name in names for suffix in inner)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0
    assert committed == sorted(committed), "an autosave counted that was not complete, or no longer counted"
    # Shards: the name is reserved, two files and the manifest are sent, and the oldest autosave's three are deleted.
    assert at - 1 >= (7 if save is save_objects else 2)
    assert committed.count(False) >= (4 if save is save_objects else 1)

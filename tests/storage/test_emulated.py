"""What Azure's and Google's clients do differently from S3's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.storage.file_systems import file_system
from lightning_faulttolerant.storage.store import local_copy, open_file, open_store
from tests.storage.stores import read, write

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["azurite", "fake-gcs-server", "localbucket"])
def test_folder_is_no_file(emulated: Callable[[str], str], name: str) -> None:
    """Opening a folder is an error that says so, or that there is no such file."""
    url = emulated(name)
    write(url, "run/a", b"1")
    for look in (open_file, local_copy):
        with pytest.raises((IsADirectoryError, FileNotFoundError)):
            look(f"{url}/run")


def test_original_stays_until_azure_has_copied_it(
    emulated: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure may answer before it has copied a file, and must still have the original then."""
    from azure.storage.blob.aio import BlobClient

    url = emulated("azurite")
    write(url, "a", b"1")
    real, answers = BlobClient.get_blob_properties, ["pending", "pending", "success"]
    deleted: list[str] = []
    deleted_early: list[str] = []
    fs = file_system(url)[0]
    delete = fs.rm_file
    monkeypatch.setattr(fs, "rm_file", lambda path: (deleted.append(path), delete(path)))

    async def properties(self: Any, **arguments: Any) -> Any:
        found = await real(self, **arguments)
        if self.blob_name == "b" and answers:
            deleted_early.extend(deleted)
            found.copy.status = answers.pop(0)
        return found

    monkeypatch.setattr(BlobClient, "get_blob_properties", properties)
    open_store(url).rename("a", "b")
    assert (answers, deleted_early, len(deleted)) == ([], [], 1)
    assert (open_store(url).names(), read(f"{url}/b")) == (["b"], b"1")


def test_failed_copy_keeps_the_original(emulated: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If Azure reports that a copy failed, this is an error, and nothing is deleted."""
    from azure.storage.blob.aio import BlobClient

    url = emulated("azurite")
    write(url, "a", b"1")
    real = BlobClient.get_blob_properties

    async def properties(self: Any, **arguments: Any) -> Any:
        found = await real(self, **arguments)
        if self.blob_name == "b":
            found.copy.status = "failed"
        return found

    with monkeypatch.context() as patch:
        patch.setattr(BlobClient, "get_blob_properties", properties)
        with pytest.raises(OSError, match="was not finished: failed"):
            open_store(url).rename("a", "b")
    assert read(f"{url}/a") == b"1"


def test_container_is_never_removed(emulated: Callable[[str], str]) -> None:
    """An empty directory that is a whole bucket stays: it may have settings, and it is not ours."""
    url = emulated("azurite")
    open_store(url).remove_if_empty()
    fs, path = file_system(url)
    fs.invalidate_cache()
    assert fs.exists(path)


DRAWS = """
import random, sys
from tests.emulators import use_clients
use_clients()
from lightning_faulttolerant.storage.file_systems import file_system
before = random.getstate()
fs, _ = file_system(sys.argv[1])
print(fs.credential is not None, random.getstate() == before)
"""


def test_clients_with_a_token_draw_nothing_from_the_run() -> None:
    """Azure's client draws when it would renew its token, as soon as it is created: not from the run's generator."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AZURE_")}
    done = subprocess.run(
        [sys.executable, "-c", DRAWS, "az://container/run"],
        env={**environment, "AZURE_STORAGE_ACCOUNT_NAME": "account", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "True True\n"

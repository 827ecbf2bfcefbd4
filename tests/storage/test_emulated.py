"""What Azure's and Google's clients do differently from S3's."""

import fsspec
import pytest

from lightning_faulttolerant.storage.store import local_copy, open_file, open_store
from tests.storage.stores import read, write

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["azurite", "fake-gcs-server", "localbucket"])
def test_folder_is_no_file(emulated, name):
    """Opening a folder is an error that says so, or that there is no such file."""
    url = emulated(name)
    write(url, "run/a", b"1")
    for look in (open_file, local_copy):
        with pytest.raises((IsADirectoryError, FileNotFoundError)):
            look(f"{url}/run")


def _with_status(monkeypatch, answers, note=lambda: None):
    """Let Azure answer with these states of the copy to a file "b"."""
    from azure.storage.blob.aio import BlobClient

    real = BlobClient.get_blob_properties

    async def properties(self, **arguments):
        found = await real(self, **arguments)
        if self.blob_name == "b" and answers:
            note()
            found.copy.status = answers.pop(0)
        return found

    monkeypatch.setattr(BlobClient, "get_blob_properties", properties)


def test_original_stays_until_azure_has_copied_it(emulated, monkeypatch):
    """Azure may answer before it has copied a file, and must still have the original then, also if the copy fails."""
    url = emulated("azurite")
    write(url, "a", b"1")
    fs, answers, deleted = fsspec.core.url_to_fs(url)[0], ["pending", "pending", "success"], []
    delete, deleted_early = fs.rm_file, []
    monkeypatch.setattr(fs, "rm_file", lambda path: (deleted.append(path), delete(path)))
    with monkeypatch.context() as patch:
        _with_status(patch, answers, lambda: deleted_early.extend(deleted))
        open_store(url).rename("a", "b")
    assert (answers, deleted_early, len(deleted)) == ([], [], 1)
    assert (open_store(url).names(), read(f"{url}/b")) == (["b"], b"1")
    open_store(url).rename("b", "a")
    _with_status(monkeypatch, ["failed"])
    with pytest.raises(OSError, match="was not finished: failed"):
        open_store(url).rename("a", "b")
    assert read(f"{url}/a") == b"1"


def test_container_is_never_removed(emulated):
    """An empty directory that is a whole bucket stays: it may have settings, and it is not ours."""
    url = emulated("azurite")
    open_store(url).remove_if_empty()
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    assert fs.exists(path)

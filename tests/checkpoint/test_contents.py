"""A directory with a manifest: each changed byte is found, nothing outside is read, and extra files are not damage."""

from __future__ import annotations

import errno
import json
import os
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightning_faulttolerant.checkpoint import contents, manifest
from lightning_faulttolerant.checkpoint.contents import verify_directory, write_manifest
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, save_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage.store import open_store
from tests.faulty_files import FaultyFiles
from tests.file_faults import fail_with

CONTENTS = {"a.bin": b"0123456789", "shards/0.bin": b"\x00" * 100, "shards/deep/ü 1.bin": b"", ".hidden": b"h"}


@pytest.fixture
def directory(tmp_path):
    """A committed directory with files of several kinds."""
    root = tmp_path / "checkpoint"
    for name, data in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    write_manifest(root, metadata={"step": 3, "names": ["x", None, 0.5, True], "nested": {"a": {}}})
    return root


def test_committed_directory_verifies_and_tells_its_metadata(directory):
    """A committed directory must verify, and its manifest must return files, sizes, checksums and metadata exactly."""
    verification = verify_path(directory)
    assert (verification.has_checksums, verification.num_files, verification.num_bytes) == (True, 4, 111)
    assert verification.extra_files == ()
    found = read_manifest(directory)
    assert {name: (entry.size_bytes, entry.crc32) for name, entry in found.files.items()} == {
        name: (len(data), zlib.crc32(data)) for name, data in CONTENTS.items()
    }
    assert found.metadata == {"step": 3, "names": ["x", None, 0.5, True], "nested": {"a": {}}}


def test_each_changed_byte_of_the_files_and_of_the_manifest_is_detected(directory):
    """Each changed byte, truncation and extension must be detected, also in the manifest."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        changed = [data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :] for i in range(len(data)) for flip in (1, 0x20)]
        changed += [data[:size] for size in range(len(data))] + [data + b"\n", data + b" "]
        for wrong in changed:
            path.write_bytes(wrong)
            with pytest.raises(DamagedCheckpointError, match="checkpoint is damaged"):
                verify_directory(directory)
        path.write_bytes(data)
    verify_directory(directory)


def test_missing_file_is_damage_and_all_are_named(directory):
    """The message must name the missing and the changed files together."""
    (directory / "a.bin").unlink()
    (directory / "shards/0.bin").write_bytes(b"\x01" * 100)
    with pytest.raises(DamagedCheckpointError, match=r"2 of 4 files .*a\.bin: No such file.*shards/0\.bin has CRC32"):
        verify_directory(directory)


def test_extra_file_is_no_damage_and_reported(directory):
    """A README that a user adds changes no byte of the checkpoint."""
    (directory / "README").write_text("mine")
    (directory / "shards/9.bin").write_text("")
    assert verify_directory(directory).extra_files == ("README", "shards/9.bin")


def test_without_contents_only_presence_and_sizes_are_compared(directory):
    """The quick check must detect missing or cut files, but need not detect changed ones."""
    (directory / "a.bin").write_bytes(b"x" * 10)
    verify_directory(directory, contents=False)
    (directory / "a.bin").write_bytes(b"x" * 9)
    with pytest.raises(DamagedCheckpointError, match="has 9 bytes, but was written with 10"):
        verify_directory(directory, contents=False)


def test_directory_without_manifest_was_written_without_checksums(directory, tmp_path):
    """A directory of other software can't be verified, which is not damage; an empty or missing directory is."""
    (directory / MANIFEST_NAME).unlink()
    verification = verify_path(directory)
    assert not verification.has_checksums
    assert (verification.num_files, verification.num_bytes) == (4, 111)
    (tmp_path / "empty/deeper").mkdir(parents=True)
    with pytest.raises(DamagedCheckpointError, match="it contains no file"):
        verify_path(tmp_path / "empty")
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        verify_directory(tmp_path / "missing")


def test_uncommitted_directory_is_refused_with_its_writer(directory):
    """A directory that was begun and never committed must be refused, and the message must name the process."""
    save_manifest(directory, Manifest(owner={"hostname": "node7", "process_id": 12}))
    with pytest.raises(DamagedCheckpointError, match="never committed: process 12 on node7 began it"):
        verify_path(directory)


def test_empty_directory_is_not_committed(tmp_path):
    """A checkpoint without files, even with subdirectories, must be refused and leave no manifest."""
    (tmp_path / "shards").mkdir()
    with pytest.raises(ValueError, match="contains no file"):
        write_manifest(tmp_path)
    assert not (tmp_path / MANIFEST_NAME).exists()


def _forge(directory: Path, **content: object) -> None:
    whole = {"format": "lightning_faulttolerant manifest", "version": 1, "metadata": {}, "files": {}, **content}
    (directory / MANIFEST_NAME).write_bytes(manifest._encode(whole))


@pytest.mark.parametrize(
    "name", ["../secret", "shards/../../secret", "/etc/hostname", "./a.bin", "shards//0.bin", "", "..", MANIFEST_NAME]
)
def test_path_that_leaves_the_directory_is_refused(directory, name):
    """A manifest with right checksums must not make us read a file elsewhere."""
    (directory.parent / "secret").write_bytes(b"x")
    _forge(directory, files={name: {"size_bytes": 1, "crc32": f"{zlib.crc32(b'x'):08x}"}})
    with pytest.raises(DamagedCheckpointError, match="not a path of a file in the directory"):
        verify_path(directory)


def test_link_that_leaves_the_directory_is_refused(directory):
    """A file or a directory that has become a link to another place must not be read as part of the checkpoint."""
    secret = directory.parent / "secret"
    secret.write_bytes(CONTENTS["a.bin"])
    (directory / "a.bin").unlink()
    (directory / "a.bin").symlink_to(secret)
    with pytest.raises(DamagedCheckpointError, match=r"a\.bin leads outside the directory"):
        verify_path(directory)
    with pytest.raises(ValueError, match="outside the checkpoint"):
        write_manifest(directory)


def test_link_within_the_directory_counts_as_its_file(directory):
    """A link beside its file must verify, even if a copy has made a file of it, and fail when its file changes."""
    (directory / "last.bin").symlink_to("a.bin")
    write_manifest(directory)
    assert verify_directory(directory).num_files == 5
    (directory / "last.bin").unlink()
    (directory / "last.bin").write_bytes(CONTENTS["a.bin"])
    verify_directory(directory)
    (directory / "last.bin").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"last\.bin has 0 bytes"):
        verify_directory(directory)


@pytest.mark.parametrize("kind", ["link to a directory", "device, pipe or socket"])
def test_what_is_no_file_is_refused_at_commit(directory, kind):
    """Anything that can't be read back as bytes must not be committed, and must never hang the commit."""
    if kind == "link to a directory":
        (directory / "loop").symlink_to("shards")
    else:
        os.mkfifo(directory / "pipe")
    with pytest.raises(ValueError, match=kind):
        write_manifest(directory)


@pytest.mark.parametrize(
    "content",
    [
        {"files": []},
        {"files": {"a.bin": 3}},
        {"files": {"a.bin": {"size_bytes": -1, "crc32": "00000000"}}},
        {"files": {"a.bin": {"size_bytes": True, "crc32": "00000000"}}},
        {"files": {"a.bin": {"size_bytes": 1, "crc32": "0x000000"}}},
        {"metadata": None},
        {"owner": "me"},
        {"format": "another"},
    ],
)
def test_nonsense_in_a_manifest_is_damage(directory, content):
    """A manifest with a right checksum but wrong content must be refused, and break nothing."""
    _forge(directory, **content)
    with pytest.raises(DamagedCheckpointError, match="checkpoint_manifest"):
        verify_path(directory)


@pytest.mark.parametrize("data", [b"", b"null", b"[" * 100_000, b"\xff", b'{"a": 1e999}', b"1" * 10_000])
def test_garbage_in_the_place_of_a_manifest_is_damage(directory, data):
    """Any garbage in the manifest file must count as damage."""
    (directory / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="not as it was written"):
        verify_path(directory)


def test_newer_manifest_is_no_damage(directory):
    """A later version's manifest must be refused as such: the checkpoint may be whole."""
    _forge(directory, version=2)
    with pytest.raises(CheckpointError, match="manifest of version 2") as caught:
        verify_path(directory)
    assert not isinstance(caught.value, DamagedCheckpointError)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(database=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.text(), PLAIN, max_size=4))
def test_metadata_read_back_as_they_were_given(directory, metadata):
    """Any plain value must come back equal and with the same type."""
    write_manifest(directory, metadata=metadata, fsync=False)
    assert repr(read_manifest(directory).metadata) == repr(dict(sorted(metadata.items()))) or (
        read_manifest(directory).metadata == metadata
    )


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ({"a": (1,)}, "metadata/a is a tuple"),
        ({"a": [{1: 2}]}, "metadata/a/0 has the key 1"),
        ({"a": float("nan")}, "metadata/a is nan"),
        ({"path": Path("/a")}, "metadata/path is a PosixPath"),
        ([], "is a list"),
    ],
)
def test_metadata_that_would_not_read_back_are_refused(directory, metadata, place):
    """Metadata that a manifest can't hold must raise before anything is written, with their place."""
    before = (directory / MANIFEST_NAME).read_bytes()
    with pytest.raises((TypeError, ValueError), match=place):
        write_manifest(directory, metadata=metadata or [0])
    assert (directory / MANIFEST_NAME).read_bytes() == before


def test_directory_is_verified_by_url(directory, remote_url):
    """A directory in an object store must give the same answers as a local one, and be distinguished from a file."""
    store = open_store(remote_url)

    def put(name: str, data: bytes) -> None:
        with store.writer(name) as file:
            file.write(data)

    for path in directory.rglob("*"):
        if path.is_file():
            put(path.relative_to(directory).as_posix(), path.read_bytes())
    assert verify_path(remote_url).num_files == 4
    put("README", b"mine")
    assert verify_path(f"{remote_url}/").extra_files == ("README",)
    put("a.bin", b"012345678X")
    with pytest.raises(DamagedCheckpointError, match=r"a\.bin has CRC32"):
        verify_path(remote_url)
    store.delete("a.bin")
    with pytest.raises(DamagedCheckpointError, match=r"1 of 4 files .*a\.bin"):
        verify_path(remote_url)
    store.delete(MANIFEST_NAME)
    for read in (verify_path, verify_directory):
        with pytest.raises(DamagedCheckpointError, match=remote_url):
            read(remote_url)


@pytest.mark.parametrize(("number", "is_damage"), [(errno.EIO, True), (errno.EACCES, False)])
def test_read_error_is_damage_and_a_missing_permission_is_none(directory, monkeypatch, number, is_damage):
    """A bad disk is a reason to take another checkpoint; a missing permission is not, as it would affect them all."""
    real = contents.open_file

    def fail(path, **options):
        if str(path).endswith(".bin"):
            raise OSError(number, os.strerror(number))
        return real(path, **options)

    monkeypatch.setattr(contents, "open_file", fail)
    with pytest.raises(DamagedCheckpointError if is_damage else PermissionError, match=os.strerror(number)):
        verify_directory(directory)


def test_directory_that_can_not_be_listed_is_no_damage(directory):
    """All files were right: an error in the search for extra ones must be raised, but is not damage."""
    with FaultyFiles(directory, fail_with(errno.EIO), kind="list"), pytest.raises(OSError, match="Input/output error"):
        verify_directory(directory)


def test_directory_that_holds_only_directories_is_on_the_disk_before_the_manifest(tmp_path):
    """A power loss must not remove a directory's name between the root and the files of a committed checkpoint."""
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    (tmp_path / "ranks" / "0" / "shard.bin").write_bytes(b"123")
    with FaultyFiles(tmp_path) as files:
        write_manifest(tmp_path)
    commit = next(step.number for step in files.steps if step.kind == "rename")
    synced = {step.path for step in files.steps if step.kind == "fsync_directory" and step.number < commit}
    assert {tmp_path, tmp_path / "ranks", tmp_path / "ranks" / "0"} <= synced


def test_each_file_and_directory_is_on_the_disk_before_the_manifest(directory, monkeypatch):
    """A power loss after the commit must keep all that the manifest names: fsync of each must come first."""
    (directory / MANIFEST_NAME).unlink()
    events = []
    real_fsync, real_replace = os.fsync, os.replace
    lock = threading.Lock()

    def fsync(descriptor):
        with lock:
            events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("commit"), real_replace(*paths)))
    write_manifest(directory)
    commit = events.index("commit")
    expected = {str(directory / name) for name in CONTENTS}
    expected |= {str(directory / folder) for folder in ("", "shards", "shards/deep")}
    assert expected <= {event.rstrip("/") for event in events[:commit]}
    assert {str(directory), str(directory.parent)} <= set(events[commit:])
    events.clear()
    write_manifest(directory, fsync=False)
    assert events == ["commit"]


def test_file_that_grows_while_it_is_summed_is_refused(directory, monkeypatch):
    """A file that a thread is still writing must be noticed, and not be committed halfway."""
    real = contents._sum_stream

    def grow(file, num_bytes):
        found = real(file, num_bytes)
        with open(directory / "a.bin", "ab") as other:
            other.write(b"more")
        return found

    monkeypatch.setattr(contents, "_sum_stream", grow)
    with pytest.raises(ValueError, match=r"grown from \d+ to \d+ bytes"):
        write_manifest(directory)


def test_manifest_is_json_that_people_can_read(directory):
    """A person without the package must still be able to see the content of a checkpoint."""
    content = json.loads((directory / MANIFEST_NAME).read_text())
    assert content["files"]["a.bin"] == {"size_bytes": 10, "crc32": f"{zlib.crc32(CONTENTS['a.bin']):08x}"}

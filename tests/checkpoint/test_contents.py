"""A directory with a manifest: each changed byte is found, nothing outside is read, and extra files are not damage."""

import json
import os
import zlib
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.contents import verify_directory
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, save_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.writers import write_manifest
from tests.messages import error_of, plain
from tests.storage.stores import write

CONTENTS = {"a.bin": b"0123456789", "shards/0.bin": b"\x00" * 100, "shards/deep/ü 1.bin": b"", ".hidden": b"h"}
METADATA = {"step": 3, "names": ["x", None, 0.5, True], "nested": {"a": {}}}


@pytest.fixture
def directory(tmp_path):
    """A committed directory with files of several kinds."""
    root = tmp_path / "checkpoint"
    for name, data in CONTENTS.items():
        write(str(root), name, data)
    write_manifest(root, metadata=METADATA)
    return root


def test_committed_directory_verifies_and_tells_its_metadata(directory):
    """A committed directory verifies; its manifest, which people can read, has files, sizes, sums, and metadata."""
    (directory / "README").write_text("mine")
    found, manifest = verify_path(directory), read_manifest(directory)
    assert (found.has_checksums, found.num_files, found.num_bytes, found.extra_files) == (True, 4, 111, ("README",))
    assert manifest.metadata == METADATA
    sums = {name: (len(data), zlib.crc32(data)) for name, data in CONTENTS.items()}
    assert {name: (entry.size_bytes, entry.crc32) for name, entry in manifest.files.items()} == sums
    content = json.loads((directory / MANIFEST_NAME).read_text())
    assert content["files"]["a.bin"] == {"size_bytes": 10, "crc32": f"{zlib.crc32(CONTENTS['a.bin']):08x}"}


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_each_changed_byte_of_the_files_and_of_the_manifest_is_detected(directory, every):
    """Each changed byte, truncation and extension is detected, also in the manifest."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        changed = [data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :] for i in range(len(data)) for flip in (1, 0x20)]
        changed += [data[:size] for size in range(len(data))] + [data + b"\n", data + b" "]
        for wrong in changed[::-every]:
            path.write_bytes(wrong)
            with pytest.raises(DamagedCheckpointError, match="checkpoint is damaged"):
                verify_directory(directory)
        path.write_bytes(data)
    verify_directory(directory)


def _forged(**content):
    """Return a function that writes a manifest with a right checksum."""
    whole = {"format": "lightning_faulttolerant manifest", "version": 1, "metadata": {}, "files": {}, **content}
    checksum = f"{zlib.crc32(json.dumps(whole, indent=1, sort_keys=True).encode()):08x}"
    return _garbage(json.dumps({**whole, "checksum": checksum}, indent=1, sort_keys=True).encode() + b"\n")


def _garbage(data):
    return lambda directory: (directory / MANIFEST_NAME).write_bytes(data)


def _lose_and_change(directory):
    (directory / "a.bin").unlink()
    (directory / "shards/0.bin").write_bytes(b"\x01" * 100)


def _empty(directory):
    for name in (*CONTENTS, MANIFEST_NAME):
        (directory / name).unlink()


def _lead_out(directory):
    (directory.parent / "secret").write_bytes(CONTENTS["a.bin"])
    (directory / "a.bin").unlink()
    (directory / "a.bin").symlink_to(directory.parent / "secret")


NAMES = ["shards/../../secret", "/etc/hostname", "./a.bin", "shards//0.bin", "", MANIFEST_NAME]
WHOLE = {"size_bytes": 1, "crc32": f"{zlib.crc32(b'x'):08x}"}
ENTRIES = [3, {**WHOLE, "size_bytes": -1}, {**WHOLE, "size_bytes": True}, {**WHOLE, "crc32": "0x000000"}]
CHANGES = [{"files": []}, {"metadata": None}, {"owner": "me"}, {"format": "another"}, {"version": 2}]
DAMAGES = {
    "a file is missing, another changed": _lose_and_change,
    "a file is cut": lambda directory: (directory / "a.bin").write_bytes(b"x" * 9),
    "no file": _empty,
    "no directory": lambda directory: directory.rename(directory.parent / "moved"),
    "never committed": lambda path: save_manifest(path, Manifest(owner={"hostname": "node7", "process_id": 12})),
    "a link leads out": _lead_out,
    **{f"file {name!r}": _forged(files={name: WHOLE}) for name in NAMES},
    **{f"entry {entry}": _forged(files={"a.bin": entry}) for entry in ENTRIES},
    **{f"content {content}": _forged(**content) for content in CHANGES},
    **{f"garbage {data[:9]!r}": _garbage(data) for data in (b"", b"null", b"[" * 100_000, b"\xff", b"1" * 10_000)},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_message_names_the_damage(directory, snapshot, damage):
    """Whatever is in the place of the files and of the manifest, the error says what is wrong."""
    DAMAGES[damage](directory)
    with pytest.raises(CheckpointError) as caught:
        verify_path(directory)
    assert isinstance(caught.value, DamagedCheckpointError) == ("version" not in damage)
    assert plain(str(caught.value), DIR=directory.parent) == snapshot


def test_without_contents_only_presence_and_sizes_are_compared(directory):
    """The quick check detects missing or cut files, but need not detect changed ones; other software has no sums."""
    (directory / "last.bin").symlink_to("a.bin")
    write_manifest(directory)
    assert verify_directory(directory).num_files == 5
    (directory / "last.bin").unlink()
    (directory / "last.bin").write_bytes(CONTENTS["a.bin"])  # as a copy makes of a link
    verify_directory(directory)
    (directory / "last.bin").write_bytes(b"x" * 10)
    verify_directory(directory, contents=False)
    (directory / "last.bin").write_bytes(b"x" * 9)
    with pytest.raises(DamagedCheckpointError, match="has 9 bytes, but was written with 10"):
        verify_directory(directory, contents=False)
    (directory / MANIFEST_NAME).unlink()
    assert (verify_path(directory).has_checksums, verify_path(directory).num_files) == (False, 5)


NOT_COMMITTED = {
    "no file": (_empty, {}),
    "a link leads out": (_lead_out, {}),
    "a link to a directory": (lambda directory: (directory / "loop").symlink_to("shards"), {}),
    "a pipe": (lambda directory: os.mkfifo(directory / "pipe"), {}),
    **{
        f"metadata {metadata}": (lambda _: None, metadata)
        for metadata in ({"a": (1,)}, {"a": [{1: 2}]}, {"a": float("nan")}, {"path": Path("/a")}, [0])
    },
}


@pytest.mark.parametrize(("change", "metadata"), NOT_COMMITTED.values(), ids=NOT_COMMITTED)
def test_what_would_not_read_back_is_not_committed(directory, snapshot, change, metadata):
    """Files and metadata that can't be read back as they are raise before anything is written, with their place."""
    change(directory)
    (directory / MANIFEST_NAME).write_bytes(b"before")
    said = error_of((TypeError, ValueError), lambda: write_manifest(directory, metadata=metadata))
    assert (directory / MANIFEST_NAME).read_bytes() == b"before"
    assert plain(said, DIR=directory.parent) == snapshot

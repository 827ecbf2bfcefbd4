"""A directory with a manifest: each changed byte is found, nothing outside is read, and extra files are not damage."""

from __future__ import annotations

import errno
import io
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.contents import deal_files, verify_directory, write_manifest
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, save_manifest
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage.store import open_store
from tests.faulty_files import FaultyFiles
from tests.file_faults import fail_with
from tests.messages import plain
from tests.storage.stores import error_of, write

CONTENTS = {"a.bin": b"0123456789", "shards/0.bin": b"\x00" * 100, "shards/deep/ü 1.bin": b"", ".hidden": b"h"}
METADATA: dict[str, Any] = {"step": 3, "names": ["x", None, 0.5, True], "nested": {"a": {}}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A committed directory with files of several kinds."""
    root = tmp_path / "checkpoint"
    for name, data in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    write_manifest(root, metadata=METADATA)
    return root


def test_committed_directory_verifies_and_tells_its_metadata(directory: Path) -> None:
    """A committed directory verifies; its manifest, which people can read, has files, sizes, sums, and metadata."""
    verification = verify_path(directory)
    assert (verification.has_checksums, verification.num_files, verification.num_bytes) == (True, 4, 111)
    assert verification.extra_files == ()
    found = read_manifest(directory)
    assert found.metadata == METADATA
    sums = {name: (len(data), zlib.crc32(data)) for name, data in CONTENTS.items()}
    assert {name: (entry.size_bytes, entry.crc32) for name, entry in found.files.items()} == sums
    content = json.loads((directory / MANIFEST_NAME).read_text())
    assert content["files"]["a.bin"] == {"size_bytes": 10, "crc32": f"{zlib.crc32(CONTENTS['a.bin']):08x}"}
    (directory / "README").write_text("mine")
    (directory / "shards/9.bin").write_text("")
    assert verify_directory(directory).extra_files == ("README", "shards/9.bin")


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_each_changed_byte_of_the_files_and_of_the_manifest_is_detected(directory: Path, every: int) -> None:
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


def forge(directory: Path, **content: object) -> None:
    """Write a manifest with a right checksum."""
    whole: dict[str, object] = {"format": "lightning_faulttolerant manifest", "version": 1, "metadata": {}, "files": {}}

    def encoded(more: dict[str, object]) -> str:
        return json.dumps({**whole, **content, **more}, indent=1, sort_keys=True)

    checksum = f"{zlib.crc32(encoded({}).encode()):08x}"
    (directory / MANIFEST_NAME).write_text(encoded({"checksum": checksum}) + "\n")


def _lose_and_change(directory: Path) -> None:
    (directory / "a.bin").unlink()
    (directory / "shards/0.bin").write_bytes(b"\x01" * 100)


def _empty(directory: Path) -> None:
    for name in (*CONTENTS, MANIFEST_NAME):
        (directory / name).unlink()


def _lead_out(directory: Path) -> None:
    (directory.parent / "secret").write_bytes(CONTENTS["a.bin"])
    (directory / "a.bin").unlink()
    (directory / "a.bin").symlink_to(directory.parent / "secret")


def _begin(directory: Path) -> None:
    save_manifest(directory, Manifest(owner={"hostname": "node7", "process_id": 12}))


def _entry(**entry: object) -> Callable[[Path], None]:
    return lambda directory: forge(directory, files={"a.bin": entry})


def _named(name: str) -> Callable[[Path], None]:
    entry = {"size_bytes": 1, "crc32": f"{zlib.crc32(b'x'):08x}"}
    return lambda directory: forge(directory, files={name: entry})


def _garbage(data: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / MANIFEST_NAME).write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file is missing, another changed": _lose_and_change,
    "a file is cut": lambda directory: (directory / "a.bin").write_bytes(b"x" * 9),
    "no file": _empty,
    "no directory": lambda directory: directory.rename(directory.parent / "moved"),
    "never committed": _begin,
    "a link leads out": _lead_out,
    **{f"path {name!r}": _named(name) for name in ("../secret", "shards/../../secret", "/etc/hostname", "./a.bin")},
    **{f"path {name!r}": _named(name) for name in ("shards//0.bin", "", "..", MANIFEST_NAME)},
    "files of another type": lambda directory: forge(directory, files=[]),
    "entry of another type": lambda directory: forge(directory, files={"a.bin": 3}),
    "negative size": _entry(size_bytes=-1, crc32="00000000"),
    "size of another type": _entry(size_bytes=True, crc32="00000000"),
    "sum of another form": _entry(size_bytes=1, crc32="0x000000"),
    "no metadata": lambda directory: forge(directory, metadata=None),
    "owner of another type": lambda directory: forge(directory, owner="me"),
    "another format": lambda directory: forge(directory, format="another"),
    **{f"garbage {data[:9]!r}": _garbage(data) for data in (b"", b"null", b"[" * 100_000, b"\xff", b'{"a": 1e999}')},
    "garbage of digits": _garbage(b"1" * 10_000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_message_names_the_damage(
    directory: Path, snapshot: SnapshotAssertion, damage: Callable[[Path], object]
) -> None:
    """Whatever is in the place of the files and of the manifest, the error says what is wrong."""
    damage(directory)
    with pytest.raises(DamagedCheckpointError) as caught:
        verify_path(directory)
    assert plain(str(caught.value), DIR=directory.parent) == snapshot


def test_what_is_no_damage(directory: Path) -> None:
    """A directory of other software has no checksums, and a later version's manifest is refused as such."""
    forge(directory, version=2)
    with pytest.raises(CheckpointError, match="manifest of version 2") as caught:
        verify_path(directory)
    assert not isinstance(caught.value, DamagedCheckpointError)
    (directory / MANIFEST_NAME).unlink()
    verification = verify_path(directory)
    assert (verification.has_checksums, verification.num_files, verification.num_bytes) == (False, 4, 111)


def test_without_contents_only_presence_and_sizes_are_compared(directory: Path) -> None:
    """The quick check detects missing or cut files, but need not detect changed ones."""
    (directory / "a.bin").write_bytes(b"x" * 10)
    verify_directory(directory, contents=False)
    (directory / "a.bin").write_bytes(b"x" * 9)
    with pytest.raises(DamagedCheckpointError, match="has 9 bytes, but was written with 10"):
        verify_directory(directory, contents=False)


def test_link_within_the_directory_counts_as_its_file(directory: Path) -> None:
    """A link beside its file verifies, even if a copy has made a file of it, and fails when its file changes."""
    (directory / "last.bin").symlink_to("a.bin")
    write_manifest(directory)
    assert verify_directory(directory).num_files == 5
    (directory / "last.bin").unlink()
    (directory / "last.bin").write_bytes(CONTENTS["a.bin"])
    verify_directory(directory)
    (directory / "last.bin").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"last\.bin has 0 bytes"):
        verify_directory(directory)


NOT_COMMITTED: dict[str, tuple[Callable[[Path], object], dict[str, Any] | None]] = {
    "no file": (_empty, {}),
    "a link leads out": (_lead_out, {}),
    "a link to a directory": (lambda directory: (directory / "loop").symlink_to("shards"), {}),
    "a pipe": (lambda directory: os.mkfifo(directory / "pipe"), {}),
    "a tuple": (lambda _: None, {"a": (1,)}),
    "a number as key": (lambda _: None, {"a": [{1: 2}]}),
    "not a number": (lambda _: None, {"a": float("nan")}),
    "a path": (lambda _: None, {"path": Path("/a")}),
    "a list": (lambda _: None, [0]),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("change", "metadata"), NOT_COMMITTED.values(), ids=NOT_COMMITTED)
def test_what_would_not_read_back_is_not_committed(
    directory: Path, snapshot: SnapshotAssertion, change: Callable[[Path], object], metadata: dict[str, Any]
) -> None:
    """Files and metadata that can't be read back as they are raise before anything is written, with their place."""
    change(directory)
    path = directory / MANIFEST_NAME
    before = path.read_bytes() if path.exists() else None
    with pytest.raises((TypeError, ValueError)) as caught:
        write_manifest(directory, metadata=metadata)
    assert (path.read_bytes() if path.exists() else None) == before
    assert plain(str(caught.value), DIR=directory.parent) == snapshot


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(database=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.text(), PLAIN, max_size=4))
def test_metadata_read_back_as_they_were_given(directory: Path, metadata: dict[str, Any]) -> None:
    """Any plain value comes back equal and with the same type."""
    write_manifest(directory, metadata=metadata, fsync=False)
    found = read_manifest(directory).metadata
    assert found == metadata
    assert repr(found) == repr(dict(sorted(metadata.items()))) or any(map(str, metadata))


def test_directory_is_verified_by_url(directory: Path, remote_url: str) -> None:
    """A directory in an object store gives the same answers as a local one, and is distinguished from a file."""
    store = open_store(remote_url)
    for path in directory.rglob("*"):
        if path.is_file():
            write(remote_url, path.relative_to(directory).as_posix(), path.read_bytes())
    assert verify_path(remote_url).num_files == 4
    write(remote_url, "README", b"mine")
    assert verify_path(f"{remote_url}/").extra_files == ("README",)
    write(remote_url, "a.bin", b"012345678X")
    assert "a.bin has CRC32" in error_of(DamagedCheckpointError, lambda: verify_path(remote_url))
    store.delete("a.bin")
    assert "1 of 4 files" in error_of(DamagedCheckpointError, lambda: verify_path(remote_url))
    store.delete(MANIFEST_NAME)
    for read in (verify_path, verify_directory):
        assert remote_url in error_of(DamagedCheckpointError, lambda read=read: read(remote_url))


@pytest.mark.parametrize(("number", "is_damage"), [(errno.EIO, True), (errno.EACCES, False)])
def test_read_error_is_damage_and_a_missing_permission_is_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    """A bad disk is a reason to take another checkpoint; a missing permission is not, as it would affect them all."""
    real = open

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith(".bin"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fail)
        with pytest.raises(DamagedCheckpointError if is_damage else PermissionError, match=os.strerror(number)):
            verify_directory(directory)
    with FaultyFiles(directory, fail_with(number), kind="list"), pytest.raises(OSError, match=os.strerror(number)):
        verify_directory(directory)  # all files are right: not damage


def test_each_file_and_directory_is_on_the_disk_before_the_manifest(directory: Path) -> None:
    """A power loss after the commit keeps all that the manifest names, in directories of directories too."""
    (directory / MANIFEST_NAME).unlink()
    (directory / "ranks" / "0").mkdir(parents=True)
    (directory / "ranks" / "0" / "shard.bin").write_bytes(b"123")
    with FaultyFiles(directory.parent) as files:
        write_manifest(directory)
    steps = [(step.kind, step.path) for step in files.steps]
    commit = [kind for kind, _ in steps].index("rename")
    folders = ("", "shards", "shards/deep", "ranks", "ranks/0")
    before = {("fsync", directory / name) for name in (*CONTENTS, "ranks/0/shard.bin")}
    before |= {("fsync_directory", directory / folder) for folder in folders}
    assert before <= set(steps[:commit])
    assert {("fsync_directory", directory), ("fsync_directory", directory.parent)} <= set(steps[commit:])
    with FaultyFiles(directory.parent) as files:
        write_manifest(directory, fsync=False)
    assert not {"fsync", "fsync_directory"} & {step.kind for step in files.steps}


def test_file_that_grows_while_it_is_summed_is_refused(directory, monkeypatch):
    """A file that a thread is still writing is noticed, and not committed halfway."""
    real = open

    class Grows(io.FileIO):
        def readinto(self, buffer):
            with real(directory / "a.bin", "ab") as other:
                other.write(b"more")
            return super().readinto(buffer)

    def opened(path, mode="r", *args, **options):
        return Grows(path) if Path(path).name == "a.bin" else real(path, mode, *args, **options)

    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(ValueError, match=r"grown from \d+ to \d+ bytes"):
        write_manifest(directory)


def test_files_are_dealt_by_their_sizes(tmp_path: Path) -> None:
    """Ranks that sum files together have about the same number of bytes each."""
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes(1000 if number == 3 else 200))
    assert deal_files(tmp_path, "012345", num_shares=2) == [["3"], ["0", "1", "2", "4", "5"]]

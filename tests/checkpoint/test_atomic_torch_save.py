"""`atomic_torch_save` accepts whatever `torch.save` accepts; the path holds the old file or the new one, whole."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import lightning_faulttolerant
from lightning_faulttolerant import atomic_torch_save
from lightning_faulttolerant.checkpoint.saving import atomic_write_bytes
from lightning_faulttolerant.checkpoint.verify import verify_file
from tests.faulty_files import FaultyFiles, PowerLoss, fail_with, write_short
from tests.messages import plain

CONTENT = {"step": 3, "weights": torch.arange(20_000)}


def assert_holds(file: str | Path | bytes) -> None:
    """Check that a file is whole, and has the content above."""
    loaded = torch.load(io.BytesIO(file) if isinstance(file, bytes) else file, weights_only=True)
    assert loaded["step"] == CONTENT["step"]
    assert torch.equal(loaded["weights"], CONTENT["weights"])


def names(directory: Path) -> list[str]:
    """List a directory."""
    return sorted(os.listdir(directory))


class Raises:
    """Raises an error when it is pickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("as_argument", [str, os.fsencode, Path, lambda path: f"file://{path}", lambda path: path.name])
@pytest.mark.parametrize("name", ["a.ckpt", "ä" * 125 + ".ckpt"], ids=["short", "long"])
def test_each_kind_of_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_argument: Callable[[Path], Any], name: str
) -> None:
    """Text, bytes, a PathLike, a local URL, and a bare name mean the same file, even with the longest possible name."""
    assert "atomic_torch_save" in lightning_faulttolerant.__all__
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        for content in ({"step": 1}, CONTENT):
            atomic_torch_save(content, as_argument(tmp_path / name))
    finally:
        os.umask(before)
    verify_file(tmp_path / name)
    assert_holds(tmp_path / name)
    assert names(tmp_path) == [name]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o640  # as readable as one that open() creates


def test_symlink_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    """A write to a link changes the file that it points to, in another directory, even if that file is missing."""
    (tmp_path / "real").mkdir()
    (tmp_path / "last.ckpt").symlink_to(Path("real") / "a.ckpt")
    for _ in range(2):
        atomic_torch_save(CONTENT, tmp_path / "last.ckpt")
        assert os.readlink(tmp_path / "last.ckpt") == "real/a.ckpt"
        assert_holds(tmp_path / "real" / "a.ckpt")
        assert names(tmp_path / "real") == ["a.ckpt"]


def test_file_is_on_the_disk_before_its_name(tmp_path: Path) -> None:
    """A power loss after a write leaves the new bytes; without fsync nothing is synced, as each fsync costs time."""
    atomic_write_bytes(b"a long old content", tmp_path / "a.json")
    for keeps in ("synced", "names", "removals"):
        with PowerLoss(tmp_path, keeps=keeps):
            atomic_write_bytes(keeps.encode(), tmp_path / "a.json")
        assert (tmp_path / "a.json").read_bytes() == keeps.encode()
    for save in (atomic_torch_save, lambda _, *place, **more: atomic_write_bytes(b"x", *place, **more)):
        kinds = []
        for fsync in (True, False):
            with FaultyFiles(tmp_path) as files:
                save(CONTENT, tmp_path / "a.ckpt", fsync=fsync)
            kinds.append([step.kind for step in files.steps if step.kind not in ("open", "write", "close")])
        assert kinds == [["fsync", "rename", "fsync_directory"], ["rename"]]
    with FaultyFiles(tmp_path, fail_with(errno.EINVAL), kind="fsync_directory"):  # it has no such operation
        atomic_torch_save(CONTENT, tmp_path / "a.ckpt")


@pytest.mark.parametrize("buffering", [-1, 0])
def test_open_file_is_written_flushed_and_synced(tmp_path: Path, buffering: int) -> None:
    """The bytes are on the disk when it returns, though the file is open; a bad disk is not taken for a pipe."""
    for fsync, expected in ((True, {"write", "fsync"}), (False, {"write"})):
        with FaultyFiles(tmp_path) as files, open(tmp_path / "a.ckpt", "wb", buffering=buffering) as file:
            num_before = len(files.steps)
            atomic_torch_save(CONTENT, file, fsync=fsync)
            assert {step.kind for step in files.steps[num_before:]} == expected
            verify_file(tmp_path / "a.ckpt")
    assert_holds(tmp_path / "a.ckpt")
    with (
        FaultyFiles(tmp_path, fail_with(errno.EIO), kind="fsync"),
        open(tmp_path / "a.ckpt", "wb") as file,
        pytest.raises(OSError, match="Input/output error"),
    ):
        atomic_torch_save(CONTENT, file)


def test_what_is_no_file_is_written_as_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is written from its position on, as are a pipe, and an object whose `write` returns nothing."""

    class Sink:
        data = b""

        def write(self, data: memoryview) -> None:
            self.data += bytes(data)

    monkeypatch.chdir(tmp_path)
    buffer, sink = io.BytesIO(b"before"), Sink()
    buffer.seek(6)
    for place in (buffer, sink):
        atomic_torch_save(CONTENT, place)
    assert buffer.getvalue().startswith(b"before")
    for data in (buffer.getvalue()[6:], sink.data):
        assert_holds(data)
    assert names(tmp_path) == []  # the original of cycling_utils created a file named like the object
    reader, writer = os.pipe()
    with open(reader, "rb") as source, open(writer, "wb") as file:
        atomic_torch_save({"step": 3}, file)
        file.close()
        assert torch.load(io.BytesIO(source.read()), weights_only=True) == {"step": 3}


def test_raw_file_that_takes_less_than_it_is_given_gets_the_rest(tmp_path: Path) -> None:
    """Torch ignores the result of write: bytes that a system call left over are written, not lost."""
    with FaultyFiles(tmp_path, write_short, kind="write"):
        with open(tmp_path / "a.ckpt", "wb", buffering=0) as file:
            atomic_torch_save(CONTENT, file)
        atomic_write_bytes(b"x" * 100_000, tmp_path / "c")
    verify_file(tmp_path / "a.ckpt")
    assert (tmp_path / "c").read_bytes() == b"x" * 100_000


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch < 2.6 always writes CRCs")
def test_checksums_are_written_where_the_user_switched_them_off(tmp_path: Path) -> None:
    """Our files have CRCs whatever torch's option says, and the option is restored, even after an error."""
    torch.serialization.set_crc32_options(False)
    try:
        with open(tmp_path / "b.ckpt", "wb") as file:
            for place in (tmp_path / "a.ckpt", file):
                atomic_torch_save({"step": 1}, place)
        with pytest.raises(FileNotFoundError):
            atomic_torch_save({"step": 1}, tmp_path / "missing" / "a.ckpt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert all(verify_file(tmp_path / name).has_checksums for name in ("a.ckpt", "b.ckpt"))


class Refuses(io.RawIOBase):
    """A raw file that accepts ten bytes and then no more."""

    def __init__(self, answer: int | None) -> None:
        self._answer = answer
        self._num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int | None:
        self._num_bytes += (taken := min(10 - self._num_bytes, len(data)))
        return taken or self._answer


def _to(place: Any, **options: Any) -> Callable[[Path], None]:
    """Return a save to a place, or to a name in the directory."""
    return lambda directory: atomic_torch_save(
        CONTENT, directory / place if isinstance(place, str) else place, **options
    )


def _to_read_only(directory: Path) -> None:
    with open(directory / "a.ckpt", "rb") as file:
        atomic_torch_save(CONTENT, file)


# The third value says whether the message is ours.
REFUSED: dict[str, tuple[Callable[[Path], object], type[BaseException], bool]] = {
    "no directory": (_to("missing/a.ckpt"), FileNotFoundError, False),
    "a directory": (_to("folder"), IsADirectoryError, True),
    "a pipe by its name": (_to("pipe"), ValueError, True),
    "a text file": (_to(io.StringIO()), TypeError, True),
    "no file": (_to(None), AttributeError, False),
    "open for reading": (_to_read_only, io.UnsupportedOperation, False),
    "a full raw file": (_to(Refuses(0)), OSError, True),
    "a raw file that waits": (_to(Refuses(None)), OSError, True),
    "an unknown keyword": (_to("a.ckpt", no_such_keyword=1), TypeError, False),
    "the old format": (_to("a.ckpt", _use_new_zipfile_serialization=False), ValueError, True),
    **{
        error.__name__: (lambda d, error=error: atomic_torch_save({"x": Raises(error)}, d / "a.ckpt"), error, False)
        for error in (pickle.PicklingError, KeyboardInterrupt)
    },
}


@pytest.mark.parametrize(("save", "kind", "is_ours"), REFUSED.values(), ids=REFUSED)
def test_a_save_that_raises_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path,
    snapshot: SnapshotAssertion,
    save: Callable[[Path], object],
    kind: type[BaseException],
    is_ours: bool,
) -> None:
    """The error says what is wrong; the old file loads, and no other is there, of whatever kind the error is."""
    atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(kind) as caught:
        save(tmp_path)
    assert_holds(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt", "folder", "pipe"]
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    if is_ours:
        assert plain(re.sub(" at 0x[0-9a-f]+", "", str(caught.value)), DIR=tmp_path) == snapshot


def test_rename_whose_answer_got_lost_is_done(tmp_path: Path) -> None:
    """Over NFS, a rename that worked may report a missing file: that does not fail, but a real failure does."""

    def answer_lost(step: Any, carry_out: Callable[[], object]) -> None:
        carry_out()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(step.path))

    with FaultyFiles(tmp_path, answer_lost, kind="rename"):
        atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    with FaultyFiles(tmp_path, fail_with(errno.ENOENT), kind="rename"), pytest.raises(FileNotFoundError):
        atomic_torch_save({"step": 4, "weights": torch.zeros(1)}, tmp_path / "a.ckpt")
    assert_holds(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_temporary_name_that_is_taken_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    """The temporary file is beside the target, and created exclusively: a file of that name is another process's."""

    def be_faster(step: Any, carry_out: Callable[[], object]) -> object:
        step.path.write_bytes(b"somebody's")
        return carry_out()

    with FaultyFiles(tmp_path, be_faster, kind="open"), pytest.raises(FileExistsError):
        atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    [taken] = tmp_path.iterdir()
    assert taken.read_bytes() == b"somebody's"
    assert taken.name.startswith(".a.ckpt.tmp-")


def test_streaming_needs_no_second_copy_and_no_random_number(tmp_path: Path) -> None:
    """The object goes to the file as it is written, and saving does not change the training that saves."""

    def states() -> list[object]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    before = states()
    with FaultyFiles(tmp_path) as files:
        atomic_torch_save({"a": torch.zeros(500_000), "b": torch.zeros(500_000)}, tmp_path / "a.ckpt")
    sizes = [step.num_bytes for step in files.steps if step.kind == "write"]
    assert max(sizes) < 3_000_000 < 4_000_000 < sum(sizes)
    assert states() == before

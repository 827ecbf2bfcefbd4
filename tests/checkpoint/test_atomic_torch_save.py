"""`atomic_torch_save` accepts whatever `torch.save` accepts, without the faults of the original that it replaces."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import fsspec
import pytest
import torch

import lightning_faulttolerant
from lightning_faulttolerant import atomic_torch_save
from lightning_faulttolerant.checkpoint.archive import find_damage
from lightning_faulttolerant.checkpoint.saving import atomic_write_bytes
from lightning_faulttolerant.checkpoint.verify import verify_file
from tests.faulty_files import FaultyFiles, PowerLoss
from tests.file_faults import fail_with, kill_before, lose, write_short

FORK = multiprocessing.get_context("fork")
CONTENT = {"step": 3, "weights": torch.arange(20_000)}


def _assert_holds(file: str | Path | io.IOBase, expected: dict = CONTENT) -> None:
    loaded = torch.load(file, weights_only=True)
    assert loaded["step"] == expected["step"]
    assert torch.equal(loaded["weights"], expected["weights"])


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_is_public_by_its_name():
    """The drop-in must be importable from the package itself."""
    assert "atomic_torch_save" in lightning_faulttolerant.__all__


@pytest.mark.parametrize("as_argument", [str, os.fsencode, Path, lambda path: f"file://{path}"])
def test_each_kind_of_path_is_taken(tmp_path, as_argument):
    """Text, bytes, a PathLike and a local URL must all name the same file."""
    atomic_torch_save(CONTENT, as_argument(tmp_path / "a.ckpt"))
    _assert_holds(tmp_path / "a.ckpt")
    assert _names(tmp_path) == ["a.ckpt"]


def test_relative_path_without_a_directory_is_taken(tmp_path, monkeypatch):
    """A bare name must be a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    atomic_torch_save(CONTENT, "a.ckpt")
    _assert_holds(tmp_path / "a.ckpt")


def test_url_is_written_through_fsspec():
    """An object in a store must be written whole, under its URL, and so must small files."""
    atomic_torch_save(CONTENT, "memory://atomic-torch-save/run/a.ckpt")
    atomic_write_bytes(b"{}", "memory://atomic-torch-save/run/meta.json")
    fs = fsspec.filesystem("memory")
    assert sorted(fs.find("/atomic-torch-save")) == [
        "/atomic-torch-save/run/a.ckpt",
        "/atomic-torch-save/run/meta.json",
    ]
    data = fs.cat_file("/atomic-torch-save/run/a.ckpt")
    assert find_damage(io.BytesIO(data)) is None
    _assert_holds(io.BytesIO(data))
    assert fs.cat_file("/atomic-torch-save/run/meta.json") == b"{}"


class _CannotBePickled:
    def __reduce__(self) -> tuple:
        raise pickle.PicklingError("not this one")


def test_object_of_a_store_stays_when_the_save_fails():
    """A save to a URL that raises must leave the old object, and no other object."""
    atomic_torch_save(CONTENT, "memory://atomic-torch-save-2/a.ckpt")
    with pytest.raises(pickle.PicklingError, match="not this one"):
        atomic_torch_save({"x": _CannotBePickled()}, "memory://atomic-torch-save-2/a.ckpt")
    fs = fsspec.filesystem("memory")
    assert fs.find("/atomic-torch-save-2") == ["/atomic-torch-save-2/a.ckpt"]
    _assert_holds(io.BytesIO(fs.cat_file("/atomic-torch-save-2/a.ckpt")))


def test_bytes_io_is_written_and_makes_no_file(tmp_path, monkeypatch):
    """The original created a file named like the object: the buffer itself must hold the save, from its position on."""
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO(b"before")
    buffer.seek(6)
    atomic_torch_save(CONTENT, buffer)
    data = buffer.getvalue()
    assert data.startswith(b"before")
    assert find_damage(io.BytesIO(data[6:])) is None
    _assert_holds(io.BytesIO(data[6:]))
    assert _names(tmp_path) == []


@pytest.mark.parametrize("buffering", [-1, 0])
def test_open_file_is_written_flushed_and_synced(tmp_path, buffering):
    """The bytes must be on the disk when it returns, though the file is still open; without fsync they are written."""
    for fsync, expected in ((True, ["write", "fsync"]), (False, ["write"])):
        with FaultyFiles(tmp_path) as files, open(tmp_path / "a.ckpt", "wb", buffering=buffering) as file:
            num_before = len(files.steps)
            atomic_torch_save(CONTENT, file, fsync=fsync)
            assert sorted({step.kind for step in files.steps[num_before:]}, reverse=True) == expected
            verify_file(tmp_path / "a.ckpt")
    _assert_holds(tmp_path / "a.ckpt")


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch < 2.6 always writes CRCs")
def test_open_file_gets_checksums_where_they_are_switched_off(tmp_path):
    """A file object must get verifiable content, whatever torch's option says."""
    torch.serialization.set_crc32_options(False)
    try:
        buffer = io.BytesIO()
        atomic_torch_save(CONTENT, buffer)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    (tmp_path / "a.ckpt").write_bytes(buffer.getvalue())
    assert verify_file(tmp_path / "a.ckpt").has_checksums


def test_pipe_is_written_though_it_cannot_be_synced():
    """A file object without a disk behind it must be written, as by torch.save."""
    reader, writer = os.pipe()
    with open(reader, "rb") as source, open(writer, "wb") as file:
        atomic_torch_save({"step": 3}, file)
        file.close()
        assert torch.load(io.BytesIO(source.read()), weights_only=True) == {"step": 3}


def test_failing_fsync_of_an_open_file_is_raised(tmp_path):
    """A bad disk must not be taken for a pipe."""
    with (
        FaultyFiles(tmp_path, fail_with(errno.EIO), kind="fsync"),
        open(tmp_path / "a.ckpt", "wb") as file,
        pytest.raises(OSError, match="Input/output error"),
    ):
        atomic_torch_save(CONTENT, file)


def test_text_file_is_refused(tmp_path):
    """A text file must be refused before anything is written, with the remedy."""
    with open(tmp_path / "a.ckpt", "w") as file, pytest.raises(TypeError, match="mode 'wb'"):
        atomic_torch_save(CONTENT, file)
    with pytest.raises(TypeError, match="is a text file"):
        atomic_torch_save(CONTENT, io.StringIO())


def test_what_is_no_file_and_a_file_open_for_reading_are_refused(tmp_path):
    """The errors of torch.save and of the file itself must reach the caller."""
    with pytest.raises(AttributeError, match="write"):
        atomic_torch_save(CONTENT, None)
    (tmp_path / "a.ckpt").touch()
    with open(tmp_path / "a.ckpt", "rb") as file, pytest.raises(io.UnsupportedOperation):
        atomic_torch_save(CONTENT, file)


def test_keywords_of_torch_save_are_passed_on(tmp_path):
    """The requested pickle module and protocol must be used; torch must refuse an unknown keyword."""
    used = []

    class _Pickler(pickle.Pickler):
        def __init__(self, *args: object, **options: object) -> None:
            used.append(options.get("protocol", args[1] if len(args) > 1 else None))
            super().__init__(*args, **options)

    class _Pickle:
        __name__ = "mine"
        Pickler = _Pickler
        dumps, dump = staticmethod(pickle.dumps), staticmethod(pickle.dump)

    atomic_torch_save(CONTENT, tmp_path / "a.ckpt", pickle_module=_Pickle(), pickle_protocol=3)
    assert used == [3]
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert torch.equal(loaded["weights"], CONTENT["weights"])
    with pytest.raises(TypeError, match="no_such_keyword"):
        atomic_torch_save(CONTENT, tmp_path / "b.ckpt", no_such_keyword=1)
    assert _names(tmp_path) == ["a.ckpt"]


def test_the_old_file_format_is_refused(tmp_path):
    """A format without checksums must be refused with the reason, for a path and for an open file."""
    for file in (tmp_path / "a.ckpt", io.BytesIO()):
        with pytest.raises(ValueError, match="no checksums"):
            atomic_torch_save(CONTENT, file, _use_new_zipfile_serialization=False)
    assert _names(tmp_path) == []


def test_bytes_are_on_the_disk_before_the_name(tmp_path):
    """The original had no fsync: a power loss after the save must leave the new content, not an empty file."""
    atomic_torch_save({"step": 1, "weights": torch.zeros(1)}, tmp_path / "a.ckpt")
    for keeps in ("synced", "names", "removals"):
        with PowerLoss(tmp_path, keeps=keeps):
            atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
        _assert_holds(tmp_path / "a.ckpt")


def test_small_file_is_on_the_disk_before_its_name(tmp_path):
    """A small file must not lose bytes that are still in Python's buffer at the fsync."""
    atomic_write_bytes(b"old", tmp_path / "a.json")
    for keeps in ("synced", "names", "removals"):
        with PowerLoss(tmp_path, keeps=keeps):
            atomic_write_bytes(keeps.encode(), tmp_path / "a.json")
        assert (tmp_path / "a.json").read_bytes() == keeps.encode()


def _save_many(path: Path, step: int, barrier) -> None:
    barrier.wait()
    for _ in range(30):
        atomic_torch_save({"step": step, "weights": torch.full((20_000,), step)}, path)


def test_two_writers_of_one_path_do_not_meet(tmp_path):
    """The original had one temporary name: if two processes write one path, neither may fail, and the last must win."""
    barrier = FORK.Barrier(2)
    processes = [FORK.Process(target=_save_many, args=(tmp_path / "a.ckpt", step, barrier)) for step in (1, 2)]
    for process in processes:
        process.start()
    num_loaded = 0
    while any(process.is_alive() for process in processes):
        if (tmp_path / "a.ckpt").exists():
            loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
            assert torch.equal(loaded["weights"], torch.full((20_000,), loaded["step"]))
            num_loaded += 1
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert num_loaded > 0
    assert _names(tmp_path) == ["a.ckpt"]


def test_two_threads_that_write_one_path_do_not_meet(tmp_path):
    """Threads share a process id: their temporary files must still have different names."""
    barrier, errors = threading.Barrier(2), []

    def save_many(step: int) -> None:
        barrier.wait()
        try:
            for _ in range(20):
                atomic_torch_save({"step": step, "weights": torch.full((20_000,), step)}, tmp_path / "a.ckpt")
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=save_many, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert _names(tmp_path) == ["a.ckpt"]
    verify_file(tmp_path / "a.ckpt")


def test_nothing_is_left_behind_when_the_save_fails(tmp_path):
    """The original left its temporary file: neither an object that can't be pickled nor a full disk may leave one."""
    atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    with pytest.raises(pickle.PicklingError, match="not this one"):
        atomic_torch_save({"x": _CannotBePickled()}, tmp_path / "a.ckpt")
    with FaultyFiles(tmp_path, fail_with(errno.ENOSPC), kind="write"), pytest.raises(OSError, match="No space left"):
        atomic_torch_save({"step": 4, "weights": torch.zeros(1)}, tmp_path / "a.ckpt")
    assert _names(tmp_path) == ["a.ckpt"]
    _assert_holds(tmp_path / "a.ckpt")


def test_symlink_stays_a_symlink(tmp_path):
    """The original replaced the link: the file that it points to must be replaced instead, even if it is missing."""
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    for _ in range(2):
        atomic_torch_save(CONTENT, tmp_path / "last.ckpt")
        assert os.readlink(tmp_path / "last.ckpt") == "a.ckpt"
        _assert_holds(tmp_path / "a.ckpt")


def test_raw_file_that_takes_less_than_it_is_given_gets_the_rest(tmp_path):
    """Torch ignores the result of write: bytes that a system call left over must be written, not lost."""
    with (
        FaultyFiles(tmp_path, write_short, kind="write") as files,
        open(tmp_path / "a.ckpt", "wb", buffering=0) as file,
    ):
        atomic_torch_save(CONTENT, file)
    assert sum(step.kind == "write" for step in files.steps) > 50
    verify_file(tmp_path / "a.ckpt")
    _assert_holds(tmp_path / "a.ckpt")
    with FaultyFiles(tmp_path, write_short, kind="write"):
        atomic_torch_save(CONTENT, tmp_path / "b.ckpt")
        atomic_write_bytes(b"x" * 100_000, tmp_path / "c")
    verify_file(tmp_path / "b.ckpt")
    assert (tmp_path / "c").read_bytes() == b"x" * 100_000


class _Refuses(io.RawIOBase):
    """A raw file that accepts ten bytes and then no more."""

    def __init__(self, answer: int | None) -> None:
        self._answer = answer
        self._num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int | None:
        self._num_bytes += (taken := min(10 - self._num_bytes, len(data)))
        return taken or self._answer


@pytest.mark.parametrize("answer", [0, None])
def test_file_that_takes_no_more_is_an_error(answer):
    """A file that stops accepting bytes must raise; it must neither hang nor pass."""
    with pytest.raises(OSError, match=r"The file accepted only \d+ of \d+ bytes"):
        atomic_torch_save(CONTENT, _Refuses(answer))


def test_users_class_with_a_write_is_taken():
    """An object with a `write` that returns nothing, and without a descriptor, must be accepted, as by torch.save."""

    class _Sink:
        data = b""

        def write(self, data: memoryview) -> None:
            self.data += bytes(data)

    sink = _Sink()
    atomic_torch_save({"step": 3}, sink)
    assert torch.load(io.BytesIO(sink.data), weights_only=True) == {"step": 3}


def test_rename_that_is_lost_is_raised(tmp_path):
    """A rename that is reported as done and is not must be an error: the caller would take the old file for the new."""
    atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    with (
        FaultyFiles(tmp_path, lose, kind="rename"),
        pytest.raises(OSError, match="reported a rename that it did not do") as caught,
    ):
        atomic_torch_save({"step": 4, "weights": torch.zeros(1)}, tmp_path / "a.ckpt")
    assert caught.value.errno == errno.EIO
    assert _names(tmp_path) == ["a.ckpt"]
    _assert_holds(tmp_path / "a.ckpt")


def test_rename_whose_answer_got_lost_is_done(tmp_path):
    """Over NFS, a rename that worked may report a missing file: that must not fail, but a real failure must."""

    def answer_lost(step, carry_out):
        carry_out()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(step.path))

    def vanished(step, carry_out):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(step.path))

    with FaultyFiles(tmp_path, answer_lost, kind="rename"):
        atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    with FaultyFiles(tmp_path, vanished, kind="rename"), pytest.raises(FileNotFoundError):
        atomic_torch_save({"step": 4, "weights": torch.zeros(1)}, tmp_path / "a.ckpt")
    _assert_holds(tmp_path / "a.ckpt")
    assert _names(tmp_path) == ["a.ckpt"]


def test_temporary_name_that_is_taken_is_neither_overwritten_nor_removed(tmp_path, monkeypatch):
    """The temporary file must be created exclusively: a file that has its random name belongs to another process."""
    monkeypatch.setattr("secrets.token_hex", lambda num_bytes: "00" * num_bytes)
    monkeypatch.setattr("lightning_faulttolerant.storage.local._tokens", {})
    process = FORK.Process(target=_killed_at_its_rename, args=(tmp_path,))
    process.start()
    process.join()
    (temporary,) = tmp_path.iterdir()
    mine = temporary.with_name(temporary.name.replace(f"-{process.pid}-", f"-{os.getpid()}-"))
    mine.write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        atomic_torch_save(CONTENT, tmp_path / "a.ckpt")
    assert mine.read_bytes() == b"somebody's"


def _killed_at_its_rename(directory: Path) -> None:
    with FaultyFiles(directory, kill_before, kind="rename"):
        atomic_torch_save(CONTENT, directory / "a.ckpt")


def test_streaming_needs_no_second_copy(tmp_path):
    """The object must go to the file as it is written, not through a buffer of the whole."""
    sizes = []

    def note(step, carry_out):
        sizes.append(step.num_bytes)
        return carry_out()

    with FaultyFiles(tmp_path, note, kind="write"):
        atomic_torch_save({"a": torch.zeros(500_000), "b": torch.zeros(500_000)}, tmp_path / "a.ckpt")
    assert max(sizes) < 3_000_000
    assert sum(sizes) > 4_000_000

"""Saves: a staged copy is the checkpoint of its instant, and a path holds the old file or the new one, whole."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

import lightning_faulttolerant
from lightning_faulttolerant import atomic_torch_save
from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, Staging, atomic_write_bytes
from lightning_faulttolerant.checkpoint.verify import verify_file
from tests.faulty_files import FaultyFiles, fail_with, write_short
from tests.messages import error_of, plain
from tests.processes import in_child


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def saved(checkpoint, directory):
    """Return the bytes of a checkpoint's file; the file's name is part of them."""
    directory.mkdir(exist_ok=True)
    torch.save(checkpoint, directory / "a.ckpt")
    return (directory / "a.ckpt").read_bytes()


def trained():
    """Return a model with tied weights, and a checkpoint of it and its optimizer with something of every kind."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    module(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    base = torch.arange(24.0)
    loops = {"batches": [1, 2, (3, [4])], "counts": Counter("aab"), "none": None}
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "views": [base[2:8], base.reshape(4, 6).t(), base[::3], base.reshape(2, 3, 4)[:, 1]],
        "kinds": [torch.tensor(3), torch.empty(0), torch.zeros(2, 0), torch.ones(2, dtype=torch.bfloat16), base > 3],
        "complex": torch.tensor([1 + 2j]),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "with_grad": torch.ones(2, requires_grad=True),
        "not a leaf": torch.ones(2, requires_grad=True) * 2,
        "loops": loops,
        "the same": loops["batches"],
    }


def test_file_of_a_copy_is_that_of_the_original(tmp_path):
    """Values, views, sharing, attributes: torch.save writes the same file for the copy, whatever training changes."""
    checkpoint, staging = trained(), Staging()
    assert checkpoint["state_dict"]._metadata
    before = saved(checkpoint, tmp_path / "before")
    staging.reserve(checkpoint)()
    assert saved(staging.copy(checkpoint), tmp_path / "copy") == before
    staging.clear()
    copy = staging.copy(checkpoint)
    with torch.no_grad():
        views = [*checkpoint["views"], checkpoint["kinds"][0], checkpoint["parameter"], checkpoint["with_grad"]]
        states = [value for state in checkpoint["optimizer_states"][0]["state"].values() for value in state.values()]
        for tensor in (*checkpoint["state_dict"].values(), *views, *states):
            tensor.add_(1)
    checkpoint["loops"]["batches"][2][1].append(5)
    checkpoint["loops"]["counts"]["a"] += 1
    checkpoint["state_dict"]._metadata[""]["version"] = 9
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5
    assert saved(copy, tmp_path / "after") == before
    assert saved(checkpoint, tmp_path / "changed") != before


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
def test_layouts_that_deepcopy_does_not_know_are_copied():
    """Compressed sparse, nested, conjugated and negated tensors keep their values, and their originals."""
    compressed, numbers = torch.eye(3).to_sparse_csr(), torch.tensor([1 + 2j])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    kinds = {"numbers": numbers, "conjugated": numbers.conj(), "negative": numbers.conj().imag}
    copied = Staging().copy({"compressed": compressed, "nested": nested, **kinds})
    for changed in (compressed.values(), nested):
        changed.add_(1)
    assert copied["compressed"].layout is torch.sparse_csr
    assert torch.equal(copied["compressed"].to_dense(), torch.eye(3))
    assert [part.tolist() for part in copied["nested"].unbind()] == [[1, 1], [1, 1, 1]]
    assert [copied[name].tolist() for name in kinds] == [[1 + 2j], [1 - 2j], [-2]]


def test_memory_is_shared_as_it_was_and_used_again():
    """Tied weights and views share in the copy, even within other objects; the next copy uses the same memory."""
    weight, staging = torch.arange(6.0), Staging()
    copy = staging.copy({"weight": weight, "tied": weight, "view": weight[2:4], "held": Holder(weight[1:])})
    assert copy["tied"] is copy["weight"]
    copy["weight"][3] = -1
    assert (copy["view"].tolist(), copy["held"].tensor.tolist()) == ([2, -1], [1, 2, -1, 4, 5])
    assert weight.tolist() == list(range(6))
    tensors, staging = [torch.zeros(1000), torch.zeros(1000), torch.zeros(50)], Staging()
    first, second = ({tensor.data_ptr() for tensor in staging.copy(tensors)} for _ in range(2))
    assert first == second
    assert len(first) == 3
    ring = [torch.ones(1)]
    ring.append(ring)
    copied = staging.copy({"it": ring})["it"]
    assert copied[1] is copied is not ring


@pytest.fixture
def gate():
    """An event that a job waits for; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_forked_process_has_no_writer(gate):
    """A child that is forked during a job neither waits for it nor sees it as under way, and can begin its own."""
    writer, done = BackgroundWriter("autosave"), []
    writer.start(gate.wait)

    def main():
        assert not writer.is_busy
        writer.wait()
        writer.start(lambda: done.append(1))
        writer.wait()
        assert done

    assert in_child(main) == 0
    assert writer.is_busy


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
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


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
    """The store law has the power losses; without fsync nothing is synced, as each fsync costs time."""
    for save in (atomic_torch_save, lambda _, *place, **more: atomic_write_bytes(b"x", *place, **more)):
        kinds = []
        for fsync in (True, False):
            with FaultyFiles(tmp_path) as files:
                save(CONTENT, tmp_path / "a.ckpt", fsync=fsync)
            kinds.append([step.kind for step in files.steps if step.kind not in ("open", "write", "close")])
        assert kinds == [["fsync", "rename", "fsync_directory"], ["rename"]]
    with FaultyFiles(tmp_path, fail_with(errno.EINVAL), kind="fsync_directory"):  # it has no such operation
        atomic_torch_save(CONTENT, tmp_path / "a.ckpt")


def test_open_file_is_written_flushed_and_synced(tmp_path: Path) -> None:
    """The bytes are on the disk when it returns, though the file is open; a bad disk is not taken for a pipe."""
    for fsync, expected in ((True, {"write", "fsync"}), (False, {"write"})):
        with FaultyFiles(tmp_path) as files, open(tmp_path / "a.ckpt", "wb") as file:
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
    with open(reader, "rb") as source:
        with open(writer, "wb") as file:
            atomic_torch_save({"step": 3}, file)
        assert torch.load(io.BytesIO(source.read()), weights_only=True) == {"step": 3}


def test_raw_file_that_takes_less_than_it_is_given_gets_the_rest(tmp_path: Path) -> None:
    """Torch ignores the result of write: bytes that a system call left over are written, not lost."""
    with FaultyFiles(tmp_path, write_short, kind="write"), open(tmp_path / "a.ckpt", "wb", buffering=0) as file:
        atomic_torch_save(CONTENT, file)
    verify_file(tmp_path / "a.ckpt")


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
    "the old format": (_to("a.ckpt", _use_new_zipfile_serialization=False), ValueError, True),
    "Ctrl-C": (lambda directory: atomic_torch_save(Raises(), directory / "a.ckpt"), KeyboardInterrupt, False),
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
    said = error_of(kind, lambda: save(tmp_path))
    assert_holds(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt", "folder", "pipe"]
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    if is_ours:
        assert plain(re.sub(" at 0x[0-9a-f]+", "", said), DIR=tmp_path) == snapshot


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

"""A checkpoint is read once: the values of tensors are compared with their checksums as torch reads them."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant.checkpoint import checked_file, ranks, verify
from lightning_faulttolerant.checkpoint.archive import find_damage
from lightning_faulttolerant.checkpoint.checked_file import CheckedFile, RecordContent
from lightning_faulttolerant.checkpoint.ranks import RankReader
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.errors import DamagedCheckpointError, UnsafeCheckpointError

LARGE = 100_000


class Own:
    """An object that weights_only=True refuses."""


def saved(path: Path, **more: object) -> list[RecordContent]:
    """Save two large tensors, one of them shared, and a small one; return the large contents."""
    large = torch.arange(LARGE)
    torch.save({"a": large, "view": large[5:], "b": torch.rand(LARGE), "small": torch.ones(3), **more}, path)
    later: list[RecordContent] = []
    with path.open("rb") as file:
        assert find_damage(file, later=later) is None
    assert [content.num_bytes for content in later] == [8 * LARGE, 4 * LARGE]
    return later


def flip(path: Path, offset: int) -> None:
    """Flip a bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


class CountedFile(io.FileIO):
    """A file that counts the bytes that are read, and fails once at the given place."""

    num_read = 0
    fails_at = -1

    def readinto(self, buffer: Any) -> int:
        begin = self.tell()
        num_read = super().readinto(buffer) or 0
        if begin <= self.fails_at < begin + num_read:
            type(self).fails_at = -1
            raise OSError(errno.EIO, "Input/output error")
        type(self).num_read += num_read
        return num_read


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountedFile]:
    """Let checkpoints be read by a `CountedFile`."""
    CountedFile.num_read, CountedFile.fails_at = 0, -1
    for module in (verify, ranks):
        monkeypatch.setattr(module, "local_copy", lambda path: CountedFile(path))
    return CountedFile


@pytest.mark.parametrize(
    "load", [load_file, lambda path: RankReader(rank=0, num_ranks=1).load(path, verifies_all=True)]
)
def test_a_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: type[CountedFile], load: Any
) -> None:
    """Each content is compared while torch reads it, also one that several tensors share."""
    saved(tmp_path / "a.ckpt")
    monkeypatch.setattr(checked_file, "content_damage", None)  # reads what torch has not read
    loaded = load(tmp_path / "a.ckpt")
    assert torch.equal(loaded["a"], torch.arange(LARGE))
    assert loaded["view"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()
    assert counted.num_read < 1.1 * (tmp_path / "a.ckpt").stat().st_size


def test_a_file_without_checksums_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing to compare, which is a warning."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(LARGE)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_file(tmp_path / "a.ckpt")["a"], torch.arange(LARGE))
    assert "we could not verify it" in caplog.text


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("at", [0, 0.5, 1])
def test_a_flipped_bit_in_a_content_is_found(tmp_path: Path, number: int, at: float) -> None:
    """The loaded content is not returned, and the error names the record and both checksums."""
    path = tmp_path / "a.ckpt"
    content = saved(path)[number]
    flip(path, content.offset + int(at * (content.num_bytes - 1)))
    with pytest.raises(DamagedCheckpointError, match=rf"record {content.name} has CRC32 \w+, but was written with"):
        load_file(path)


def test_damage_comes_before_a_refusal(tmp_path: Path) -> None:
    """A file with an object that torch refuses is damaged first: an older one may be sound."""
    path = tmp_path / "a.ckpt"
    content = saved(path, own=Own())[1]
    with pytest.raises(UnsafeCheckpointError):
        load_file(path)
    flip(path, content.offset)
    with pytest.raises(DamagedCheckpointError):
        load_file(path)


def test_a_disk_error_in_a_content_is_damage(tmp_path: Path, counted: type[CountedFile]) -> None:
    """It makes the run take an older file, whatever torch turns it into."""
    counted.fails_at = saved(tmp_path / "a.ckpt")[1].offset + 1000
    with pytest.raises(DamagedCheckpointError, match="Input/output error"):
        load_file(tmp_path / "a.ckpt")


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("part", [0, 10, None])
def test_a_content_that_was_not_read_as_a_whole_is_read_at_the_end(
    tmp_path: Path, is_damaged: bool, part: int | None
) -> None:
    """Nothing stays without a comparison if torch reads in pieces, or leaves out a record."""
    path = tmp_path / "a.ckpt"
    contents = saved(path)
    if is_damaged:
        flip(path, contents[1].offset + 20)
    with path.open("rb") as file:
        checked = CheckedFile(file, contents)
        if part is not None:
            checked.seek(contents[1].offset)
            assert len(checked.read(part)) == part
        assert (checked.find_damage() is not None) == is_damaged


def test_a_file_that_ends_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    """A content that is too short is not taken for a whole one."""
    path = tmp_path / "a.ckpt"
    content = saved(path)[1]
    path.write_bytes(path.read_bytes()[: content.offset + 100])
    with path.open("rb") as file:
        checked = CheckedFile(file, [content])
        checked.seek(content.offset)
        assert len(checked.read(content.num_bytes)) == 100
        assert checked.find_damage() == "it ends too early"

from __future__ import annotations

import contextlib
import io
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_faulttolerant.checkpoint.pickled import TensorInfo
from lightning_faulttolerant.checkpoint.schema import Summary, read_summary
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError


class CountedFile(io.FileIO):
    """A file that counts how much of it is read, by whatever means."""

    num_read = 0

    def readinto(self, buffer: Any) -> int | None:
        num_bytes = super().readinto(buffer)
        self.num_read += num_bytes or 0
        return num_bytes

    def readall(self) -> bytes:
        data = super().readall()
        self.num_read += len(data)
        return data

    def read(self, size: int | None = -1) -> bytes | None:
        data = super().read(size)
        self.num_read += len(data or b"")
        return data


def summary_of(content: Any, **options: Any) -> Summary:
    """Save with torch, and return the summary."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return read_summary(buffer, name="the file")


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_kind_of_tensor_is_described(dtype: torch.dtype, protocol: int) -> None:
    """A tensor of any dtype is described with torch's dtype, shape and bytes, whatever protocol it was saved with."""
    tensor = torch.zeros(3, 5, dtype=dtype)
    summary = summary_of({"tensor": tensor}, pickle_protocol=protocol)
    info = summary.content["tensor"]
    assert isinstance(info, TensorInfo)
    assert (f"torch.{info.dtype}", info.shape) == (str(dtype), (3, 5))
    assert summary.size_of(info).num_bytes == tensor.numel() * tensor.element_size()


def test_parameters_and_subclasses_are_tensors() -> None:
    """Parameters, tensors with attributes, scalars, empty tensors and buffers are described as tensors too."""
    marked = torch.zeros(2)
    marked.mark = "x"  # type: ignore[attr-defined]
    content = {"p": nn.Parameter(torch.zeros(2)), "m": marked, "scalar": torch.tensor(1.0), "empty": torch.empty(0, 3)}
    summary = summary_of(content)
    assert {name: info.shape for name, info in summary.content.items()} == {
        "p": (2,), "m": (2,), "scalar": (), "empty": (0, 3),
    }  # fmt: skip


def test_a_storage_that_tensors_share_counts_once() -> None:
    """Tied weights take the file's space once; a view of a large tensor takes everything that was saved with it."""
    large = torch.zeros(1000)
    summary = summary_of({"a": large, "b": large, "view": torch.zeros(500)[:1]})
    both = summary.size_of(summary.content["a"], summary.content["b"])
    assert (both.num_bytes, both.num_tensors, both.num_values) == (4000, 2, 2000)
    assert summary.size_of(summary.content["view"]).num_bytes == 2000


def test_a_whole_module_and_optimizer_can_be_looked_into() -> None:
    """The content of real state dicts is described: as many values as there are parameters, and twice more for Adam."""
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    summary = summary_of({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    num_values = sum(p.numel() for p in module.parameters())
    assert summary.size_of(summary.content["model"]).num_values == num_values + 16 + 16 + 1
    assert summary.size_of(summary.content["optimizer"]["state"]).num_values == 2 * num_values + 4


def test_of_a_large_file_next_to_nothing_is_read(tmp_path: Path) -> None:
    """Of a file of 200 MB, less than 1 MB is read, in little time; the file's own count agrees, but for read-ahead."""
    path = tmp_path / "large.ckpt"
    torch.save({"state_dict": {f"layer.{i}": torch.zeros(500_000) for i in range(100)}, "step": 3}, path)
    raw = CountedFile(str(path))
    began = time.monotonic()
    with io.BufferedReader(raw) as file:
        summary = read_summary(file, name="large")
        seconds = time.monotonic() - began
        assert raw.num_read < 1_000_000
    assert summary.content["step"] == 3
    assert summary.size_of(summary.content).num_bytes > 200_000_000
    assert summary.num_bytes == os.path.getsize(path)
    assert 0 < summary.num_bytes_read <= raw.num_read
    assert seconds < 5


def rewritten(change: Callable[[zipfile.ZipFile, zipfile.ZipFile], None]) -> io.BytesIO:
    """Return a checkpoint whose zip file was rewritten by `change`."""
    buffer, changed = io.BytesIO(), io.BytesIO()
    torch.save({"step": 3}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(changed, "w") as new:
        change(old, new)
    return changed


def _compressed(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
    new.writestr("archive/data.pkl", old.read("archive/data.pkl"), compress_type=zipfile.ZIP_DEFLATED)


def _without_pickle(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
    new.writestr("archive/version", b"3")


def _two_archives(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
    new.writestr("a/data.pkl", old.read("archive/data.pkl"))
    new.writestr("b/data.pkl", old.read("archive/data.pkl"))


def _no_pickle_in_it(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
    new.writestr("archive/data.pkl", b"no pickle")


NO_CHECKPOINTS: dict[str, Callable[[], io.BytesIO]] = {
    "empty": io.BytesIO,
    "text": lambda: io.BytesIO(b"hello" * 1000),
    "compressed": lambda: rewritten(_compressed),
    "zip without a pickle": lambda: rewritten(_without_pickle),
    "two archives": lambda: rewritten(_two_archives),
    "garbage for a pickle": lambda: rewritten(_no_pickle_in_it),
}


@pytest.mark.parametrize("make", NO_CHECKPOINTS.values(), ids=NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused(make: Callable[[], io.BytesIO]) -> None:
    """A file that is not a checkpoint is refused by an error that names it and the expected content."""
    with pytest.raises(DamagedCheckpointError, match=r"the file is not a checkpoint, or it is damaged: .*torch.save"):
        read_summary(make(), name="the file")


def test_a_compressed_record_is_refused_as_such() -> None:
    """The reason for refusing a compressed pickle is its compression, not how its bytes look."""
    with pytest.raises(DamagedCheckpointError, match=r"record archive/data\.pkl is compressed"):
        read_summary(rewritten(_compressed), name="the file")


def test_the_old_format_is_not_called_damaged() -> None:
    """Torch's format from before 1.6 can't be examined, which is not damage."""
    with pytest.raises(CheckpointError, match=r"before 1\.6") as caught:
        summary_of({"step": 3}, _use_new_zipfile_serialization=False)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_file_cut_anywhere_is_refused() -> None:
    """No truncated file is taken for a whole one, and none raises another kind of error."""
    buffer = io.BytesIO()
    torch.save({"step": 3, "weights": torch.zeros(10)}, buffer)
    data = buffer.getvalue()
    for length in range(0, len(data), 7):
        with pytest.raises(DamagedCheckpointError):
            read_summary(io.BytesIO(data[:length]), name="the file")


def test_any_changed_byte_is_described_or_refused() -> None:
    """With any byte changed, the summary is created or refused; nothing else is raised, and nothing is run."""
    buffer = io.BytesIO()
    torch.save({"step": 3, "weights": torch.zeros(2)}, buffer)
    data = buffer.getvalue()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        with contextlib.suppress(CheckpointError):
            summary = read_summary(io.BytesIO(bytes(changed)), name="the file")
            summary.size_of(summary.content)

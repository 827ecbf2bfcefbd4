"""The store law for bytes: any change that a disk makes to an autosave is detected, or it loads as it was saved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError

CONTENT: dict[str, Any] = {
    "state_dict": {"weight": torch.linspace(0, 1, 7), "bias": torch.tensor([True, False])},
    "epoch": 3,
    "callbacks": {"Mine": {"losses": [0.5, None], "name": "x"}},
}
CHANGED = {**CONTENT, "epoch": 4, "state_dict": {**CONTENT["state_dict"], "weight": torch.linspace(1, 2, 7)}}
Changes = Iterator[bytes]


def autosave(content: dict[str, Any], directory: Path) -> bytes:
    """Return the bytes of an autosave."""
    return Path(AutosaveSeries(directory).save(content, epoch=0, batch=1, global_step=1)).read_bytes()


def flipped(data: bytes, other: bytes) -> Changes:
    """Flip each single bit."""
    for position in range(len(data)):
        for bit in range(8):
            yield data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def lost_or_doubled(data: bytes, other: bytes) -> Changes:
    """Drop or double each byte: all bytes after it move."""
    for position in range(len(data)):
        yield data[:position] + data[position + 1 :]
        yield data[: position + 1] + data[position:]


def cut(data: bytes, other: bytes) -> Changes:
    """End the file anywhere; its length may have been restored with zeros or ones."""
    for size in range(len(data)):
        yield data[:size]
        for fill in (b"\0", b"\xff"):
            yield data[:size] + fill * (len(data) - size)


def holes(data: bytes, other: bytes) -> Changes:
    """Leave out blocks, which read as zeros, of any usual size and place."""
    for size in (16, 64, 512, 4096):
        for at in range(0, len(data), min(size, 64)):
            yield data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def swapped(data: bytes, other: bytes) -> Changes:
    """Put each two blocks in each other's place."""
    blocks = [data[at : at + 64] for at in range(0, len(data), 64)]
    for second in range(len(blocks)):
        for first in range(second):
            changed = list(blocks)
            changed[first], changed[second] = blocks[second], blocks[first]
            yield b"".join(changed)


def longer(data: bytes, other: bytes) -> Changes:
    """Put bytes before the file or after it, including the whole file again."""
    for tail in (b"\0", b"x" * 22, bytes(4096), b"PK\x05\x06" + bytes(18), data):
        yield data + tail
        yield tail + data


def torn(data: bytes, other: bytes) -> Changes:
    """Begin as one save and end as another, as a torn overwrite would, at each place."""
    assert len(other) == len(data)
    for at in range(1, len(data)):
        if other[at:] != data[at:]:  # otherwise it is the other one
            yield other[:at] + data[at:]


def bursts(data: bytes, other: bytes) -> Changes:
    """Put random bytes over stretches."""
    draw = random.Random(1)
    for _ in range(2000):
        at, size = draw.randrange(len(data)), draw.randrange(1, 40)
        size = min(size, len(data) - at)
        yield data[:at] + draw.randbytes(size) + data[at + size :]


def is_as_saved(loaded: dict[str, Any]) -> bool:
    """Return whether the content is that which was saved."""
    state, expected = loaded.pop("state_dict"), CONTENT["state_dict"]
    same = state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) and state[name].dtype == expected[name].dtype for name in state
    )
    return same and loaded == {name: value for name, value in CONTENT.items() if name != "state_dict"}


EVERY = {flipped: 41, lost_or_doubled: 13, cut: 17, holes: 1, swapped: 3, longer: 1, torn: 7, bursts: 10}


@pytest.mark.parametrize("read", [verify_file, load_file], ids=["verified", "loaded"])
@pytest.mark.parametrize(
    ("damage", "every"),
    [
        *EVERY.items(),
        *(pytest.param(damage, 1, marks=pytest.mark.slow) for damage, every in EVERY.items() if every > 1),
    ],
)
def test_each_change_is_detected_or_harmless(
    tmp_path: Path, read: Callable[[Path], Any], damage: Callable[[bytes, bytes], Changes], every: int
) -> None:
    """Verifying and loading refuse the same changes: all but those after which the content is as it was saved."""
    path, sound = tmp_path / "a.ckpt", autosave(CONTENT, tmp_path / "series")
    other = autosave(CHANGED, tmp_path / "other")
    num_refused = num_changes = 0
    for number, data in enumerate(damage(sound, other)):
        if number % every or data == sound:
            continue
        path.write_bytes(data)
        num_changes += 1
        try:
            loaded = read(path)
        except DamagedCheckpointError:
            num_refused += 1
            continue
        assert damage not in (lost_or_doubled, longer), "all bytes have moved"
        assert is_as_saved(torch.load(path, weights_only=True) if read is verify_file else loaded)
    assert num_refused > num_changes / 2

"""The store law for bytes: any change that a disk makes to an autosave is detected, or it loads as it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError

WEIGHTS = {"weight": torch.linspace(0, 1, 7), "bias": torch.tensor([True, False])}
CONTENT: dict[str, Any] = {
    "state_dict": WEIGHTS,
    "epoch": 3,
    "callbacks": {"Mine": {"losses": [0.5, None], "name": "x"}},
}
CHANGED = {**CONTENT, "epoch": 4, "state_dict": {**WEIGHTS, "weight": torch.linspace(1, 2, 7)}}
Changes = Iterator[bytes]


def flipped(data: bytes, other: bytes) -> Changes:
    """Flip each single bit."""
    for at in range(len(data)):
        yield from (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8))


def moved(data: bytes, other: bytes) -> Changes:
    """Drop or double each byte, or put bytes before or after the file: all bytes after a place move."""
    for at in range(len(data)):
        yield data[:at] + data[at + 1 :]
        yield data[: at + 1] + data[at:]
    for tail in (b"\0", b"x" * 22, bytes(4096), b"PK\x05\x06" + bytes(18), data):
        yield data + tail
        yield tail + data


def cut(data: bytes, other: bytes) -> Changes:
    """End the file anywhere; its length may have been restored with zeros or ones."""
    for size in range(len(data)):
        yield data[:size]
        yield from (data[:size] + fill * (len(data) - size) for fill in (b"\0", b"\xff"))


def swapped(data: bytes, other: bytes) -> Changes:
    """Put each two blocks in each other's place."""
    for second in range(64, len(data) - 64, 64):
        for first in range(0, second, 64):
            one, two = data[first : first + 64], data[second : second + 64]
            yield data[:first] + two + data[first + 64 : second] + one + data[second + 64 :]


def torn(data: bytes, other: bytes) -> Changes:
    """Begin as one save and end as another, as a torn overwrite would, at each place."""
    assert len(other) == len(data)
    yield from (other[:at] + data[at:] for at in range(1, len(data)) if other[at:] != data[at:])


EVERY = {flipped: 41, moved: 13, cut: 17, swapped: 3, torn: 7}
ALL = [pytest.param(damage, 1, marks=pytest.mark.slow) for damage, every in EVERY.items() if every > 1]


@pytest.mark.parametrize("read", [verify_file, load_file], ids=["verified", "loaded"])
@pytest.mark.parametrize(("damage", "every"), [*EVERY.items(), *ALL])
def test_each_change_is_detected_or_harmless(
    tmp_path: Path, read: Callable[[Path], Any], damage: Callable[[bytes, bytes], Changes], every: int
) -> None:
    """Verifying and loading refuse the same changes: all but those after which the content is as it was saved."""
    path = tmp_path / "a.ckpt"
    sound, other = (
        Path(AutosaveSeries(tmp_path / name).save(content, epoch=0, batch=1, global_step=1)).read_bytes()
        for name, content in (("series", CONTENT), ("other", CHANGED))
    )
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
        assert damage is not moved
        loaded = torch.load(path, weights_only=True) if read is verify_file else loaded
        state = {name: (value.dtype, value.tolist()) for name, value in loaded.pop("state_dict").items()}
        assert state == {name: (value.dtype, value.tolist()) for name, value in WEIGHTS.items()}
        assert loaded == {name: value for name, value in CONTENT.items() if name != "state_dict"}
    assert num_refused > num_changes / 2

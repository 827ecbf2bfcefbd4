"""The store law for bytes: any change that a disk makes to an autosave is detected, or it loads as it was saved."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.archive import find_damage
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.errors import DamagedCheckpointError

CONTENT = {
    "state_dict": {"weight": torch.linspace(0, 1, 7), "bias": torch.tensor([True, False])},
    "epoch": 3,
    "callbacks": {"Mine": {"losses": [0.5, None], "name": "x"}},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of an autosave."""
    series = AutosaveSeries(tmp_path_factory.mktemp("series"))
    path = series.save(CONTENT, epoch=0, batch=1, global_step=1)
    data = Path(path).read_bytes()
    assert find_damage(io.BytesIO(data)) is None
    return data


def _is_as_saved(data: bytes) -> bool:
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    state, expected = loaded.pop("state_dict"), CONTENT["state_dict"]
    return (
        loaded == {name: value for name, value in CONTENT.items() if name != "state_dict"}
        and state.keys() == expected.keys()
        and all(
            torch.equal(state[name], expected[name]) and state[name].dtype == expected[name].dtype for name in state
        )
    )


def _missed(damaged: Iterable[tuple[object, bytes]]) -> list[object]:
    """Return the changes that were neither detected nor harmless."""
    return [what for what, data in damaged if find_damage(io.BytesIO(data)) is None and not _is_as_saved(data)]


def _flipped(data: bytes, masks: Iterable[int]) -> Iterator[tuple[object, bytes]]:
    for mask in masks:
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= mask
            yield (position, mask), bytes(damaged)


def test_each_single_bit(sound):
    """Each single flipped bit must be detected or change nothing."""
    assert _missed(_flipped(sound, [1 << bit for bit in range(8)])) == []


def test_each_byte_lost_or_doubled(sound):
    """Each single byte that is dropped or doubled must be detected: all bytes after it move."""
    for position in range(len(sound)):
        assert find_damage(io.BytesIO(sound[:position] + sound[position + 1 :])) is not None
        assert find_damage(io.BytesIO(sound[:position] + sound[position : position + 1] + sound[position:])) is not None


def test_each_truncation_however_it_is_filled_up(sound):
    """A file cut anywhere must be detected, even if the disk restored its length with zeros or ones."""
    num_bytes = len(sound)
    for size in range(num_bytes):
        assert find_damage(io.BytesIO(sound[:size])) is not None
    for fill in (b"\0", b"\xff"):
        assert _missed((size, sound[:size] + fill * (num_bytes - size)) for size in range(num_bytes)) == []


def test_each_hole(sound):
    """A block that was never written reads as zeros: it must be detected, for any usual size and place."""
    for size in (16, 64, 512, 4096):
        holes = (
            (at, sound[:at] + bytes(min(size, len(sound) - at)) + sound[at + size :])
            for at in range(0, len(sound), min(size, 64))
        )
        assert _missed(holes) == []


def test_blocks_that_changed_places(sound):
    """Two blocks in each other's place must be detected."""
    blocks = [sound[at : at + 64] for at in range(0, len(sound), 64)]
    for first in range(len(blocks)):
        for second in range(first + 1, len(blocks)):
            swapped = list(blocks)
            swapped[first], swapped[second] = blocks[second], blocks[first]
            data = b"".join(swapped)
            assert data == sound or _missed([((first, second), data)]) == []


@pytest.mark.parametrize("tail", [b"\0", b"x" * 22, bytes(4096), b"PK\x05\x06" + bytes(18), b"itself"])
def test_appended_and_prepended_bytes(sound, tail):
    """Bytes after the file or before it, including the whole file again, must be detected."""
    tail = sound if tail == b"itself" else tail
    assert find_damage(io.BytesIO(sound + tail)) is not None
    assert find_damage(io.BytesIO(tail + sound)) is not None


def test_the_end_of_another_autosave(sound, tmp_path):
    """A file that begins as one save and ends as another, as a torn overwrite would, must be detected at each cut."""
    changed = {**CONTENT, "epoch": 4, "state_dict": {**CONTENT["state_dict"], "weight": torch.linspace(1, 2, 7)}}
    other = Path(AutosaveSeries(tmp_path).save(changed, epoch=0, batch=1, global_step=1)).read_bytes()
    assert len(other) == len(sound)
    cuts = range(1, len(sound))
    torn = (
        (cut, other[:cut] + sound[cut:]) for cut in cuts if other[:cut] != sound[:cut] and other[cut:] != sound[cut:]
    )
    missed = _missed(torn)
    assert missed == []


def test_bursts_of_random_bytes(sound):
    """Random bytes over any stretch must be detected or change nothing."""
    draw = random.Random(1)

    def damaged() -> Iterator[tuple[object, bytes]]:
        for _ in range(2000):
            at, size = draw.randrange(len(sound)), draw.randrange(1, 40)
            data = bytearray(sound)
            data[at : at + size] = draw.randbytes(len(data[at : at + size]))
            yield (at, size), bytes(data)

    assert _missed(damaged()) == []


def test_loading_refuses_what_is_detected(sound, tmp_path):
    """The loader must check the same bytes as the verification: damaged files are refused, the sound one loads."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(sound)
    assert load_file(path)["epoch"] == 3
    num_refused = 0
    for _, data in itertools.islice(_flipped(sound, [0x10]), 0, None, 4):
        path.write_bytes(data)
        try:
            load_file(path)
        except DamagedCheckpointError:
            num_refused += 1
        else:
            assert _is_as_saved(path.read_bytes())
    assert num_refused > len(sound) / 8

"""Data sets of which each rank holds a part: disjoint up to the last round, and complete where possible."""

from __future__ import annotations

import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import Dataset

from lightning_faulttolerant import DistributedShardedDataset, ShardedMapDataset
from lightning_faulttolerant.samplers.images import ShardPositions
from tests.messages import error_of, plain


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of ten images in two classes, with one pixel value each, one nested deeper, and other files."""
    root = tmp_path_factory.mktemp("images")
    for number in range(10):
        folder = root / ("cats" if number < 4 else "dogs") / ("deeper" if number == 9 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), number).save(folder / f"{number}.{'PNG' if number % 2 else 'png'}")
    (root / "cats" / "notes.txt").write_text("no image")
    (root / "readme.md").write_text("no class")
    return root


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return an image as a tensor, of shape (3)."""
    return torch.tensor(image.getpixel((0, 0)))


def part_of(root: Path, rank: Any = 0, world_size: Any = 1, fraction: float = 1.0, **more: Any) -> Any:
    """Return the part of one rank, with its samples as tensors."""
    more = {"sample_load_transform": to_tensor, **more}
    return DistributedShardedDataset(str(root), rank, world_size, fraction, **more)


def numbers_of(dataset: Any) -> list[int]:
    """Return which images a part holds."""
    return [int(dataset[i][0][0]) for i in range(len(dataset))]


def test_images_of_directories_are_classes(root: Path) -> None:
    """Samples are RGB images, with the number of their class, other files are ignored, and it is torch's Dataset."""
    dataset = DistributedShardedDataset(root, 0, 1, 1.0, shuffle=False)
    assert isinstance(dataset, Dataset)
    assert dataset.classes == ["cats", "dogs"]
    assert [target for _, target in dataset] == [0] * 4 + [1] * 6  # type: ignore[attr-defined]
    assert dataset[0][0].getpixel((0, 0)) == (0, 0, 0)
    assert numbers_of(part_of(root, shuffle=False)) == list(range(10))
    some = part_of(root, is_valid_file=lambda path: path.endswith(("1.PNG", "7.PNG")))
    assert sorted(numbers_of(some)) == [1, 7]


def test_the_order_of_dealing_is_that_of_the_original(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank holds the shuffled list, dealt in turn; ranks come from the environment if they are not given."""
    expected = list(range(10))
    random.Random(3).shuffle(expected)
    for rank in range(2):
        assert numbers_of(part_of(root, rank, 2, 0.5, seed=3)) == expected[rank::2]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert list(ShardedMapDataset(range(4), shuffle=False)) == [1, 3]
    assert numbers_of(part_of(root, None, None, 0.5, shuffle=False)) == [1, 3, 5, 7, 9]


def test_transforms_are_applied_when_they_should_be(root: Path) -> None:
    """Transforms of loading run once, and those of access at each one; with lazy=True, a start loads nothing."""
    calls: list[str] = []
    options: dict[str, Any] = {
        "sample_load_transform": lambda sample: calls.append("load") or sample,
        "target_load_transform": lambda target: target + 10,
        "sample_getitem_transform": lambda sample: calls.append("get") or sample,
        "target_getitem_transform": lambda target: target * 2,
    }
    for is_lazy, at_start in ((False, ["load"] * 2), (True, [])):
        calls.clear()
        dataset = part_of(root, 0, 1, 0.2, lazy=is_lazy, **options)
        assert calls == at_start
        assert dataset[0][1] in (20, 22)
        assert calls == (["load"] if is_lazy else at_start) + ["get"]
    assert numbers_of(part_of(root, lazy=True)) == numbers_of(part_of(root))


def test_a_part_is_plain_and_draws_nothing(root: Path) -> None:
    """Python's and torch's generators stay, a device has one tensor each, and it can be pickled."""
    random.random()  # otherwise the state could be that after a shuffle in an earlier test
    before = random.getstate(), torch.get_rng_state()
    dataset = part_of(root)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numbers_of(pickle.loads(pickle.dumps(dataset))) == numbers_of(dataset)
    on_device = part_of(root, device_id="cpu", shuffle=False)
    assert on_device.samples.shape == (10, 3)
    assert on_device.targets.tolist() == [0] * 4 + [1] * 6


@settings(max_examples=60)
@given(st.integers(1, 48), st.integers(1, 5), st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.8, 1.0]))
def test_shards_are_disjoint_and_complete(length: int, ranks: int, fraction: float) -> None:
    """No rank holds a sample twice, and shards are disjoint up to the last round, and complete where possible."""
    shares = [ShardPositions(length, fraction=fraction, rank=rank, num_replicas=ranks) for rank in range(ranks)]
    parts = [[share[i] for i in range(len(share))] for share in shares]
    assert len({len(part) for part in parts}) == 1
    assert all(len(set(part)) == len(part) for part in parts)
    counts = Counter(position for part in parts for position in part)
    if len(parts[0]) * ranks <= length:
        assert max(counts.values()) == 1
    elif fraction * ranks <= 1:
        assert counts.total() - len(counts) < ranks
    if fraction * ranks >= 1:
        assert len(counts) == length


def test_a_fraction_is_of_whole_samples() -> None:
    """A fraction is rounded up, but not by a floating point error: 0.07 of 100 samples are 7."""
    for length, fraction, expected in ((100, 0.07, 7), (31, 0.1, 4), (9, 1 / 3, 3)):
        assert len(ShardPositions(length, fraction=fraction, rank=0, num_replicas=1)) == expected


def test_any_indexable_source_is_sharded() -> None:
    """For 10**12 samples, too, parts are disjoint, and no object is as long as the source."""
    parts = [ShardedMapDataset(range(10**12), rank, 4) for rank in range(4)]
    assert {len(part) for part in parts} == {10**12 // 4}
    assert len({part[i] for part in parts for i in range(3)}) == 12
    with pytest.raises(IndexError):
        parts[0][10**12 // 4]


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "no fraction": (lambda root: part_of(root, 0, 2, 0), ValueError),
    "too much": (lambda root: part_of(root, 0, 2, 1.01), ValueError),
    "a device without tensors": (
        lambda root: DistributedShardedDataset(root, 0, 1, 1.0, device_id="cpu", shuffle=False),
        TypeError,
    ),
    "lazily on a device": (lambda root: part_of(root, lazy=True, device_id="cpu"), ValueError),
    "no classes": (lambda root: part_of(root / "dogs" / "deeper"), FileNotFoundError),
    "an empty class": (lambda root: part_of(root, extensions=(".jpg",)), FileNotFoundError),
    "no Pillow": (part_of, ImportError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_loaded_is_refused(
    case: str, root: Path, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is wrong, on every rank."""
    call, kind = REFUSED[case]
    if case == "no Pillow":
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        assert len(DistributedShardedDataset(root, 0, 1, 1.0, loader=str)) == 10
    assert plain(error_of(kind, lambda: call(root)), DIR=root) == snapshot

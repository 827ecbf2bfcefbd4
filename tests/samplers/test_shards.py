from __future__ import annotations

import pickle
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import (
    DistributedShardedDataset,
    FaultToleranceError,
    InterruptibleSampler,
    ShardedMapDataset,
)
from lightning_faulttolerant.samplers import images
from lightning_faulttolerant.samplers.images import ShardPositions


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


def dataset_of(root: Path, rank: int = 0, world_size: int = 1, fraction: float = 1.0, **more: Any) -> Any:
    """Return the part of one rank, with its samples as tensors."""
    return DistributedShardedDataset(str(root), rank, world_size, fraction, sample_load_transform=to_tensor, **more)


def numbers_of(dataset: Any) -> list[int]:
    """Return which images a part holds."""
    return [int(dataset[i][0][0]) for i in range(len(dataset))]


def test_images_of_directories_are_classes(root: Path) -> None:
    """Samples are RGB images, with the number of their class, and other files are ignored."""
    dataset = DistributedShardedDataset(root, 0, 1, 1.0, shuffle=False)
    assert dataset.classes == ["cats", "dogs"]
    assert [target for _, target in dataset] == [0] * 4 + [1] * 6  # type: ignore[attr-defined]
    assert dataset[0][0].getpixel((0, 0)) == (0, 0, 0)
    assert numbers_of(dataset_of(root, shuffle=False)) == list(range(10))


def test_the_order_of_dealing_is_that_of_the_original(root: Path) -> None:
    """With its seed, each rank holds what it holds there: the shuffled list, dealt in turn."""
    expected = list(range(10))
    random.Random(3).shuffle(expected)
    for rank in range(2):
        assert numbers_of(dataset_of(root, rank, 2, 0.5, seed=3)) == expected[rank::2]


def test_a_part_is_gone_through_by_the_sampler(root: Path) -> None:
    """The documented pair of data set and sampler continues after a state."""
    dataset = dataset_of(root, 1, 2, 0.5)
    sampler = InterruptibleSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=2)
    before = [int(n) for (batch, _), _ in zip(loader, range(1), strict=False) for n in batch[:, 0]]
    sampler.advance(2)
    again = InterruptibleSampler(dataset)
    again.load_state_dict(sampler.state_dict())
    rest = [int(n) for batch, _ in DataLoader(dataset, sampler=again, batch_size=2) for n in batch[:, 0]]
    assert sorted(before + rest) == sorted(numbers_of(dataset))


def test_transforms_are_applied_when_they_should_be(root: Path) -> None:
    """Transforms of loading run once, and those of access at each one."""
    calls: list[str] = []
    dataset = DistributedShardedDataset(
        root,
        0,
        1,
        0.2,
        sample_load_transform=lambda sample: calls.append("load") or sample,
        target_load_transform=lambda target: target + 10,
        sample_getitem_transform=lambda sample: calls.append("get") or sample,
        target_getitem_transform=lambda target: target * 2,
    )
    assert calls == ["load"] * 2
    assert dataset[0][1] in (20, 22)
    assert calls == ["load"] * 2 + ["get"]


# Faults of the original library that this one does not have.


def test_fault_the_global_generator_is_seeded(root: Path) -> None:
    """Python's and torch's generators stay as they are."""
    random.random()  # otherwise the state could be that after a shuffle in an earlier test
    before = random.getstate(), torch.get_rng_state()
    numbers_of(dataset_of(root))
    ShardedMapDataset(range(10))[0]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("fraction", [0, -0.1, 50, 1.01])
def test_fault_a_fraction_without_sense_fails_on_one_rank_only(root: Path, fraction: float) -> None:
    """Every rank refuses it, and a percentage too."""
    for rank in range(2):
        with pytest.raises(ValueError, match="more than 0 and at most 1"):
            dataset_of(root, rank, 2, fraction)


def test_fault_targets_must_be_tensors_for_a_device(root: Path) -> None:
    """Class numbers become a tensor, and samples that are not tensors are named."""
    dataset = dataset_of(root, device_id="cpu", shuffle=False)
    assert dataset.samples.shape == (10, 3)
    assert dataset.targets.tolist() == [0] * 4 + [1] * 6
    with pytest.raises(TypeError, match=r"0\.png is a Image; .*|0\.png is a Image\. "):
        DistributedShardedDataset(root, 0, 1, 1.0, device_id="cpu", shuffle=False)


def test_fault_is_valid_file_is_refused(root: Path) -> None:
    """is_valid_file takes the place of the extensions."""
    dataset = dataset_of(root, is_valid_file=lambda path: path.endswith(("1.PNG", "7.PNG")))
    assert sorted(numbers_of(dataset)) == [1, 7]


def test_fault_it_can_not_be_pickled(root: Path) -> None:
    """Spawned workers get the data set, with the default arguments."""
    dataset = dataset_of(root)
    assert numbers_of(pickle.loads(pickle.dumps(dataset))) == numbers_of(dataset)
    pickle.loads(pickle.dumps(DistributedShardedDataset(root, 0, 1, 0.1)))


def test_fault_a_worker_that_is_forked_fails_on_the_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker says what to do, instead of raising a CUDA error."""
    dataset = dataset_of(root)
    dataset._is_on_cuda = True  # as after _move to a CUDA device
    dataset[0]
    monkeypatch.setattr(images, "get_worker_info", lambda: object())
    with pytest.raises(FaultToleranceError, match="num_workers=0"):
        dataset[0]


def test_fault_it_is_no_data_set_of_torchs(root: Path) -> None:
    """The data set is an instance of torch's Dataset."""
    assert isinstance(dataset_of(root), Dataset)


@pytest.mark.parametrize("length", [1, 9, 10, 11, 48])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_fault_shards_overlap_and_leave_samples_out(length: int, ranks: int) -> None:
    """No rank holds a sample twice, and shards are disjoint up to the last round, and complete where possible."""
    for fraction in (0.1, 1 / ranks, 0.5, 0.8, 1.0):
        shares = [ShardPositions(length, fraction=fraction, rank=rank, num_replicas=ranks) for rank in range(ranks)]
        parts = [[share[i] for i in range(len(share))] for share in shares]
        assert len({len(part) for part in parts}) == 1
        assert all(len(set(part)) == len(part) for part in parts)
        counts = Counter(position for part in parts for position in part)
        if len(parts[0]) * ranks <= length:
            assert max(counts.values()) == 1
        elif fraction * ranks <= 1:
            assert sum(counts.values()) - len(counts) < ranks
        if fraction * ranks >= 1:
            assert len(counts) == length


def test_a_fraction_is_of_whole_samples() -> None:
    """A fraction is rounded up, but not by a floating point error: 0.07 of 100 samples are 7."""
    for length, fraction, expected in ((100, 0.07, 7), (31, 0.1, 4), (10, 1 / 3, 4), (9, 1 / 3, 3), (10, 1.0, 10)):
        assert len(ShardPositions(length, fraction=fraction, rank=0, num_replicas=1)) == expected


def test_fault_everything_is_decoded_again_at_each_start(root: Path) -> None:
    """With lazy=True a start loads nothing, and each sample loads on access, equal to what it was."""
    loaded: list[str] = []

    def load(path: str) -> Any:
        loaded.append(path)
        return images.load_image(path)

    dataset = dataset_of(root, lazy=True, loader=load)
    assert loaded == []
    assert numbers_of(dataset) == numbers_of(dataset_of(root))
    assert len(loaded) == 10
    with pytest.raises(ValueError, match="lazy"):
        dataset_of(root, lazy=True, device_id="cpu")


def test_empty_trees_are_reported(tmp_path: Path) -> None:
    """A directory without classes, and a class without samples, are named."""
    with pytest.raises(FileNotFoundError, match="no sub-directories"):
        dataset_of(tmp_path)
    (tmp_path / "cats").mkdir()
    with pytest.raises(FileNotFoundError, match="Class 'cats'"):
        dataset_of(tmp_path)


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Only the default loader needs Pillow."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"lightning-faulttolerant\[streaming\]"):
        dataset_of(root)
    assert len(DistributedShardedDataset(root, 0, 1, 1.0, loader=str)) == 10


def test_any_indexable_source_is_sharded() -> None:
    """For 10**12 samples, too, parts are disjoint, and no object is as long as the source."""
    for length, ranks in ((11, 3), (10**12, 4)):
        parts = [ShardedMapDataset(range(length), rank, ranks) for rank in range(ranks)]
        assert {len(part) for part in parts} == {-(-length // ranks)}
        seen = [part[i] for part in parts for i in range(min(3, len(part)))]
        assert len(set(seen)) == len(seen)
    small = [ShardedMapDataset(range(11), rank, 3) for rank in range(3)]
    assert {part[i] for part in small for i in range(len(part))} == set(range(11))
    with pytest.raises(IndexError):
        small[0][4]


def test_ranks_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Rank and number of ranks come from the environment if they are not given."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert list(ShardedMapDataset(range(4), shuffle=False)) == [1, 3]
    assert numbers_of(
        DistributedShardedDataset(root, None, None, 0.5, shuffle=False, sample_load_transform=to_tensor)
    ) == [1, 3, 5, 7, 9]

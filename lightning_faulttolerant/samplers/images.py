"""Each rank's own part of a data set that all ranks can see, and of a directory of images.

The directory has one subdirectory per class. torchvision is not needed.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, get_worker_info

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.samplers.order import FeistelPermutation, place_of
from lightning_faulttolerant.streaming.format.encoding import extra


class Indexable(Protocol):
    """An object with a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_fraction(fraction: float) -> None:
    """Raise a ``ValueError`` unless `fraction` is more than 0 and at most 1, the same on every rank."""
    if not 0 < fraction <= 1:
        raise ValueError(
            f"samples_pct_per_replica={fraction!r}: it must be the fraction of the data set that each rank holds, more "
            "than 0 and at most 1. For one half, pass 0.5."
        )


class ShardPositions:
    """The positions that one rank holds in an order of `length` samples: equally many on each rank.

    Each rank first takes every `num_replicas`-th position, starting at its rank. To hold more, it takes those of the
    next rank, and so on. So no rank holds a sample twice. Shards are disjoint while ``fraction * num_replicas <= 1``,
    except for the last round, which fills shards to equal length if the numbers don't divide. If the product is 1 or
    more, they hold all samples together.

    Args:
        length: The length of the order.
        fraction: The fraction of it that each rank holds, rounded up to whole samples.
        rank: The rank.
        num_replicas: The number of ranks.
    """

    def __init__(self, length: int, *, fraction: float, rank: int, num_replicas: int) -> None:
        self._length, self._rank, self._num_replicas = length, rank, num_replicas
        self._count = min(length, math.ceil(round(fraction * length, 6)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        """Return the position in the order of sample `index` of this share."""
        if not 0 <= index < self._count:
            raise IndexError(f"{index} of {self._count} samples")
        taken = 0
        for turn in range(self._num_replicas):
            first = (self._rank + turn) % self._num_replicas
            size = len(range(first, self._length, self._num_replicas))
            if index < taken + size:
                return first + (index - taken) * self._num_replicas
            taken += size
        raise AssertionError("a share has no more samples than the order")


class ShardedMapDataset(Dataset[Any]):
    """This rank's part of any data set with a length and indices. Nothing is loaded before it is requested.

    Args:
        source: The whole data set, the same on every rank.
        rank: The rank of this process, from 0; by default read from the process group or the environment now.
        world_size: The number of ranks; by default found in the same way.
        samples_pct_per_replica: The fraction of the data set that each rank holds, more than 0 and at most 1, rounded
            up to whole samples; by default one `world_size`-th.
        seed: The seed of the order in which samples are dealt.
        shuffle: Whether they are dealt in a random order; this takes no memory.

    Raises:
        ValueError: If the fraction is out of its range, or the rank doesn't exist.

    Example:
        >>> part = ShardedMapDataset(list("abcde"), rank=1, world_size=2, shuffle=False)
        >>> [part[i] for i in range(len(part))]
        ['b', 'd', 'a']
    """

    def __init__(
        self,
        source: Indexable | Sequence[object],
        rank: int | None = None,
        world_size: int | None = None,
        samples_pct_per_replica: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        place = place_of(num_replicas=world_size, rank=rank)
        fraction = 1 / place.num_replicas if samples_pct_per_replica is None else samples_pct_per_replica
        check_fraction(fraction)
        self.source = source
        length = len(source)
        self._share = ShardPositions(length, fraction=fraction, rank=place.rank, num_replicas=place.num_replicas)
        self._permutation = FeistelPermutation(length, seed=seed, epoch=0) if shuffle else None

    def __len__(self) -> int:
        return len(self._share)

    def index_of(self, index: int) -> int:
        """Return the index in the whole data set of sample `index` of this part."""
        position = self._share[index]
        if self._permutation is None:
            return position
        return int(self._permutation.at(torch.tensor([position], device="cpu")))

    def __getitem__(self, index: int) -> Any:
        return self.source[self.index_of(index)]


IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def load_image(path: str) -> Any:
    """Return the image in a file, as a PIL image in RGB.

    Raises:
        ImportError: If Pillow is not installed.
    """
    opener = extra("PIL.Image", purpose="to read images")
    with open(path, "rb") as file, opener.open(file) as image:
        return image.convert("RGB")


class ClassDirectory:
    """A directory of samples with one subdirectory for each class, ``root/<class>/.../<file>``.

    Args:
        root: The directory.

    Raises:
        FileNotFoundError: If there are no classes.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self.classes, self.class_to_idx = self.find_classes(self.root)

    @staticmethod
    def make_dataset(
        directory: str,
        class_to_idx: dict[str, int],
        extensions: Sequence[str] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> list[tuple[str, int]]:
        """Return the path and class number of every sample, sorted by class and path.

        Raises:
            FileNotFoundError: If a class has no samples.
        """
        ends = tuple(extension.lower() for extension in extensions or IMAGE_EXTENSIONS)
        is_sample = is_valid_file or (lambda path: path.lower().endswith(ends))
        found: list[tuple[str, int]] = []
        for name, number in sorted(class_to_idx.items()):
            before = len(found)
            for folder, _, names in sorted(os.walk(os.path.join(directory, name), followlinks=True)):
                paths = (os.path.join(folder, file) for file in sorted(names))
                found += [(path, number) for path in paths if is_sample(path)]
            if len(found) == before:
                raise FileNotFoundError(
                    f"Class {name!r} of {directory} has no samples: no file of it"
                    f" {'passes is_valid_file' if is_valid_file else 'ends in ' + ', '.join(ends)}."
                )
        return found

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return the sorted names of the subdirectories, and the number of each.

        Raises:
            FileNotFoundError: If there are none.
        """
        with os.scandir(directory) as entries:
            classes = sorted(entry.name for entry in entries if entry.is_dir())
        if not classes:
            raise FileNotFoundError(f"{directory} has no sub-directories; each class has one, with its samples.")
        return classes, {name: number for number, name in enumerate(classes)}


class DistributedShardedDataset(ClassDirectory, Dataset[tuple[Any, Any]]):
    """This rank's part of a data set of files, ``root/<class>/.../<file>``, kept in memory or on a device.

    All ranks list the tree, shuffle it with the same seed, and take their parts. The parts are equally long (see
    `ShardPositions`), and disjoint while ``samples_pct_per_replica * world_size <= 1``, except for the last round that
    makes them equal. Iterate over it with `InterruptibleSampler`.

    Args:
        root: The directory.
        rank: The rank of this process, from 0; ``None``: read from the process group or the environment now.
        world_size: The number of ranks; ``None``: found in the same way.
        samples_pct_per_replica: The fraction (not the percentage) of the data set that each rank holds, more than 0 and
            at most 1, rounded up to whole samples.
        device_id: The device for samples and targets, each stacked into one tensor. The samples must then be tensors of
            one shape. On a CUDA device, load them without workers.
        seed: The seed of the order in which samples are dealt.
        shuffle: Whether they are dealt in a random order.
        loader: Takes a path and returns a sample; by default a PIL image in RGB.
        extensions: The file name endings of samples, in lower case.
        sample_load_transform: Applied to each sample when it is loaded.
        target_load_transform: Applied to each class number when it is loaded.
        sample_getitem_transform: Applied to each sample when it is requested.
        target_getitem_transform: Applied to each target when it is requested.
        is_valid_file: Takes a path and returns whether it is a sample; replaces `extensions`.
        lazy: Whether samples are loaded each time they are requested, and not all in advance. A restart then begins
            immediately, and memory holds no samples.

    Raises:
        ValueError: If the fraction is out of its range, the rank doesn't exist, or `lazy` is combined with a device.
        FileNotFoundError: If there are no classes, or a class has no samples.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        rank: int | None,
        world_size: int | None,
        samples_pct_per_replica: float,
        device_id: torch.device | str | int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        loader: Callable[[str], Any] = load_image,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        sample_load_transform: Callable[[Any], Any] | None = None,
        target_load_transform: Callable[[int], Any] | None = None,
        sample_getitem_transform: Callable[[Any], Any] | None = None,
        target_getitem_transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        *,
        lazy: bool = False,
    ) -> None:
        check_fraction(samples_pct_per_replica)
        if lazy and device_id is not None:
            raise ValueError(
                "lazy=True loads samples on request, but device_id puts all of them on a device. Pass only one of them."
            )
        place = place_of(num_replicas=world_size, rank=rank)
        self.seed, self.shuffle, self.lazy = seed, shuffle, lazy
        self.loader = loader
        self.sample_load_transform, self.target_load_transform = sample_load_transform, target_load_transform
        self.sample_getitem_transform, self.target_getitem_transform = (
            sample_getitem_transform,
            target_getitem_transform,
        )
        super().__init__(root)  # a subclass may look for classes by the settings
        files = self.make_dataset(self.root, self.class_to_idx, extensions, is_valid_file)
        if shuffle:
            random.Random(seed).shuffle(files)
        share = ShardPositions(
            len(files), fraction=samples_pct_per_replica, rank=place.rank, num_replicas=place.num_replicas
        )
        self.files = [files[share[i]] for i in range(len(share))]
        """The path and class number of each sample of this rank."""
        self._is_on_cuda = False
        self.samples: Any = None if lazy else [self._load_sample(path) for path, _ in self.files]
        self.targets: Any = [_applied(target_load_transform, number) for _, number in self.files]
        if device_id is not None:
            self._move(torch.device(device_id))

    def _load_sample(self, path: str) -> object:
        return _applied(self.sample_load_transform, self.loader(path))

    def _move(self, device: torch.device) -> None:
        self.samples = torch.stack(
            [_tensor(sample, path) for sample, (path, _) in zip(self.samples, self.files, strict=True)]
        )
        self.samples = self.samples.to(device)
        self.targets = torch.stack([torch.as_tensor(target) for target in self.targets]).to(device)
        self._is_on_cuda = device.type == "cuda"

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return a sample and its target: by default the number of its class."""
        if self._is_on_cuda and get_worker_info() is not None:
            raise FaultToleranceError(
                "The samples are on a CUDA device, which a forked data-loading worker can't use. Pass num_workers=0 "
                "to the loader: the samples are already loaded."
            )
        sample = self._load_sample(self.files[index][0]) if self.lazy else self.samples[index]
        target = self.targets[index]
        return _applied(self.sample_getitem_transform, sample), _applied(self.target_getitem_transform, target)

    def __len__(self) -> int:
        return len(self.files)


def _applied(transform: Callable[[Any], Any] | None, value: object) -> object:
    return value if transform is None else transform(value)


def _tensor(sample: object, path: str) -> torch.Tensor:
    if not isinstance(sample, torch.Tensor):
        raise TypeError(
            f"device_id stacks the samples, but that of {path} is a {type(sample).__name__}. Turn them into tensors "
            "of one shape with sample_load_transform."
        )
    return sample

"""The law for what a script draws before `fit`: each start draws something else, and the first one's stands.

Each process of these laws is seeded differently before it builds its data.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, SubsetRandomSampler, random_split

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.object_states import EDGE, EVERY_STEP, FIRST_EPOCH, LATER_EPOCH, slowly
from tests.processes import run
from tests.rank_runs import for_ranks
from tests.runs import Net, make_trainer

Loaders = tuple[Any, Any]
NUM_TRAIN, NUM_VALIDATION = 20, 8
NUM_SAMPLES = 36
"""Eight are left for a test set."""


class Names(Dataset[Tensor]):
    """Its samples follow from the names of files, which a subclass may bring in any order."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        self.names = self.in_order([f"/data/part-{i // 12}/{i:03d}.png" for i in range(num)])
        self.labels = [self.number(i) % 5 for i in range(num)]

    def in_order(self, names: list[str]) -> Any:
        return names

    def number(self, index: int) -> int:
        return int(self.names[index][-7:-4])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        number = float(self.number(index))
        return torch.tensor([number, number**2, self.labels[index], 1.0]) + torch.randn(4)


def loaders_of(train: Any, validation: Any, **arguments: Any) -> Loaders:
    """Return loaders of 5 batches, shuffled, and of 2."""
    return DataLoader(train, 4, shuffle=True, **arguments), DataLoader(validation, 4, **arguments)


def cut(indices: list[int]) -> list[list[int]]:
    """Cut 36 indices into those of training, validation, and test."""
    return [indices[:20], indices[20:28], indices[28:]]


# Each way to split.


def split_at_random() -> Loaders:
    """Return the first two parts of torch's own split; the test set is in a variable."""
    train, validation, _test = random_split(Names(), [20, 8, 8])
    loaders = loaders_of(train, validation, num_workers=2)
    return *loaders, _test  # type: ignore[return-value]


def split_twice() -> Loaders:
    """Return parts of two data sets of one kind: one of them may have an augmentation."""
    train, validation, test = cut(torch.randperm(NUM_SAMPLES).tolist())
    parts = Subset(Names(), train), Subset(Names(), validation), Subset(Names(), test)
    return *loaders_of(*parts[:2]), parts  # type: ignore[return-value]


def split_by_samplers() -> Loaders:
    """Return loaders of one data set, whose samplers have the parts."""
    train, validation = cut(np.random.permutation(28).tolist())[:2]
    dataset = Names(28)
    loaders = [DataLoader(dataset, 4, sampler=SubsetRandomSampler(part)) for part in (train, validation)]
    return loaders[0], loaders[1]


def split_inside_a_concatenation() -> Loaders:
    """Return parts of several data sets."""
    first, second = Names(24), Names(12)
    (a, b), (c, d) = random_split(first, [14, 10]), random_split(second, [6, 6])
    return loaders_of(ConcatDataset([a, c]), ConcatDataset([b, d]))


def shuffled_indices() -> Loaders:
    """Return a part that has the same samples in each start, in another order."""
    indices = list(range(20))
    random.shuffle(indices)
    return loaders_of(Subset(Names(), indices), Names(8))


def split_into_arrays() -> Loaders:
    """Return parts whose indices are NumPy's."""
    train, validation, _ = (np.array(part) for part in cut(np.random.permutation(NUM_SAMPLES).tolist()))
    dataset = Names()
    parts = Subset(dataset, train), Subset(dataset, validation), Subset(dataset, _)  # type: ignore[arg-type]
    return *loaders_of(*parts[:2]), parts  # type: ignore[return-value]


# Each way to shuffle.


class Shuffled(Names):
    """Shuffles the names; its labels are in the same order."""

    def in_order(self, names: list[str]) -> Any:
        random.shuffle(names)
        return names


class InTuple(Shuffled):
    """Keeps them in a tuple."""

    def in_order(self, names: list[str]) -> Any:
        return tuple(super().in_order(names))


class InDeque(Shuffled):
    """Keeps them in a deque."""

    def in_order(self, names: list[str]) -> Any:
        return deque(super().in_order(names))


class Records(Names):
    """Keeps records, each a dict, as read from lines of JSON."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.records = [{"name": name, "boxes": [[i, i + 1]]} for i, name in enumerate(self.names)]
        np.random.shuffle(self.records)  # type: ignore[arg-type]

    def number(self, index: int) -> int:
        return int(self.records[index]["name"][-7:-4]) if hasattr(self, "records") else super().number(index)


class Ordered(Names):
    """Keeps the order of its samples in an array."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.order = np.random.permutation(num)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(int(self.order[index]))


class OrderedByTensor(Ordered):
    """Keeps it in a tensor."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.order = torch.randperm(num)  # type: ignore[assignment]


class Vocabulary(Names):
    """Numbers its words in the order in which a set gives them."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        words = [f"word-{i}" for i in range(5)]
        random.shuffle(words)  # as the hashes of each process do
        self.numbers = {word: i for i, word in enumerate(words)}

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.numbers[f"word-{self.labels[index]}"]


class Words(Vocabulary):
    """Has the words in a list."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.words = list(self.numbers)
        self.numbers = {}

    def __getitem__(self, index: int) -> Tensor:
        return Names.__getitem__(self, index) + self.words.index(f"word-{self.labels[index]}")


def of(kind: Callable[[int], Any]) -> Callable[[], Loaders]:
    """Return what makes loaders of two such data sets."""

    def make() -> Loaders:
        return loaders_of(kind(NUM_TRAIN), kind(NUM_VALIDATION))

    make.__name__ = getattr(kind, "__name__", "kind")
    return make


SPLITS: list[Callable[[], Loaders]] = [
    split_at_random,
    split_twice,
    split_by_samplers,
    split_inside_a_concatenation,
    shuffled_indices,
    split_into_arrays,
]
ORDERS = [of(kind) for kind in (Shuffled, InTuple, InDeque, Records, Ordered, OrderedByTensor, Vocabulary, Words)]
FAST = ("split_at_random", "Shuffled", "Vocabulary")


def fit(make: Callable[[], Loaders], callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Fit `Net` on what `make` makes; whatever else that returns is held while the fit runs."""
    train, validation, *_held = make()
    trainer = make_trainer(callbacks, directory, **arguments)
    trainer.fit(Net(), train, validation)
    return trainer


@pytest.mark.parametrize(
    "make", [m if m.__name__ in FAST else slowly(m) for m in (*SPLITS, *ORDERS)], ids=lambda m: m.__name__
)
def test_first_start_stands(make: Callable[[], Loaders]) -> None:
    """Whatever a start draws, the run goes on with what the first one drew."""
    assert_resumes_exactly(
        lambda callbacks, directory: fit(make, callbacks, directory), [KillAt(3), KillAt(4)], options=EVERY_STEP
    )


@pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE)])
def test_split_of_a_data_module(fault: Callback) -> None:
    """So does a split that a data module draws in its ``setup``."""

    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.validation, self.test = random_split(Names(), [20, 8, 8])

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, 4, shuffle=True, num_workers=2)

        def val_dataloader(self) -> Any:
            return DataLoader(self.validation, 4)

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory)
        trainer.fit(Net(), datamodule=Data())
        return trainer

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


@for_ranks[0]
@for_ranks[1]
@pytest.mark.slow
@pytest.mark.parametrize("make", [split_at_random, of(Shuffled)], ids=lambda m: m.__name__)
def test_each_rank_has_its_own(make: Callable[[], Loaders]) -> None:
    """Ranks that drew apart go on apart."""
    assert_resumes_exactly(
        lambda callbacks, directory: fit(make, callbacks, directory, devices=2, strategy="ddp"),
        [KillAt(3, rank=1)],
        options=EVERY_STEP,
        num_ranks=2,
    )


# What a report and an error say.


def again(
    directory: Path,
    make: Callable[[], Loaders],
    *,
    strict: bool = True,
    module: Callable[[int], Any] = lambda start: Net(),
    show: Callable[[], Any] = lambda: None,
) -> str:
    """Start a script that `make` makes the data of, kill it, and start it again; return what the second start prints.

    Each start has another seed; at its end it prints what `show` returns.
    """

    def main(start: int) -> None:
        train, validation, *_held = make()
        protection = FaultTolerance(dirpath=directory, every_n_train_steps=1, strict=strict or start == 0)
        trainer = make_trainer([protection, *([KillAt(3)] if start == 0 else [])], directory, num_sanity_val_steps=0)
        trainer.fit(module(start), train, validation)
        print(show())

    assert run(lambda: main(0), seed=0).exit_code < 0
    return run(lambda: main(1), seed=1).output


def test_report_lists_what_was_put_back(tmp_path: Path) -> None:
    """Each split and each order is a note; the test set of the second start is that of the first."""
    tests = []

    def make() -> Loaders:
        train, validation, test = random_split(Shuffled(), [20, 8, 8])
        tests.append(test)
        with (tmp_path / "tests.txt").open("a") as file:
            print(sorted(test.indices), file=file)
        return *loaders_of(train, validation), test  # type: ignore[return-value]

    output = again(tmp_path, make, show=lambda: f"test set: {sorted(tests[0].indices)}")
    assert "Resumed exactly" in output
    drawn = re.findall(r"note      (.*): as the first start drew it", output)
    lists = [f"{place}/0.dataset.dataset.{name}" for place in ("train", "validation") for name in ("names", "labels")]
    assert sorted(drawn) == sorted(["train/0.dataset", "validation/0.dataset", "main()._held[0]", *lists])
    first, second = (tmp_path / "tests.txt").read_text().splitlines()
    assert first != second
    assert f"test set: {first}" in output


class WithMean(Shuffled):
    """Has a number that follows from its first samples."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.mean = sum(self.number(i) for i in range(5)) / 5


class OtherNames(Names):
    """Has other files in each start."""

    def in_order(self, names: list[str]) -> Any:
        return [name.replace("part", f"part-{random.random()}") + str(random.random()) for name in names]


class OtherLabels(Names):
    """Has other labels next to the names of its files."""

    def in_order(self, names: list[str]) -> Any:
        return [(name, random.randrange(100)) for name in names]

    def number(self, index: int) -> int:
        return int(self.names[index][0][-7:-4])


class OtherNumbers(Names):
    """Has other whole numbers in a list, and in a mapping."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.numbers = [random.randrange(1000) for _ in range(num)]
        self.mapping = {f"word-{i}": random.randrange(1000) for i in range(num)}


def part_without_the_rest() -> Loaders:
    """Return a part of a data set, whose other samples may be anywhere."""
    return loaders_of(Subset(Names(), random.sample(range(36), 20)), Names(8))


def part_whose_test_set_comes_later() -> Loaders:
    """Return parts of which one is not there any more when training begins."""
    train, validation, _ = random_split(Names(), [20, 8, 8])
    _.indices = []
    return loaders_of(train, validation)


def two_parts_of_one_size() -> Loaders:
    """Return parts of which two can't be told apart."""
    parts = random_split(Names(), [20, 4, 4, 8])
    HIDDEN.append([{"first": {"in": parts[1]}}, {"second": {"in": parts[2]}}])
    return loaders_of(parts[0], parts[3])


HIDDEN: list[Any] = []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of(OtherNames), r"train/0\.dataset\.names: '\[20\] crc \w{8}' when it was saved, '\[20\] crc \w{8}' now"),
        (of(OtherLabels), r"train/0\.dataset\.names: '\[20\] crc"),
        (of(OtherNumbers), r"train/0\.dataset\.numbers: '\[20\] crc[\s\S]*train/0\.dataset\.mapping: '\[20\] crc"),
        (of(WithMean), r"train/0\.dataset\.mean: .*; it may come from what was drawn"),
        (part_without_the_rest, r"train/0\.dataset: .*; not all parts of its split are known"),
        (part_whose_test_set_comes_later, r"train/0\.dataset: .*; not all parts of its split are known"),
        (two_parts_of_one_size, r"train/0\.dataset: .*of the same size that can't be told apart"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_anything_else_is_refused(make: Callable[[], Loaders], message: str, tmp_path: Path) -> None:
    """The error has both values and says what to do; with ``strict=False`` the report has them."""
    output = again(tmp_path / "strict", make)
    assert re.search(rf"FingerprintMismatchError: [\s\S]*- {message}[\s\S]*call seed_everything before it is", output)
    output = again(tmp_path / "lenient", make, strict=False)
    assert "Resumed NOT EXACTLY" in output
    assert re.search(rf"NOT EXACT {message}", output)


def test_number_of_the_module_is_refused(tmp_path: Path) -> None:
    """Numbers that may come from a split are compared on the module too; where nothing was drawn, an edit stands."""

    class Weighted(Net):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight, self.table = weight, {"a": weight}

    def module(start: int) -> Any:
        return Weighted(1.0 + start)

    output = again(tmp_path / "drawn", of(Shuffled), module=module)
    assert "- module.weight: 'float 1.0' when it was saved, 'float 2.0' now; it may come from what was drawn" in output
    assert "Resumed exactly" in again(tmp_path / "same", of(Names), module=module)


def test_data_may_lie_elsewhere(tmp_path: Path) -> None:
    """Names of files are the same in another directory, and come in the first start's order there."""

    class Moved(Shuffled):
        def in_order(self, names: list[str]) -> Any:
            return [f"/mnt/{torch.initial_seed()}{name}" for name in super().in_order(names)]

    output = again(tmp_path, of(Moved))
    assert "Resumed exactly" in output
    assert "train/0.dataset.names: as the first start drew it" in output


@pytest.mark.parametrize(
    ("seed", "make", "told"),
    [
        (None, split_at_random, "train/0.dataset"),
        (None, of(Shuffled), "train/0.dataset.names"),
        (None, of(Names), None),
        (1, split_at_random, None),
    ],
)
def test_first_start_says_what_has_no_seed(
    seed: int | None,
    make: Callable[[], Loaders],
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line names it, and what to call; none where there is a seed, or nothing was drawn."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.seed() if seed is None else torch.manual_seed(seed)
    with caplog.at_level("INFO"):
        fit(make, [FaultTolerance(dirpath=tmp_path)], tmp_path, max_steps=1)
    lines = [message for message in caplog.messages if "No seed is set" in message]
    assert len(lines) == (told is not None)
    if told is not None:
        assert told in lines[0]
        assert "Call seed_everything before" in lines[0]

"""Randomly drawn data: what reports and errors say of it, what is noted, and for which loaders it is put back."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.state import orders
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.trainer.objects.drawn import Drawn, DrawnOutcome
from tests.data_sets import NoisyDataset
from tests.processes import run
from tests.runs import Net, make_trainer
from tests.trainer.objects.drawn_data_sets import (
    LATE,
    NUM_SAMPLES,
    NUM_TRAIN,
    NUM_VALIDATION,
    Loaders,
    Names,
    Shuffled,
    fit,
    loaders_of,
    of,
    split_at_random,
)


def again(
    directory: Path,
    make: Callable[[], Loaders],
    *,
    strict: bool = True,
    module: Callable[[int], Any] = lambda start: Net(),
    show: Callable[[], Any] = lambda: None,
    kill: int = 3,
    **arguments: Any,
) -> str:
    """Start a script whose data `make` creates, kill it, and start it again; return the output of the second start.

    Each start has another seed; at its end it prints the result of `show`.
    """

    def main(start: int) -> None:
        train, validation, *_held = make()
        protection = FaultTolerance(dirpath=directory, every_n_train_steps=1, strict=strict or start == 0)
        faults = [KillAt(kill)] if start == 0 else []
        trainer = make_trainer([protection, *faults], directory, **{"num_sanity_val_steps": 0, **arguments})
        trainer.fit(module(start), train, validation)
        print(show())

    assert run(lambda: main(0), seed=0).exit_code < 0
    return run(lambda: main(1), seed=1).output


@pytest.mark.usefixtures("whole_reports")
def test_report_lists_what_was_put_back(tmp_path: Path) -> None:
    """Each split and each order is a note; the second start has the test set of the first."""
    tests = []

    def make() -> Loaders:
        train, validation, test = random_split(Shuffled(), [20, 8, 8])
        tests.append(test)
        with (tmp_path / "tests.txt").open("a") as file:
            print(sorted(test.indices), file=file)
        return *loaders_of(train, validation), test  # type: ignore[return-value]

    output = again(tmp_path, make, show=lambda: f"test set: {sorted(tests[0].indices)}")
    assert "Resumed exactly" in output
    drawn = re.findall(r"note      (.*): restored to what the first start drew", output)
    lists = [f"{place}/0.dataset.dataset.{name}" for place in ("train", "validation") for name in ("names", "labels")]
    assert sorted(drawn) == sorted(["train/0.dataset", "validation/0.dataset", "main()._held[0]", *lists])
    first, second = (tmp_path / "tests.txt").read_text().splitlines()
    assert first != second
    assert f"test set: {first}" in output


class WithMean(Shuffled):
    """Has a number that depends on its first samples."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.mean = sum(self.number(i) for i in range(5)) / 5


class Captioned(Names):
    """Has sentences in file order, class names, and files in numerical order."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.captions = [f"{word} is the word of number {i}" for i, word in enumerate("zyxwvut" * num)]
        self.classes = {"truck": "t", "bird": "b", "cat": "a"}
        self.files = [f"p{i}" for i in range(num)]


class OtherNames(Names):
    """Has other files in each start."""

    def in_order(self, names: list[str]) -> Any:
        return [name.replace("part", f"part-{random.random()}") + str(random.random()) for name in names]


class OtherLabels(Names):
    """Has other labels next to its file names."""

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
    """Return a part of a data set without the parts with the other samples."""
    return loaders_of(Subset(Names(), random.sample(range(36), 20)), Names(8))


def part_whose_test_set_comes_later() -> Loaders:
    """Return parts; one of them no longer exists when training begins."""
    train, validation, _ = random_split(Names(), [20, 8, 8])
    _.indices = []
    return loaders_of(train, validation)


def two_parts_of_one_size() -> Loaders:
    """Return parts; two of them can't be distinguished."""
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
        (of(WithMean), r"train/0\.dataset\.mean: .*; it may depend on values that were drawn without a seed"),
        (part_without_the_rest, r"train/0\.dataset: .*; not all parts of its split are known"),
        (part_whose_test_set_comes_later, r"train/0\.dataset: .*; not all parts of its split are known"),
        (two_parts_of_one_size, r"train/0\.dataset: .*of the same size that can't be distinguished"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_anything_else_is_refused(make: Callable[[], Loaders], message: str, tmp_path: Path) -> None:
    """The error shows both values and the remedy; with ``strict=False`` the report shows them."""
    output = again(tmp_path / "strict", make)
    assert re.search(
        rf"FingerprintMismatchError: [\s\S]*- {message}[\s\S]*Call seed_everything before the draw", output
    )
    output = again(tmp_path / "lenient", make, strict=False)
    assert "Resumed NOT EXACTLY" in output
    assert re.search(rf"NOT EXACT {message}", output)


@pytest.mark.usefixtures("whole_reports")
def test_late_loader_is_put_back_or_refused(tmp_path: Path) -> None:
    """A late loader's restored order is reported; any other difference is an error, or part of the report."""

    def make(kind: Callable[[int], Any]) -> Callable[[], Loaders]:
        return lambda: loaders_of(Names(NUM_TRAIN), kind(NUM_VALIDATION))

    output = again(tmp_path / "shuffled", make(Shuffled), kill=12, **LATE)
    assert "After the resume, validation/0.dataset.names: restored to what the first start drew" in output
    output = again(tmp_path / "strict", make(OtherLabels), kill=12, **LATE)
    line = r"validation/0\.dataset\.names: '\[8\] crc \w{8}' when it was saved, '\[8\] crc \w{8}' now"
    assert re.search(rf"FingerprintMismatchError: [\s\S]*- {line}", output)
    output = again(tmp_path / "lenient", make(OtherLabels), kill=12, strict=False, **LATE)
    assert re.search(rf"NOT EXACT since the resume: {line}", output)


class Timed(Names):
    """Notes how long it took to read it, and the process."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.load_times = [random.random() for _ in range(3)]
        self.process = {"pid": random.randrange(10_000)}


@pytest.mark.usefixtures("whole_reports")
def test_few_values_next_to_the_samples_are_noted(tmp_path: Path) -> None:
    """Values too short for samples are always noted; they are refused only if something was drawn."""
    output = again(tmp_path / "alone", of(Timed))
    assert "Resumed exactly" in output
    for name in ("load_times", "process"):
        line = rf"note      train/0\.dataset\.{name}: '\[\d\] crc.* now; it differs from the first start"
        assert re.search(line, output)

    class Both(Timed, Shuffled):
        pass

    assert re.search(
        r"FingerprintMismatchError[\s\S]*- train/0\.dataset\.load_times", again(tmp_path / "both", of(Both))
    )


def test_number_of_the_module_is_refused(tmp_path: Path) -> None:
    """Numbers that may come from a split are compared on the module too; if nothing was drawn, an edit is accepted."""

    class Weighted(Net):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight, self.table = weight, {"a": weight}

    def module(start: int) -> Any:
        return Weighted(1.0 + start)

    output = again(tmp_path / "drawn", of(Shuffled), module=module)
    line = "- module.weight: 'float 1.0' when it was saved, 'float 2.0' now; it may depend on values that were drawn"
    assert f"{line} without a seed" in output
    assert "Resumed exactly" in again(tmp_path / "same", of(Names), module=module)


@pytest.mark.usefixtures("whole_reports")
def test_data_may_lie_elsewhere(tmp_path: Path) -> None:
    """File names are the same in another directory, and come in the first start's order there."""

    class Moved(Shuffled):
        def in_order(self, names: list[str]) -> Any:
            return [f"/mnt/{torch.initial_seed()}{name}" for name in super().in_order(names)]

    output = again(tmp_path, of(Moved))
    assert "Resumed exactly" in output
    assert "train/0.dataset.names: restored to what the first start drew" in output


@pytest.mark.parametrize(
    ("seed", "make", "told"),
    [
        (None, split_at_random, "train/0.dataset"),
        (None, of(Shuffled), "train/0.dataset.names"),
        (None, of(Names), None),
        (None, of(Timed), None),
        (None, of(Captioned), None),
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
    """One line names it and the function to call; there is no line with a seed, or if nothing was drawn."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.seed() if seed is None else torch.manual_seed(seed)
    with caplog.at_level("INFO"):
        fit(make, [FaultTolerance(dirpath=tmp_path)], tmp_path, max_steps=1)
    lines = [message for message in caplog.messages if "No seed is set" in message]
    assert len(lines) == (told is not None)
    if told is not None:
        assert told in lines[0]
        assert "call seed_everything first" in lines[0]


class LoaderNet(Net):
    """Creates its loader in a hook: Lightning then keeps the arguments' names in the loader's parts."""

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(20), batch_size=4)


def test_what_lightning_keeps_in_loaders_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument names are not samples: a run without a seed is not reported as having drawn them."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.seed()
    trainer = make_trainer([FaultTolerance(dirpath=tmp_path)], tmp_path, max_steps=1)
    with caplog.at_level("INFO"):
        trainer.fit(LoaderNet(), val_dataloaders=DataLoader(NoisyDataset(8), batch_size=4))
    assert "No seed is set" not in caplog.text


# What is noted of objects, and put back in them.


def drawn_of(names: list[str], place: str = "train/0") -> tuple[Drawn, Any]:
    """Return the notes of a data set with these names, and the data set."""
    drawn, dataset = Drawn(Rules), SimpleNamespace(names=names, number=1)
    drawn.note({f"{place}.dataset": dataset}, of_loader=True)
    return drawn, dataset


def test_a_save_is_a_copy() -> None:
    """Later notes do not reach a state that is still being written."""
    drawn, dataset = drawn_of(["b", "a"])
    saved = drawn.state_dict()
    dataset.number, dataset.names = 2, ["c", "a"]
    before = repr(saved)
    drawn.note({"train/0.dataset": dataset, "validation/0.dataset": SimpleNamespace(number=3)}, of_loader=True)
    assert repr(saved) == before != repr(drawn.state_dict())


def test_objects_of_several_loaders_are_put_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a list costs most, and loaders share lists; it is computed again only if the list has changed."""
    calls = []
    original = orders.kept_order
    monkeypatch.setattr(orders, "kept_order", lambda value: [calls.append(value), original(value)][1])
    drawn, dataset = drawn_of(["b", "a", "c"])
    drawn.note({"train/0.sampler": SimpleNamespace(dataset=dataset)}, of_loader=True)
    drawn.note({"validation/0.dataset": dataset}, of_loader=True)
    assert len(calls) == 1
    kept = drawn.state_dict()["orders"]
    assert kept["train/0.dataset.names"] == kept["validation/0.dataset.names"]
    dataset.names.reverse()
    drawn.note({"validation/0.dataset": dataset}, of_loader=True)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("is_shared", "reloads", "expected"), [(False, 0, "cab"), (True, 0, "bca"), (False, 1, "bca")], ids=str
)
def test_late_loader(is_shared: bool, reloads: int, expected: str) -> None:
    """It gets its order back if training could not have changed it, and does not draw another one in each epoch."""
    saved = drawn_of(list("cab"), "validation/0")[0].state_dict()
    drawn = Drawn(Rules)
    late = SimpleNamespace(names=list("bca"), number=1)
    module = SimpleNamespace(trainer=SimpleNamespace(reload_dataloaders_every_n_epochs=reloads))
    drawn.note({"module": module}, of_loader=False)
    drawn.note({"train/0.dataset": late if is_shared else SimpleNamespace(names=list("abc"))}, of_loader=True)
    outcomes: list[DrawnOutcome] = []
    assert drawn.put_back(saved, outcomes.append) == DrawnOutcome()
    drawn.note({"validation/0.dataset": late}, of_loader=True)
    assert late.names == list(expected)
    is_put_back = expected == "cab"
    notes = ["validation/0.dataset.names: restored to what the first start drew"] if is_put_back else []
    assert [note for outcome in outcomes for note in outcome.notes] == notes
    drawn.note({"validation/0.dataset": SimpleNamespace(names=list("bac"))}, of_loader=True)
    assert len([note for outcome in outcomes for note in outcome.notes]) == len(notes)

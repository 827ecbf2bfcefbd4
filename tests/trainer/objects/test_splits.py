"""Splits that a script draws before ``fit``: what is restored, what is refused, and what the first start says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, random_split

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.objects.splits import Splits
from tests.laws.features.drawn_data import Names
from tests.runs import fit_net


def start(seed: int, sizes: list[int], *names: str) -> tuple[list[Subset[Any]], Splits]:
    """Draw a split, the first parts of which have names."""
    parts = random_split(Names(sum(sizes)), sizes, torch.Generator().manual_seed(seed))
    return parts, Splits(dict(zip(names, parts, strict=False)))


def put_back(sizes: list[int], *names: str, manual: bool = False) -> tuple[list[Any], list[Any], Any]:
    """Draw other splits in two starts; return the parts of the first one, and what a resume makes of the second one."""
    parts, splits = start(1, sizes, *names)
    first, state = [list(part.indices) for part in parts], splits.state_dict()
    del parts, splits  # of another process
    parts, splits = start(2, sizes, *names)
    outcome = (Splits(None) if manual else splits).put_back(state)
    return first, [part.indices for part in parts], outcome


def test_all_parts_are_restored_together() -> None:
    """Those that training reaches by name, the test set by its size: no sample changes from one part to another."""
    first, now, (notes, differences) = put_back([61, 6, 5], "train", "validation")
    assert now == first
    parts = ("train", "validation", "Subset of Names [72] with 5 indices")
    assert notes == [f"{part}: restored to what the first start drew" for part in parts]
    assert differences == []


def test_manual_mode_leaves_parts_alone() -> None:
    """Without roots, no part is restored, and none is reported."""
    first, now, outcome = put_back([60, 7, 5], manual=True)
    assert now != first
    assert outcome == ([], [])


def test_equal_parts_are_left_alone() -> None:
    """With a seed, nothing is written into the script's objects, and nothing is reported."""
    sampler, part = SubsetRandomSampler((2, 0, 1)), Subset(Names(81), (80, 7))  # type: ignore[arg-type]
    before, state = part.indices, Splits({"part": part, "sampler": sampler}).state_dict()
    assert Splits({"part": part, "sampler": sampler}).put_back(state) == ([], [])
    assert part.indices is before


def test_parts_of_one_size_are_refused() -> None:
    """Two parts that training can't reach and that have one size can't be told apart: nothing is restored."""
    first, now, (notes, differences) = put_back([63, 5, 5], "train")
    assert now != first
    assert notes == []
    assert [one.name for one in differences] == ["train.indices"]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, tuple])
def test_indices_keep_their_kind(kind: Any) -> None:
    """A list, an array, or a tensor is filled in place, so that its other holders see it; a tuple is replaced."""
    saved = Splits({"part": Subset(Names(91), kind([7, 5, 6]))}).state_dict()
    part = Subset(Names(91), kind([5, 6, 7]))
    held = part.indices
    Splits({"part": part}).put_back(saved)
    assert list(part.indices) == [7, 5, 6]
    assert type(part.indices) is type(held)
    assert (part.indices is held) == (kind is not tuple)


class Lazy(Subset[Any]):
    """Computes its indices at the first access."""

    indices = property(lambda self: 1 // 0, lambda self, value: None)  # type: ignore[assignment]


def test_strange_parts_are_left_alone() -> None:
    """Parts with computed or other indices are not read; a data set without a length is one without a length."""
    strange = [Lazy(Names(3), [0]), SubsetRandomSampler("abc"), Subset(Names(3), [0.5, 0.1])]  # type: ignore[list-item, arg-type]
    roots = {"unsized": Subset(Dataset(), [1, 0]), **{f"strange {i}": one for i, one in enumerate(strange)}}
    state = [part for part in Splits(roots).state_dict() if part["path"]]
    assert [(part["path"], part["of"]) for part in state] == [("unsized", "Subset of Dataset [None]")]


def part_without_the_rest() -> Any:
    """Return a part of a data set without the parts with the other samples."""
    return Subset(Names(36), torch.randperm(36)[:20].tolist())


@pytest.mark.parametrize(("seed", "is_drawn"), [(None, True), (None, False), (1, True)])
def test_first_start_says_what_has_no_seed(
    seed: int | None, is_drawn: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names it and the function to call; there is no line with a seed, or if nothing was drawn."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.seed() if seed is None else torch.manual_seed(seed)
    train = DataLoader(part_without_the_rest() if is_drawn else Subset(Names(36), range(20)), 4)
    with caplog.at_level("INFO"):
        fit_net([FaultTolerance(dirpath=tmp_path)], tmp_path, train=train, max_steps=1)
    lines = [message for message in caplog.messages if "No seed is set" in message]
    assert len(lines) == (is_drawn and seed is None)
    assert all("train/0.dataset " in line and "call seed_everything first" in line for line in lines)

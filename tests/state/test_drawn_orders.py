"""Orders that a script draws without a seed: what the search leaves alone. The laws show all else."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, Subset, SubsetRandomSampler

from lightning_faulttolerant.state.splits import Parts


class Numbers(Dataset[int]):
    """Its samples are numbers."""

    def __len__(self) -> int:
        return 10


class Broken(Dataset[int]):
    """Can't report how many samples it has."""

    def __len__(self) -> int:
        raise RuntimeError("not connected")


class Lazy(Subset[int]):
    """Computes its indices at the first access."""

    @property
    def indices(self) -> Any:  # type: ignore[override]
        raise AssertionError("was asked")

    @indices.setter
    def indices(self, value: Any) -> None:
        pass


class Bare(Subset[int]):
    """Has no indices, and no data set."""

    def __init__(self) -> None:
        pass


def test_strange_parts_are_left_alone() -> None:
    """Parts with missing or computed indices, or of a data set without a length, do not disturb the search."""
    held = [Lazy(Numbers(), [0]), Bare(), Subset(Broken(), [1, 0]), SubsetRandomSampler("abc")]  # type: ignore[arg-type]
    test = Subset(Numbers(), [8, 7])
    parts = Parts()
    parts.note({"train": Subset(Numbers(), [2, 1, 0]), "bare": held[1], "lazy": held[0], "broken": held[2]})
    own = "test_strange_parts_are_left_alone()"
    assert parts.drawn == ["train", "broken", f"{own}.test"]
    assert parts.state_dict()[f"{own}.test"]["of"] == "Subset of Numbers [10]"
    assert parts.state_dict()["broken"]["of"] == "Subset of Broken [None]"
    assert test.indices == [8, 7]

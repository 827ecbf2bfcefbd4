"""Loaders without a place in a checkpoint skip their consumed batches; other loaders don't."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant.trainer.loaders.trackers import skip_consumed


class Unsized(list[int]):
    """Does not know how many batches it has."""

    def __len__(self) -> int:
        raise TypeError("no length")


class Stateful(list[int]):
    """Has a state, which Lightning restores."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def first_after(loader: list[int], *, index: int, num_ahead: int = 0, **state: Any) -> int | None:
    """Return the first batch after the skip of a loader in the place `train/0`; the run had drawn `index` batches."""
    iterator = iter(loader)
    saved = {"combined": {"index": index}, "left": ["train/0"], **state}
    skip_consumed([iterator], [loader], saved, stage="train", num_ahead=num_ahead)
    return next(iterator, None)


@pytest.mark.parametrize(
    ("loader", "arguments", "first"),
    [
        pytest.param([*range(8)], {"index": 3}, 3, id="sized"),
        pytest.param(Unsized(range(8)), {"index": 3}, 3, id="without a length"),
        pytest.param(Unsized(range(8)), {"index": 3, "num_ahead": 1}, 2, id="one drawn ahead"),
        pytest.param([*range(3)], {"index": 5}, 2, id="in its second cycle"),
        pytest.param([*range(3)], {"index": 6}, None, id="at the end of a cycle"),
        pytest.param([*range(8)], {"index": 0}, 0, id="nothing consumed"),
        pytest.param([*range(8)], {"index": 3, "left": []}, 0, id="has its place"),
        pytest.param([*range(8)], {"index": 3, "own": {"train/0": {"loader": {}}}}, 0, id="has its own state"),
        pytest.param(Stateful(range(8)), {"index": 3}, 0, id="Lightning restores it"),
        pytest.param([*range(8)], {"index": 3, "combined": None}, 0, id="between epochs"),
    ],
)
def test_skips_what_was_consumed(loader: Any, arguments: dict[str, Any], first: int | None) -> None:
    """The next batch is the first one that was not consumed."""
    assert first_after(loader, **arguments) == first

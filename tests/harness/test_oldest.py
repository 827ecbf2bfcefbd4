"""The selection for the oldest Lightning names existing files, and leaves out no more than intended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import oldest

ROOT = Path(__file__).parents[2]


class Item:
    """The parts of `pytest.Item` that are needed."""

    def __init__(self, nodeid: str, *, is_slow: bool = False) -> None:
        self.nodeid = nodeid
        self._is_slow = is_slow

    def get_closest_marker(self, name: str) -> str | None:
        """Return a mark."""
        return name if name == "slow" and self._is_slow else None


def select(*items: Item) -> list[str]:
    """Return the ids of the remaining tests."""
    return [item.nodeid for item in oldest.select([*items])]  # type: ignore[list-item]


@pytest.mark.parametrize("file", sorted(oldest.ONE_CASE_OF_THE_FILE))
def test_files_are_there_and_touch_nothing_private(file: str) -> None:
    """A renamed file would run in full. A file that uses Lightning's private parts has to."""
    assert "compat" not in (ROOT / file).read_text()


def test_first_fast_case_of_a_file() -> None:
    """A slow case does not take the place of a fast one."""
    file = "tests/law/test_async_save.py"
    items = [Item(f"{file}::test_a[0]", is_slow=True), Item(f"{file}::test_a[1]"), Item(f"{file}::test_b")]
    assert select(*items) == [f"{file}::test_a[0]", f"{file}::test_a[1]"]


def test_first_fast_case_of_each_law() -> None:
    """One case of each law runs."""
    file = "tests/law/test_model.py"
    items = [Item(f"{file}::test_a[0]"), Item(f"{file}::test_a[1]"), Item(f"{file}::test_b[x]")]
    assert select(*items) == [f"{file}::test_a[0]", f"{file}::test_b[x]"]


def test_all_of_other_files() -> None:
    """Nothing else is left out."""
    nodeids = [f"tests/{name}.py::test_a[{number}]" for name in ("trainer/test_compat", "test_docs") for number in "12"]
    assert select(*map(Item, nodeids)) == nodeids

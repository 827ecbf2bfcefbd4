"""Negative controls: without the part of the state that carries a row, the row is lost, and a law says so."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from lightning_faulttolerant.testing import leave_out_part
from tests.laws.cuts import Cut
from tests.laws.events import different_names
from tests.laws.groups import groups_of
from tests.laws.rows import Group, Row, all_rows
from tests.laws.runs import Training, assert_same, whole_run

SELDOM = 1000
CUT = Cut(at=(1, 3), by=signal.SIGTERM, every=SELDOM)


def is_carried(row: Row) -> bool:
    """Return whether our state carries a row."""
    return bool(row.part)


def differences(group: Group, parts: list[str]) -> dict[str, set[str]]:
    """Return the names of values that differ after a resume without each of these parts."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        [whole] = wholes = whole_run(group, root)
        killed = Training(group=group, root=root / "cut")
        killed.ended(CUT)
        [(begin, _)] = assert_same(wholes, killed.starts[0], name="the start with the cut")
        assert begin == 0
        found = {}
        for part in parts:
            aside = root / "aside"
            shutil.copytree(root / "cut", aside)
            for path in (root / "cut").rglob("autosave-*.ckpt"):
                leave_out_part(path, part)
            [events] = killed.start(strict=False, every_n_train_steps=SELDOM).events
            found[part] = different_names(whole, events)
            shutil.rmtree(root / "cut")
            aside.rename(root / "cut")
        return found


GROUPS = [  # by this name, a training forgets them: else each save would look through all of them
    *groups_of(is_carried, by_part=True),
    *(pytest.param(Group(rows=(row,)), marks=pytest.mark.slow) for row in all_rows().values() if is_carried(row)),
]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_rows_are_lost_without_their_parts(group: Group) -> None:
    """Each row shows another value if its part of the state is left out; alone, it does so for no other reason."""
    found = differences(group, sorted({row.part for row in group.rows}))
    for row in group.rows:
        missing = set(row.shows) - found[row.part]
        assert not missing, f"Without {row.part}, {row.name} still shows {sorted(missing)} as before."


def test_each_row_says_what_it_shows() -> None:
    """A row that our state carries names at least one value that shows it."""
    assert [row.name for row in all_rows().values() if is_carried(row) and not row.shows] == []

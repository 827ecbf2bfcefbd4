"""The law at any cut of any rows: Hypothesis chooses both, at night. What it finds becomes an explicit example.

The seed is that of the groups, so ``LAWS_SEED`` repeats a night.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.laws.cuts import Cut
from tests.laws.groups import seed
from tests.laws.rows import Group, all_rows, fits
from tests.laws.runs import Training, assert_continues, whole_run

NUM_EXAMPLES = int(os.environ.get("LAWS_EXAMPLES", 60))
HOOKS = ("batch", "backward", "step", "validation", "epoch end")


def order_of(cut: Cut) -> tuple[int, int]:
    """Return a number that grows with the time of a cut."""
    epoch, batch = cut.at
    return epoch, {"validation": 90, "epoch end": 91}.get(cut.hook, batch)


@st.composite
def groups(draw: st.DrawFn) -> list[str]:
    """Draw the names of some compatible rows."""
    found: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(all_rows())), min_size=1, max_size=6, unique=True)):
        if fits(all_rows()[name], [all_rows()[each] for each in found]):
            found.append(name)
    return found


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut]:
    """Draw cuts in the order in which they come."""
    places = st.tuples(st.integers(0, 1), st.integers(0, 4))
    one = st.builds(
        Cut,
        at=places,
        hook=st.sampled_from(HOOKS[:3]),
        by=st.sampled_from([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, 0]),
        every=st.sampled_from([1, 1, 2, 5]),
    )
    killed = st.builds(Cut, at=places, hook=st.sampled_from(HOOKS), every=st.sampled_from([1, 1, 2, 5]))
    found = draw(st.lists(one | killed, min_size=1, max_size=4, unique_by=order_of))
    return sorted(found, key=order_of)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@hypothesis.seed(seed())
@hypothesis.settings(max_examples=NUM_EXAMPLES, database=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(names=groups(), ends=cuts())
def test_any_cut(names: list[str], ends: list[Cut]) -> None:
    """Wherever and however it ends, and whatever its features are, a training continues exactly."""
    continues(names, ends)


def continues(names: list[str], ends: list[Cut]) -> None:
    """Check the law on rows and cuts."""
    group = Group(rows=tuple(all_rows()[name] for name in names))
    with tempfile.TemporaryDirectory() as directory:
        whole = whole_run(group, Path(directory))
        assert_continues(whole, Training(group=group, root=Path(directory) / "cut"), ends)


FOUND: list[tuple[list[str], list[Cut]]] = [
    (
        ["Outputs"],
        [Cut(at=(0, 0), hook="step"), Cut(at=(0, 1), by=0, hook="backward"), Cut(at=(1, 4), by=signal.SIGINT)],
    ),
]
"""What the nights have found, and what was worth a fixed place."""


@pytest.mark.parametrize(("names", "ends"), FOUND, ids=str)
def test_found_cut(names: list[str], ends: list[Cut]) -> None:
    """What was found once stays right."""
    continues(names, ends)

"""``drill`` on real trainings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.trained import TORCHRUN, Ended, content, on_training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def drill(where: Path, *options: str, **more: Any) -> Ended:
    """Drill the training with one strike, unless the options say otherwise."""
    return on_training(where, "drill", "--kills=1", "--seed=1", *options, **more)


def strikes(found: Ended) -> list[list[str]]:
    """Return, for each strike, what was struck, the batch, the epoch, where it resumed, and what was done twice."""
    return [line.split()[2:7] for line in re.findall(r"^\d KILL .*|^\d TERM .*|^\d exception .*", found.output, re.M)]


EVERYTHING: dict[str, Any] = {"arguments": ("--functions=fit,validate,test,predict",)}
TWO_RANKS: dict[str, Any] = {"arguments": ("--functions=fit,test", "--devices=2"), "launcher": TORCHRUN}
# The options of the drill, how the script is started, and what was struck.
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], set[str]]] = {
    **{
        kind: ((f"--signal={kind}", "--kills=4"), EVERYTHING, {"train", "validation", "test", "predict"})
        for kind in ("KILL", "TERM", "exception")
    },
    "two ranks": (("--kills=2", "--in=train,test"), TWO_RANKS, {"train", "test"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_real_training_is_exact(case: str, tmp_path: Path) -> None:
    """A training with shuffling, dropout, and augmentation is struck in all that it does, and continues inside of it.

    If the script names its run, an existing run of that name stays as it was, and nothing else is left.
    """
    options, more, stages = CASES[case]
    own = tmp_path / "out" / "fault_tolerance" / "mine" / "fit-1" / "autosave-00000001.ckpt"
    own.parent.mkdir(parents=True)
    own.write_text("of the user")
    before = content(own.parents[3] / "fault_tolerance")
    found = drill(tmp_path, *options, **{**more, "arguments": (*more["arguments"], "--run-id=mine")})
    assert found.exit_code == 0, found.output
    found_strikes = strikes(found)
    assert {stage for stage, *_ in found_strikes} == stages, found.output
    assert all(int(twice) <= 4 for *_, twice in found_strikes)
    assert content(own.parents[3] / "fault_tolerance") == before


def test_a_counter_that_changes_the_augmentation_is_found(tmp_path: Path) -> None:
    """A data set that counts its calls in a plain attribute is distinguished from one that draws, by its cause."""
    found = drill(tmp_path, arguments=("--functions=fit", "--counts"))
    assert found.exit_code == 1, found.output
    assert "Likely cause: augmentation" in found.output
    assert re.search("Equal there: .*order of the samples", found.output)

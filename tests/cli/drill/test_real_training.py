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


EVERYTHING = ("--functions=fit,validate,test,predict",)
# The options of the drill, the arguments of the script, more, what is said, and what was struck.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], str, set[str]]] = {
    **{
        kind: (
            (f"--signal={kind}", "--kills=4"),
            EVERYTHING,
            {},
            "30 evaluation batches",
            {"train", "validation", "test", "predict"},
        )
        for kind in ("KILL", "TERM", "exception")
    },
    "a shell's processes": (("--signal=TERM",), ("--functions=fit",), {"forks": False}, "EXACT", {"train"}),
    "two ranks": (
        (),
        ("--functions=fit", "--devices=2"),
        {"launcher": TORCHRUN, "forks": False},
        "EXACT",
        {"train"},
    ),
    "evaluations of two ranks": (
        ("--kills=2",),
        ("--functions=test,predict", "--devices=2"),
        {"launcher": TORCHRUN},
        "6 evaluation batches",
        {"test", "predict"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_real_training_is_exact(case: str, tmp_path: Path) -> None:
    """A training with shuffling, dropout, and augmentation is struck in all that it does, and continues inside of it.

    If the script names its run, an existing run of that name stays as it was, and nothing else is left.
    """
    options, arguments, more, said, stages = CASES[case]
    own = tmp_path / "out" / "fault_tolerance" / "mine" / "fit-1" / "autosave-00000001.ckpt"
    own.parent.mkdir(parents=True)
    own.write_text("of the user")
    before = content(own.parents[3] / "fault_tolerance")
    found = drill(tmp_path, *options, arguments=(*arguments, "--run-id=mine"), **more)
    assert found.exit_code == 0, found.output
    assert said in " ".join(found.output.split())
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


def test_a_validation_run_of_a_real_fit_is_struck_before_named_batches(tmp_path: Path) -> None:
    """With --in and --at, each strike hits exactly there, and nothing is done twice."""
    found = drill(tmp_path, "--in=validation", "--at", "2", "9", arguments=("--functions=fit",))
    assert found.exit_code == 0, found.output
    assert strikes(found) == [["validation", "2", "0", "2", "0"], ["validation", "3", "1", "3", "0"]]

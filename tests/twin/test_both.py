"""One callback for Trainers of both packages, in any order of imports, without loading the unused package."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest

import tests.twin.translated  # noqa: F401 - it imports pytorch_lightning
from lightning_faulttolerant import FaultTolerance, ResumeReport
from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from lightning_faulttolerant.trainer import bases
from lightning_faulttolerant.trainer.process import VARIABLE
from tests import runs
from tests.processes import run

pytorch_lightning: Any = sys.modules["pytorch_lightning"]
twin_runs: Any = __import__("twin_tests.runs", fromlist=["runs"])
PACKAGES = ("lightning.pytorch", "pytorch_lightning")

SCRIPT = """
import sys
{first}
import {package} as pl
{last}
from {package}.demos.boring_classes import BoringModel

pl.Trainer(max_steps=2, callbacks={callbacks}, accelerator="cpu", logger=False).fit(BoringModel())
print("LOADED", *(name for name in ("lightning", "pytorch_lightning") if name in sys.modules))
"""
ROOT = Path(__file__).parents[2]
MADE = "from lightning_faulttolerant import FaultTolerance\nmade = FaultTolerance()"


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("first", "last", "callbacks"),
    [(MADE, "", "[made]"), ("", MADE, "[made]"), ("", MADE, "made"), ("", "", "None")],
    ids=["first", "last", "single", "variable"],
)
def test_script_of_either_package(package: str, first: str, last: str, callbacks: str, tmp_path: Path) -> None:
    """The callback acts, created before or after the package is imported; the other package is never imported."""
    (tmp_path / "script.py").write_text(SCRIPT.format(package=package, first=first, last=last, callbacks=callbacks))
    switch = {VARIABLE: "1"} if callbacks == "None" else {}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **switch}
    words = [sys.executable, "script.py"]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"LOADED {package.partition('.')[0]}"
    assert list(tmp_path.rglob("history.jsonl")) != []


def test_callback_is_one_of_both_packages() -> None:
    """An instance, a copy, one from a pickle, and one of a subclass are callbacks of each package."""

    class Own(FaultTolerance):
        pass

    made = Own(every_n_train_steps=3)
    plain = FaultTolerance()
    for one in (made, copy.deepcopy(made), plain, pickle.loads(pickle.dumps(plain)), KillAt(1)):
        assert isinstance(one, lightning.pytorch.Callback)
        assert isinstance(one, pytorch_lightning.Callback)
    assert isinstance(copy.deepcopy(made), Own)


def test_two_fits_of_two_packages_in_one_process(tmp_path: Path) -> None:
    """A script with a fit of each package, killed in the second, skips the first and continues the second.

    The two are numbered together, and one instance of the callback serves both.
    """
    root = tmp_path / "runs"

    def main(at: int | None) -> None:
        callback = FaultTolerance(root, run_id="both", every_n_train_steps=1)
        for number, helpers in enumerate((runs, twin_runs)):
            kills = [KillAt(at)] if at is not None and number == 1 else []
            trainer = helpers.fit_net([callback, *kills], tmp_path)
            weights = sum(p.double().sum().item() for p in trainer.lightning_module.parameters())
            report = callback.resume_report
            assert report is None or isinstance(report, ResumeReport)
            print(f"WEIGHTS {weights.hex()}", f"AT {report.epoch} {report.batch}" if report else "NEW", sep="\n")

    whole = run(lambda: main(None))
    assert run(lambda: main(4)).exit_code == -signal.SIGKILL
    assert sorted(path.name for path in (root / "both").glob("fit-*")) == ["fit-1", "fit-2"]
    again = run(lambda: main(None))
    assert (whole.exit_code, again.exit_code) == (0, 0), again.output
    weights = [[line for line in ended.output.splitlines() if "WEIGHTS" in line] for ended in (whole, again)]
    assert weights[0] == weights[1] != []
    assert whole.output.count("NEW") == 2
    assert "AT 0 4" in again.output
    assert not list(root.rglob("*.ckpt"))


def test_fit_of_one_package_inside_a_fit_of_the_other_is_a_part_of_it(tmp_path: Path) -> None:
    """An inner fit has neither a run nor a number, even if it gets the same callback."""
    callback = FaultTolerance(tmp_path / "runs", run_id="nested", every_n_train_steps=1)

    class Inner(lightning.pytorch.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            twin_runs.fit_net([callback], tmp_path / "inner", max_epochs=1)
            found.append(sorted(path.name for path in (tmp_path / "runs").glob("*/fit-*")))

    found: list[list[str]] = []
    runs.fit_net([callback, Inner()], tmp_path, max_epochs=1)
    assert found == [["fit-1"]]


@pytest.mark.parametrize("helpers", [runs, twin_runs], ids=PACKAGES)
def test_variable_adds_it_to_a_trainer_of_each(helpers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the variable, each Trainer has its own callback; without it, none."""
    assert not [one for one in helpers.make_trainer([], tmp_path).callbacks if isinstance(one, FaultTolerance)]
    monkeypatch.setenv(VARIABLE, "1")
    first, second = helpers.make_trainer([], tmp_path), helpers.make_trainer([], tmp_path)
    [one], [other] = ([c for c in each.callbacks if isinstance(c, FaultTolerance)] for each in (first, second))
    assert one.is_from_environment
    assert one is not other


def test_other_trainers_and_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An object that is not a Trainer, and a package before 2.5.6, are refused by name."""
    with pytest.raises(UnsupportedTrainerError, match=r"and pytorch_lightning, but this is a builtins\.int"):
        bases.served(1)
    monkeypatch.setattr(pytorch_lightning, "__version__", "2.5.5")
    with pytest.raises(UnsupportedTrainerError, match=r"needs pytorch_lightning 2\.5\.6 or newer"):
        bases.served(twin_runs.make_trainer([], tmp_path))
    assert bases.served(runs.make_trainer([], tmp_path))


def test_own_tests_of_a_module_of_the_other_package() -> None:
    """`assert_resumes_exactly` takes a fit of each package."""
    [cost] = assert_resumes_exactly(twin_runs.fit_net, [KillAt(3)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (0, 3)

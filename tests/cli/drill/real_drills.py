"""Drills of a real training."""

from __future__ import annotations

import pickle
import secrets
import sys
from pathlib import Path
from typing import Any

from lightning_faulttolerant.cli.drill.drilling import Drill
from lightning_faulttolerant.cli.drill.process import DrillSettings
from lightning_faulttolerant.cli.drill.result import DrillResult
from tests.cli.drill.drills import ROOT, ToldProgress, environment
from tests.harness import python

TRAINING = Path(__file__).with_name("training.py")


def drill(
    where: Path, *arguments: str, launcher: tuple[str, ...] = (), forks: bool = True, **settings: Any
) -> DrillResult:
    """Drill a real training.

    Args:
        where: Directory for the files of the drill and of its runs.
        arguments: The arguments of the training.
        launcher: The words between the interpreter and the training.
        forks: Whether to fork the drill, and all processes that it starts, from this process, which has imported
            torch and Lightning: see `tests.harness.python`.
        settings: Settings of the drill.
    """
    command = (sys.executable, *launcher, str(TRAINING), str(where), *arguments)
    own: dict[str, Any] = {"num_strikes": 1, "seed": 1, "token": secrets.token_hex(4), "directory": where / "drill"}
    asked = DrillSettings(command=command, **{**own, **settings})
    return _forked(asked, where) if forks else _run(asked, where)


def _run(settings: DrillSettings, where: Path) -> DrillResult:
    return Drill(settings, ToldProgress(where), environment=environment()).run()


def _forked(settings: DrillSettings, where: Path) -> DrillResult:
    (where / "settings.pickle").write_bytes(pickle.dumps(settings))
    text = f"from tests.cli.drill.real_drills import run_asked; run_asked({str(where)!r})"
    command = python.Command(words=[sys.executable, "-c", text], directory=str(ROOT), environment=environment())
    exit_code, output = python.run(command, scratch=where / "scratch")
    assert exit_code == 0, output
    result: DrillResult = pickle.loads((where / "result.pickle").read_bytes())
    return result


def run_asked(where: str) -> None:
    """Run the drill whose settings are in a directory, and write its result there."""
    settings: DrillSettings = pickle.loads((Path(where) / "settings.pickle").read_bytes())
    (Path(where) / "result.pickle").write_bytes(pickle.dumps(_run(settings, Path(where))))

"""Drills of a real training."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

from lightning_faulttolerant.cli.drill.drilling import Drill
from lightning_faulttolerant.cli.drill.result import DrillResult
from lightning_faulttolerant.cli.drill.settings import DrillSettings
from tests.cli.drill.drills import ToldProgress, environment

TRAINING = Path(__file__).with_name("training.py")


def drill(where: Path, *arguments: str, launcher: tuple[str, ...] = (), **settings: Any) -> DrillResult:
    """Drill a real training."""
    command = (sys.executable, *launcher, str(TRAINING), str(where), *arguments)
    own: dict[str, Any] = {"num_strikes": 1, "seed": 1, "token": secrets.token_hex(4), "directory": where / "drill"}
    return Drill(
        DrillSettings(command=command, **{**own, **settings}), ToldProgress(where), environment=environment()
    ).run()

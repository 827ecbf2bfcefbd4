"""Values that a script, which is killed and run again, records for the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def told(directory: Path, name: str) -> list[Any]:
    """Return the values that a script has recorded under a name."""
    path = directory / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tell(directory: Path, name: str, value: Any) -> None:
    """Record a value for the test."""
    with open(directory / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(value) + "\n")

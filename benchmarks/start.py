"""The time from the start of a process to its first training step: with `PL_FAULT_TOLERANT_TRAINING=1`, and without.

The same script, `start_script.py`, starts fresh without us, fresh with us, resumed from an autosave, and continued by
Lightning from its own checkpoint, in a new random order in each round. Ratios and differences are taken within a round.
Lightning restores weights, optimizers, and counters, but begins the epoch's data again.

Run `python benchmarks/start.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import machine
from lightning_faulttolerant.trainer.process import VARIABLE

SCRIPT = Path(__file__).with_name("start_script.py")
MODELS = {"small": 1_000, "10 million parameters": 10_000_000}
VARIANTS = ("without", "fresh", "resumed", "by Lightning")
_BATCH = 5
TARGET_RATIO, TARGET_SECONDS = 1.1, 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of the script, up to a training step.

    Args:
        seconds: How long it took.
        cpu_seconds: How much processor time it took. Other processes on the machine change it less.
        batch: The batch of that step.
    """

    seconds: float
    cpu_seconds: float
    batch: int


def start(directory: Path, num_parameters: int, *, last_batch: int = 0, **variables: str) -> Start:
    """Run the script in `directory` up to its first step, or up to batch `last_batch` if that comes later.

    Raises:
        RuntimeError: If the script fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_FAULT_TOLERANT")}
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(num_parameters)],
        cwd=directory,
        env={**environment, "LAST_BATCH": str(last_batch), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{SCRIPT.name} failed:\n{ran.stderr}")
    ended, cpu_seconds, batch = ran.stdout.split()[-3:]
    return Start(seconds=float(ended) - began, cpu_seconds=float(cpu_seconds), batch=int(batch))


def measure(num_parameters: int, *, rounds: int, directory: Path) -> dict[str, Any]:
    """Return the median seconds of each variant, and how it compares with the script without us."""
    with_us = {VARIABLE: "1", "PL_FAULT_TOLERANT_OPTIONS": f"every_n_train_steps={_BATCH}"}
    saved, of_lightning = directory / "resumed", {"CHECKPOINT": str(directory / "lightning.ckpt")}
    saved.mkdir()
    start(saved, num_parameters, last_batch=_BATCH + 1, **with_us)
    start(directory, num_parameters, last_batch=_BATCH, **of_lightning)
    variables = {"without": {}, "fresh": with_us, "resumed": with_us, "by Lightning": of_lightning}
    found: dict[str, list[Start]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in random.sample(VARIANTS, len(VARIANTS)):
            own = saved if name == "resumed" else directory / f"{name}-{number}"
            own.mkdir(exist_ok=True)
            one = start(own, num_parameters, **variables[name])
            if one.batch != (_BATCH if name in ("resumed", "by Lightning") else 0):
                raise RuntimeError(f"The start {name} began at batch {one.batch}.")
            found[name].append(one)
    return {name: _compared(starts, found["without"]) for name, starts in found.items()}


def _compared(starts: list[Start], without: list[Start]) -> dict[str, float]:
    pairs = list(zip(starts, without, strict=True))
    ratios = [one.seconds / other.seconds for one, other in pairs]
    return {
        "seconds": statistics.median(one.seconds for one in starts),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "more_s": statistics.median(one.seconds - other.seconds for one, other in pairs),
        "more_cpu_s": statistics.median(one.cpu_seconds - other.cpu_seconds for one, other in pairs),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure each model, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=9, help="starts of each kind (default: 9)")
    parser.add_argument("--quick", action="store_true", help="one round of a small model, to see that it runs")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    names = ["small"] if options.quick else options.model or list(MODELS)
    cases = {}
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(MODELS[name], rounds=1 if options.quick else options.rounds, directory=Path(directory))
        cases[name] = found
        for variant, of in found.items():
            print(
                f"{name:22} {variant:12} {of['seconds']:6.2f} s, x{of['ratio']:.3f} ({of['low']:.2f}-{of['high']:.2f}),"
                f" {of['more_s']:+.3f} s, processor {of['more_cpu_s']:+.3f} s",
                flush=True,
            )
    print(f"at most x{TARGET_RATIO} or {TARGET_SECONDS:+} s")
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()

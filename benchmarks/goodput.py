"""Goodput under failures: our default settings against a `ModelCheckpoint` in a shell loop, at its best interval.

Each side runs the same script, `goodput_script.py`: all sides at the same time, one seed after the other. It is killed
by SIGKILL at the same times, in seconds since the start of its run, and is started again at once. The times are drawn
with an exponential distribution. Goodput is the time that the steps take on an idle machine without a failure, divided
by the wall time. With several seeds, the times of all runs of a side are added up.

Run `python benchmarks/goodput.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import machine

SCRIPT = Path(__file__).with_name("goodput_script.py")
MEANS = (15.0, 60.0, 300.0)
"""Mean seconds between two failures."""
INTERVALS = (5, 25, 100, 500)
"""The intervals that are tried for `ModelCheckpoint`, in steps."""
SEEDS = (3, 4, 5)
OURS = "ours"
SLEEP_SECONDS = 0.06
STEP_SECONDS = 0.065
"""How long a step takes, on an idle machine: what it computes takes 5 ms."""
START_SECONDS = 4.0
"""How long a start sleeps: imports of torch and Lightning take as long."""
_WORK = {15.0: 100.0, 60.0: 200.0, 300.0: 450.0}
"""Seconds of training without a failure."""
_LIMIT, _MORE_SECONDS = 6.0, 60.0
"""A run is given up at this many times its work, and so many seconds more."""
_MUCH_LONGER = 1.3
"""A run is given up, too, at this many times what the second fastest of them has taken."""
_LOOK_SECONDS = 0.02


class Run:
    """A run of the script under failures.

    Args:
        directory: Where it runs.
        interval: The interval of its `ModelCheckpoint`; ``None`` for ours.
        num_steps: How many steps it makes.
        failures: When it is killed, in seconds since its start.
        sleep_seconds: How long a step sleeps.
        start_seconds: How long a start sleeps.
    """

    def __init__(
        self,
        directory: Path,
        interval: int | None,
        num_steps: int,
        failures: Iterator[float],
        *,
        sleep_seconds: float = SLEEP_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = OURS if interval is None else str(interval)
        self.num_failures = 0
        self.seconds: float | None = None
        self.result = ""
        self.directory = directory / self.name
        self.directory.mkdir(parents=True)
        self._failures = failures
        words = [sys.executable, str(SCRIPT), str(num_steps), str(sleep_seconds), str(start_seconds)]
        words += [] if interval is None else [str(interval)]
        # In its own session, so that Linux gives each run the same share of the processor.
        self._starter = subprocess.Popen(
            words,
            cwd=self.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._began = self._next = 0.0
        self._process_id = 0

    def start(self) -> None:
        """Start it for the first time."""
        self._launch()
        self._began, self._next = time.monotonic(), next(self._failures)

    def _launch(self) -> None:
        assert self._starter.stdin is not None
        self._starter.stdin.write(b"start\n")
        self._process_id = int(self._line())

    def _line(self) -> bytes:
        assert self._starter.stdout is not None
        return self._starter.stdout.readline()

    def look(self, limit_seconds: float) -> bool:
        """Kill it if that is due, start it again if it has ended, and return whether it is over."""
        now = time.monotonic() - self._began
        if now >= limit_seconds:
            return True
        is_due = now >= self._next
        if is_due:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self._process_id, signal.SIGKILL)
            self.num_failures, self._next = self.num_failures + 1, next(self._failures)
        if not is_due and not select.select([self._starter.stdout], [], [], 0)[0]:
            return False
        if int(self._line()) == 0:
            self.seconds, self.result = now, (self.directory / "result").read_text().split()[0]
            return True
        self._launch()  # also after an error, such as a checkpoint that was torn
        return False

    def close(self) -> None:
        """Kill its processes."""
        if self._process_id and self._starter.poll() is None and self.seconds is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process_id, signal.SIGKILL)
        self._starter.kill()
        self._starter.communicate()


def failures(mean: float, seed: int) -> Iterator[float]:
    """Yield the times of the failures, in seconds."""
    generator, at = random.Random(seed), 0.0
    while True:
        at += generator.expovariate(1 / mean)
        yield at


def undisturbed(directory: Path, num_steps: int) -> tuple[str, float]:
    """Return the digest of the right result, and the seconds of a fit without sleep."""
    run = Run(directory, 10**9, num_steps, failures(1e9, 0), sleep_seconds=0.0, start_seconds=0.0)
    together([run], limit_seconds=600.0)
    result, seconds = (run.directory / "result").read_text().split()
    return result, float(seconds)


def together(runs: Sequence[Run], *, limit_seconds: float) -> None:
    """Run all at the same time, until each has ended or takes far longer than the others."""
    for run in runs:
        run.start()
    live = list(runs)
    try:
        while live:
            ended = sorted(run.seconds for run in runs if run.seconds is not None)
            limit = min(limit_seconds, _MUCH_LONGER * ended[1]) if len(ended) > 1 else limit_seconds
            live = [run for run in live if not run.look(limit)]
            time.sleep(_LOOK_SECONDS)
    finally:
        for run in runs:
            run.close()


def _added(runs: Sequence[Run], work: float, right: str) -> dict[str, Any]:
    """Return the figures of one side: those of its runs, one for each seed, added up."""
    seconds = [run.seconds for run in runs]
    total = None if None in seconds else sum(filter(None, seconds))
    return {
        "seconds": total,
        "failures": sum(run.num_failures for run in runs),
        "goodput": None if total is None else len(runs) * work / total,
        "runs": len(runs),
        "right": sum(run.result == right for run in runs),
    }


def measure(
    mean: float, directory: Path, *, work: float, intervals: Sequence[int], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the figures of one mean distance of failures."""
    num_steps = round(work / STEP_SECONDS)
    right, _ = undisturbed(directory / "right", num_steps)
    groups = [
        [Run(directory / str(seed), interval, num_steps, failures(mean, seed)) for interval in (None, *intervals)]
        for seed in seeds
    ]
    for runs in groups:
        together(runs, limit_seconds=_LIMIT * work + _MORE_SECONDS)
    found = {runs[0].name: _added(runs, work, right) for runs in zip(*groups, strict=True)}
    ours = found.pop(OURS)
    best = max(found, key=lambda name: found[name]["goodput"] or 0.0)
    ratio = None if None in (ours["goodput"], found[best]["goodput"]) else ours["goodput"] / found[best]["goodput"]
    return {"steps": num_steps, "ours": ours, "others": found, "best": best, "ratio": ratio}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the goodput of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mean", action="append", type=float, help="mean seconds between failures; several times")
    parser.add_argument("--interval", action="append", type=int, help="steps between checkpoints; several times")
    parser.add_argument("--work", type=float, help="seconds of training without a failure")
    parser.add_argument("--seed", action="append", type=int, help="of the times of the failures; several times")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, which is kept")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it runs: figures mean nothing")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    intervals, seeds = options.interval or INTERVALS, options.seed or SEEDS
    cases = {}
    for mean in options.mean or MEANS:
        work = options.work or _WORK.get(mean, 5 * mean)
        if options.quick:
            mean, work, intervals, seeds = 30.0, 3.0, (10,), SEEDS[:1]
        print(f"mean distance {mean:g} s, {work:g} s of training:", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) if options.keep is None else options.keep / f"{mean:g}"
            found = measure(mean, directory, work=work, intervals=intervals, seeds=seeds)
        cases[f"{mean:g}"] = found
        if options.output:
            figures = {"machine": machine(), "seeds": list(seeds), "step_s": STEP_SECONDS, "start_s": START_SECONDS}
            options.output.write_text(json.dumps({**figures, "cases": cases}, indent=1) + "\n")
        for name, each in ((OURS, found["ours"]), *found["others"].items()):
            right = f"right: {each['right']} of {each['runs']}"
            print(f"  {name:>6}: goodput {each['goodput']}, {right}, {each['failures']} failures")
        print(f"  ours to the best: {found['ratio']}", flush=True)
        if options.quick:
            break


if __name__ == "__main__":
    os.environ.pop("PL_FAULT_TOLERANT_TRAINING", None)
    main()

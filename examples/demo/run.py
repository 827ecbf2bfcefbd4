"""Run train.py once uninterrupted, once killed twice with SIGKILL and started again; show that both are the same run.

Ends with exit code 1 if anything differs, or if a restart began from the beginning.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from comparison import Process, differences, joined, loss, place, read_process, run_twice, summary
from figure import draw

TRAIN = Path(__file__).with_name("train.py")
EVERY_N_TRAIN_STEPS = 10  # the interval of the autosaves in train.py
SEED = 1
RANDOM = random.SystemRandom()  # other kills each time that the demo runs


class Run:
    """One run: the same command in the same directory, as often as it takes."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.command = [sys.executable, str(TRAIN), "--output", str(directory)]
        self.processes: list[Process] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "SLURM_"))}
        self._environment = {**kept, **environment}
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def start(self, *, seed: int, kill_at: int | None = None) -> Process:
        """Run the command once, and kill it when it has begun `kill_at` batches, if given."""
        number, trace = len(self.processes) + 1, self.directory / "trace.jsonl"
        began = time.monotonic()
        with open(self.directory / f"process-{number}.log", "wb") as log:
            environment = {**self._environment, "DEMO_SEED": str(seed)}
            child = subprocess.Popen(self.command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                if kill_at is not None:
                    _wait_for_batch(trace, kill_at, child)
                    time.sleep(RANDOM.uniform(0, 0.01))  # anywhere in the batch
                    child.kill()
                exit_code = child.wait()
            finally:
                child.kill()
        if exit_code != (0 if kill_at is None else -9):
            sys.exit(f"The training ended with exit code {exit_code}: see {log.name}")
        kept = trace.rename(self.directory / f"trace-{number}.jsonl")
        self.processes.append(read_process(kept, seed=seed, seconds=time.monotonic() - began))
        return self.processes[-1]


def _wait_for_batch(trace: Path, num_batches: int, child: subprocess.Popen[bytes]) -> None:
    """Wait until a process has begun so many batches."""
    while not trace.exists() or trace.read_bytes().count(b'"event": "batch"') < num_batches:
        if child.poll() is not None:
            return
        time.sleep(0.001)


def between_autosaves(process: Process, num_batches: int) -> bool:
    """Return whether a process was killed in the middle of an epoch, and of the interval between two autosaves."""
    if process.autosave is None or process.autosave[0] != process.last[0]:
        return False
    num_lost = process.last[1] - process.autosave[1]
    return 0 < num_lost < EVERY_N_TRAIN_STEPS and 0 < process.last[1] < num_batches - 1


def choose_kill(low: int, high: int, num_batches: int, *, is_between: bool) -> int:
    """Choose the batch of the run in which to kill: any, or one between two autosaves in the middle of an epoch."""
    batches = range(low, high)
    if is_between:
        batches = [n for n in batches if 3 <= n % EVERY_N_TRAIN_STEPS <= 7 and 5 <= n % num_batches < num_batches - 5]
    return RANDOM.choice(batches)


def interrupt(run: Run, total: int, num_batches: int) -> None:
    """Kill the run once in its first half and once in its second, then let it come to its end."""
    begin, is_done = 0, False
    for low, high in ((num_batches, total // 2), (total // 2 + num_batches, total - num_batches // 2)):
        target = choose_kill(low, high, num_batches, is_between=not is_done)
        process = run.start(seed=_seed(run), kill_at=target - begin + 1)
        epoch, batch = process.autosave or (0, 0)
        begin, is_done = epoch * num_batches + batch, is_done or between_autosaves(process, num_batches)
        print(_line(run, f"SIGKILL in batch {process.last[1]} of epoch {process.last[0]}"))
    run.start(seed=_seed(run))
    print(_line(run, "ran to its end"))


def _seed(run: Run) -> int:
    return RANDOM.randrange(10**6) if run.processes else SEED


def _line(run: Run, end: str) -> str:
    process = run.processes[-1]
    begin = "began"
    if process.resume:
        begin = f"resumed {process.resume['text']}" if process.resume["exact"] else "resumed NOT EXACTLY"
    return f"  process {len(run.processes)}  seed {process.seed:<7} {begin:<36} {end:<30} {process.seconds:5.1f} s"


def problems(reference: Process, processes: list[Process], num_batches: int) -> list[str]:
    """Return all that is not as it should be."""
    found = differences(reference.events, joined(processes))
    for i, (process, following) in enumerate(pairwise(processes)):
        if following.resume is None or following.start == (0, 0):
            found.append(f"process {i + 2} began from the beginning")
        elif following.start != process.autosave:
            found.append(f"process {i + 2} went on at {following.start}, the newest autosave was {process.autosave}")
    if not any(between_autosaves(process, num_batches) for process in processes[:-1]):
        found.append("no kill came between two autosaves in the middle of an epoch: run the demo again")
    return found


def show(reference: Process, processes: list[Process]) -> None:
    """Print the two runs side by side."""
    events = joined(processes)
    print(f"\n{'':<34}{'uninterrupted':<24}{'killed twice':<24}")
    one, other = summary(reference.events), summary(events)
    for name in one:
        print(_row(name, one[name], other[name]))
    starts = [(f"went on, process {i}", process.start) for i, process in enumerate(processes[1:], 2)]
    for name, where in [("first", (0, 0)), *starts, ("last", reference.last)]:
        values = [
            [loss(event) for event in side if event["event"] == "step" and place(event) == where]
            for side in (reference.events, events)
        ]

"""Run train.py uninterrupted; then kill it twice with SIGKILL and restart it; show that both runs are the same.

Ends with exit code 1 if anything differs, or if a restart began from the beginning.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from comparison import Event, Place, Process, differences, joined, loss, place, read_process, run_twice, summary
from figure import draw

TRAIN = Path(__file__).with_name("train.py")
EVERY_N_TRAIN_STEPS = 10  # between two autosaves, as in train.py
SEED = 1
RANDOM = random.SystemRandom()  # different kills and seeds each time the demo runs


class Run:
    """One run: the same command in the same directory, started as often as it takes."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.command = [sys.executable, str(TRAIN), "--output", str(directory)]
        self.processes: list[Process] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "SLURM_"))}
        self._environment = {**kept, **environment}
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def start(self, *, kill_at: int | None = None) -> Process:
        """Run the command once, with a new seed in a restart. Kill it in its `kill_at`-th batch, if given."""
        number, trace = len(self.processes) + 1, self.directory / "trace.jsonl"
        seed = SEED if number == 1 else RANDOM.randrange(10**6)
        environment = {**self._environment, "DEMO_SEED": str(seed)}
        began = time.monotonic()
        with open(self.directory / f"process-{number}.log", "wb") as log:
            child = subprocess.Popen(self.command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                if kill_at is not None:
                    _wait_for_batch(child, trace, kill_at)
                    child.kill()
                exit_code = child.wait()
            finally:
                child.kill()
        if exit_code != (0 if kill_at is None else -9):
            sys.exit(f"The training ended with exit code {exit_code}: see {log.name}")
        kept = trace.rename(self.directory / f"trace-{number}.jsonl")
        self.processes.append(read_process(kept, seed=seed, seconds=time.monotonic() - began))
        return self.processes[-1]


def _wait_for_batch(child: subprocess.Popen[bytes], trace: Path, number: int) -> None:
    """Wait for some instant in the `number`-th batch of a process, or until the process has ended."""
    while child.poll() is None:
        if trace.exists() and trace.read_bytes().count(b'"event": "batch"') >= number:
            time.sleep(RANDOM.uniform(0, 0.005))
            return
        time.sleep(0.001)


def is_between_autosaves(process: Process, num_batches: int) -> bool:
    """Return whether a process was killed in the middle of an epoch, and between two autosaves."""
    if process.autosave is None or process.autosave[0] != process.last[0]:
        return False
    num_unsaved = process.last[1] - process.autosave[1]
    return 0 < num_unsaved < EVERY_N_TRAIN_STEPS and 0 < process.last[1] < num_batches - 1


def interrupt(run: Run, total: int, num_batches: int) -> None:
    """Kill the run once in each half, then let it finish."""
    begin, is_done = 0, False
    for low, high in ((num_batches, total // 2), (total // 2 + num_batches, total - num_batches)):
        targets = list(range(low, high))
        if not is_done:
            targets = [
                n for n in targets if 3 <= n % EVERY_N_TRAIN_STEPS <= 7 and 5 < n % num_batches < num_batches - 5
            ]
        process = run.start(kill_at=RANDOM.choice(targets) - begin + 1)
        epoch, batch = process.autosave or (0, 0)
        begin, is_done = epoch * num_batches + batch, is_done or is_between_autosaves(process, num_batches)
        report(run, "SIGKILL in batch {1} of epoch {0}".format(*process.last))
    run.start()
    report(run, "ran to its end")


def report(run: Run, end: str) -> None:
    process = run.processes[-1]
    begin = "began"
    if process.resume:
        begin = f"resumed {process.resume['text']}" if process.resume["exact"] else "resumed NOT EXACTLY"
    number, seed = len(run.processes), process.seed
    print(f"  process {number}  seed {seed:<7} {begin:<36} {end:<32} {process.seconds:5.1f} s", flush=True)


def problems(reference: Process, processes: Sequence[Process], num_batches: int) -> list[str]:
    """Return everything that is not as expected."""
    found = differences(reference.events, joined(processes))
    for i, (killed, following) in enumerate(pairwise(processes), 2):
        if following.resume is None or following.start == (0, 0):
            found.append(f"process {i} began from the beginning")
        elif following.start != killed.autosave:
            found.append(f"process {i} continued at {following.start}, the newest autosave was {killed.autosave}")
    if not any(is_between_autosaves(process, num_batches) for process in processes[:-1]):
        found.append("no kill came between two autosaves in the middle of an epoch: run the demo again")
    return found


def show(reference: Process, processes: Sequence[Process]) -> None:
    """Print the two runs side by side."""
    events = joined(processes)
    print(f"\n{'':<43}{'uninterrupted':<18}killed twice")
    one, other = summary(reference.events), summary(events)
    for name in one:
        _print_row(name, one[name], other[name])
    starts = [(f"restart {i}", process.start) for i, process in enumerate(processes[1:], 1)]
    for name, where in [("first", (0, 0)), *starts, ("last", reference.last)]:
        texts = [f"{'':>4}  {_loss_text(side, where)}" for side in (reference.events, events)]
        _print_row(f"loss, epoch {where[0]} batch {where[1]}, {name}", *texts)


def _print_row(name: str, one: str, other: str) -> None:
    print(f"  {name:<35}{one:<24}{other[6:]:<18}{'identical' if one == other else 'DIFFERENT'}")


def _loss_text(events: Sequence[Event], where: Place) -> str:
    losses = [loss(event) for event in events if event["event"] == "step" and place(event) == where]
    return " and ".join(f"{value:.9g}" for value in losses) or "missing"


def main(output: Path) -> int:
    print(
        "The same training twice: uninterrupted; then killed at random moments and started again by the same command."
    )
    print(f"  python {os.path.relpath(TRAIN)} --output {output}/...")
    print("\nUninterrupted, with fault tolerance switched off", flush=True)
    uninterrupted = Run(output / "uninterrupted", PL_FAULT_TOLERANT_TRAINING="0")
    reference = uninterrupted.start()
    report(uninterrupted, "ran to its end")
    total, num_batches = len(reference.of("batch")), 1 + reference.last[1]
    print(f"\nKilled twice, with an autosave every {EVERY_N_TRAIN_STEPS} steps", flush=True)
    interrupted = Run(output / "interrupted")
    interrupt(interrupted, total, num_batches)
    processes = interrupted.processes
    show(reference, processes)

    found = problems(reference, processes, num_batches)
    twice = [len(run_twice(*pair)) for pair in pairwise(processes)]
    verdict = "NOT THE SAME" if found else f"the same {total} batches, bit for bit"
    title = f"Killed twice and started again: {verdict}"
    draw(output / "losses.png", uninterrupted=reference, processes=processes, num_batches=num_batches, title=title)
    print(f"\n{title}")
    print(f"Run twice: {' + '.join(map(str, twice))} of {total} batches ({100 * sum(twice) / total:.1f} %)")
    print(f"Figure: {output}/losses.png; logs and traces: {output}/uninterrupted/ and {output}/interrupted/")
    for problem in found[:5]:
        print(f"PROBLEM: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="directory of all that is written")
    sys.exit(main(parser.parse_args().output))

"""The soak: trainings of random rows, struck at random moments, for hours: ``make soak HOURS=8``.

Each trial trains a random group on one or two ranks, is struck some times, and then finishes. It prints a table at the
end. A trial that fails leaves a directory with its files; ``make soak TRIAL=<directory>`` runs the same trial again.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lightning_faulttolerant.errors import NotExactError, UnsafeCheckpointError
from tests.harness import warm
from tests.laws.cuts import Cut
from tests.laws.events import Broken, Event, read, slice_of
from tests.laws.processes import signal_to, tree_of
from tests.laws.rows import Group, Row, all_rows, fits
from tests.laws.runs import Start, Training, whole_run

TWO_STARTS = "two starts"
KINDS = (
    "SIGKILL of a process",
    "SIGKILL of all",
    "SIGTERM",
    "SIGINT",
    "SIGSTOP",
    "exception",
    "full disk",
    "damaged autosave",
    TWO_STARTS,  # on one rank: a second start of two has no launcher
)
REFUSED = "refused rightly"
OUTCOMES = ("exact", REFUSED, "wrong", "hung", "left behind")
_HUNG_SECONDS = 600
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A training and what happens to it.

    Args:
        seed: Decides all that is random in it.
        rows: The names of its rows.
        kinds: What strikes its starts, in order.
        num_ranks: Its number of processes.
    """

    seed: int
    rows: list[str]
    kinds: list[str]
    num_ranks: int

    @property
    def group(self) -> Group:
        """Its features."""
        return Group(rows=tuple(all_rows()[name] for name in self.rows))


def new_trial(seed: int) -> Trial:
    """Return the trial of a seed."""
    chosen = random.Random(seed)
    num_ranks = chosen.choice([1, 1, 2])
    rows: list[Row] = []
    candidates = [row for row in all_rows().values() if num_ranks == 1 or row.ranks]
    for row in chosen.sample(candidates, min(len(candidates), 30)):
        if len(rows) < chosen.randrange(1, 7) and fits(row, rows):
            rows.append(row)
    kinds = chosen.choices(KINDS[: len(KINDS) - (num_ranks > 1)], k=chosen.randrange(1, 4))
    kinds.sort(key=TWO_STARTS.__eq__)  # the last strike: one of them may finish
    return Trial(seed=seed, rows=[row.name for row in rows], kinds=kinds, num_ranks=num_ranks)


class Soak:
    """Runs one trial in a directory."""

    def __init__(self, trial: Trial, root: Path) -> None:
        self._trial = trial
        self._root = root
        self._chosen = random.Random(trial.seed)
        self._training = Training(group=trial.group, root=root / "struck", num_ranks=trial.num_ranks)
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        """Strike the training as the trial says, then let it finish.

        Raises:
            Broken: If it does not continue exactly.
        """
        began = time.monotonic()
        whole = whole_run(self._trial.group, self._root, num_ranks=self._trial.num_ranks)
        seconds = (time.monotonic() - began) / 2
        ends = [0] * self._trial.num_ranks
        for number, kind in enumerate([*self._trial.kinds, ""]):
            start = self._start(kind, seconds)
            name = f"start {number} ({kind or 'to the end'})"
            if self._is_refused(start):
                self.outcomes[REFUSED] += 1
                return
            for rank, events in enumerate(start.events):
                begin, end = slice_of(whole[rank], events, whole_name="the whole run", part_name=name)
                if events and begin > ends[rank]:
                    raise Broken(f"{name} leaves out events {ends[rank]} to {begin} of rank {rank}.\n{start.output}")
                ends[rank] = max(end, ends[rank])
            if kind and self._is_finished(start):
                self.outcomes["exact"] += 1
                return
        if any(start.codes) or ends != [len(events) for events in whole]:
            raise Broken(f"The last start ended with {start.codes}, after {ends} events.\n{start.output}")
        self.outcomes["exact"] += 1

    def _start(self, kind: str, seconds: float) -> Start:
        moment = self._chosen.uniform(0.05, 1.0) * seconds
        cut = None
        self._training.before = self._training.beside = None
        if kind == "exception":
            cut = Cut(at=(self._chosen.randrange(2), self._chosen.randrange(5)), by=0, hook="backward")
        elif kind == "full disk":
            self._training.before = lambda: _fill_disk(moment)
        elif kind == "damaged autosave":
            _damage(self._training.root, self._chosen)
        elif kind == TWO_STARTS:
            self._training.beside = lambda _: self._start_again(moment)
        elif kind:
            self._training.beside = lambda ids: _strike(kind, ids, moment, self._chosen)
        before = set(_SHARED_MEMORY.iterdir())
        start = self._training.start(cut, **({} if cut else {"every_n_train_steps": self._chosen.choice([1, 2, 4])}))
        if kind == TWO_STARTS:
            self._check_second(start)
        left = self._left(before)
        if left:
            self.outcomes["left behind"] += 1
            raise Broken(f"After {kind or 'the end'}, there is left: {left}.\n{start.output}")
        return start

    def _left(self, before: set[Path]) -> list[str]:
        """Return what a start has left behind; what vanishes in a minute is another program's, or a slow watcher's."""
        for _ in range(600):
            left = [path.name for path in set(_SHARED_MEMORY.iterdir()) - before if not path.name.startswith("tests-")]
            left += [f"process {each}" for each in _processes_of(self._training.root)]
            if not left:
                break
            time.sleep(0.1)
        return left

    def _is_refused(self, start: Start) -> bool:
        """Return whether a start says that it can't continue exactly; a full disk keeps our part out of checkpoints."""
        is_announced = "NOT EXACT" in start.output and "full disk" in self._trial.kinds
        names = tuple(f"{kind.__module__}.{kind.__name__}" for kind in (NotExactError, UnsafeCheckpointError))
        refusals = [line for line in start.output.splitlines() if line.startswith(names)]
        if refusals:
            print(f"refused: {self._trial.rows}, {self._trial.num_ranks} ranks: {refusals[0][:300]}", flush=True)
        return is_announced or bool(refusals)

    def _is_finished(self, start: Start) -> bool:
        """Return whether a start, or the second one beside it, has finished the run: the next one would begin again."""
        second = self._second(len(self._training.starts) - 1)
        ends = [*start.events, read(second) if second.exists() else []]
        return any(event["kind"] == "end" for events in ends for event in events)

    def _second(self, number: int) -> Path:
        return self._training.root / f"second-{number}.jsonl"

    def _start_again(self, moment: float) -> None:
        time.sleep(moment)
        path = self._second(len(self._training.starts))
        sys.stderr = sys.stdout = open(path.with_suffix(".txt"), "w")  # noqa: SIM115 - until the end
        self._training.run(path, None, {"every_n_train_steps": 1})

    def _check_second(self, start: Start) -> None:
        """A second start has trained only if the first one has not."""
        events = read(self._second(len(self._training.starts) - 1))
        both = [any(event["kind"] == "trained" for event in each) for each in (events, start.events[0])]
        if all(both) and not _is_after(events, start.events[0]):
            raise Broken(f"Two starts have trained at once.\n{start.output}")
        self.outcomes[REFUSED] += not events


def _is_after(later: list[Event], earlier: list[Event]) -> bool:
    """Return whether all that one start did is after what another did."""
    return bool(later) and (later[0].get("step") or 0) >= (earlier[-1].get("step") or 0)


def _strike(kind: str, ids: list[int], moment: float, chosen: random.Random) -> None:
    time.sleep(moment)
    tree = tree_of(ids)
    if kind == "SIGKILL of all":
        for each in tree:
            signal_to(each, signal.SIGKILL)
    elif kind == "SIGKILL of a process":
        signal_to(chosen.choice(tree), signal.SIGKILL)
    elif kind == "SIGSTOP":
        signal_to(ids[0], signal.SIGSTOP)
        time.sleep(chosen.uniform(0.1, 1.0))
        signal_to(ids[0], signal.SIGCONT)
    else:
        signal_to(chosen.choice(ids), signal.Signals[kind])


def _fill_disk(moment: float) -> None:
    """Let the disk be full from a moment on."""
    full_at, sync = time.monotonic() + moment, os.fsync

    def fsync(descriptor: int) -> None:
        if time.monotonic() > full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = fsync


def _damage(root: Path, chosen: random.Random) -> None:
    """Flip a byte of the newest autosave, if there is one besides it."""
    autosaves = sorted(root.rglob("autosave-*.ckpt"), key=lambda path: path.name)
    if len(autosaves) < 2:
        return
    content = bytearray(autosaves[-1].read_bytes())
    content[chosen.randrange(len(content))] ^= 0xFF
    autosaves[-1].write_bytes(content)


def _processes_of(root: Path) -> list[int]:
    """Return the processes that work in a directory, except this one's."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            if each.readlink() == root and int(each.parent.name) != os.getpid():
                found.append(int(each.parent.name))
    return found


def _in_time(run: Callable[[], None]) -> None:
    """Run something, and raise `TimeoutError` if it hangs."""

    def hung(*_: object) -> None:
        raise TimeoutError(f"It took more than {_HUNG_SECONDS} s.")

    signal.signal(signal.SIGALRM, hung)
    signal.alarm(_HUNG_SECONDS)
    try:
        run()
    finally:
        signal.alarm(0)


def run_trial(trial: Trial, failures: Path) -> Counter[str]:
    """Run a trial; if it fails, keep its directory below `failures`, and print what happened."""
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(trial, root)
    try:
        _in_time(soak.run)
    except (Broken, TimeoutError) as error:
        outcome = "hung" if isinstance(error, TimeoutError) else "wrong"
        soak.outcomes[outcome] += not soak.outcomes["left behind"]
        kept = failures / f"trial-{trial.seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(root, kept, symlinks=True)
        (kept / "trial.json").write_text(json.dumps(asdict(trial)))
        (kept / "error.txt").write_text(str(error))
        print(f"{outcome}: {trial}\n{error}\nTo repeat it: make soak TRIAL={kept}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return soak.outcomes


def table(kinds: dict[str, Counter[str]], num_trials: int) -> str:
    """Return the table of outcomes: in each row the trials that a kind of strike was part of."""
    lines = [f"{num_trials} trials", "| strike | trials | " + " | ".join(OUTCOMES) + " |", "|---" * 7 + "|"]
    for kind, counts in kinds.items():
        cells = [str(counts[name]) for name in ("trials", *OUTCOMES)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run trials until the time is over; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--trials", type=int, default=10**9, help="at most this many")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first trial")
    parser.add_argument("--trial", type=Path, help="the directory of a trial to repeat")
    parser.add_argument("--failures", type=Path, default=Path("soak-failures"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    warm.warm_up()
    all_rows()
    if arguments.trial:
        trials = iter([Trial(**json.loads((arguments.trial / "trial.json").read_text()))])
    else:
        trials = (new_trial(arguments.seed + number) for number in range(arguments.trials))
    end = time.monotonic() + 3600 * arguments.hours
    kinds: dict[str, Counter[str]] = {kind: Counter() for kind in (*KINDS, "all")}
    for trial in trials:
        outcomes = run_trial(trial, arguments.failures)
        for kind in {*trial.kinds, "all"}:
            kinds[kind].update({"trials": 1, **outcomes})
        if time.monotonic() > end:
            break
    print(table(kinds, kinds["all"]["trials"]))
    return int(any(kinds["all"][name] for name in ("wrong", "hung", "left behind")))


if __name__ == "__main__":
    sys.exit(main())

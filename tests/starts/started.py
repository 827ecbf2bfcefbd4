"""Starts the scripts in ``scripts/`` as a user does: as processes, in a project's directory, by the same command."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import python

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
STOPPED = 128 + signal.SIGTERM
NUM_BATCHES = 12
"""The batches of a fit: two epochs with six each."""

Row = dict[str, str]


@dataclass(frozen=True)
class Started:
    """The result of one start of a script."""

    exit_code: int
    output: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def num_batches(self, name: str | None = None) -> int:
        """Return how many training batches it trained (in the fits of that name)."""
        return len(self._of("trained", name))

    def weights(self) -> dict[str, str]:
        """Return the final weights of each fit that finished in this start."""
        return {event["name"]: event["weights"] for event in self._of("finished", None)}

    def first(self, name: str | None = None) -> dict[str, Any]:
        """Return where it began: the step, and the weights before it."""
        begins = self._of("begins", name)
        assert begins, f"it trained no batch:\n{self.output}"
        return begins[0]

    def names(self) -> list[str]:
        """Return the names of the fits that it trained, in order."""
        return list(dict.fromkeys(event["name"] for event in self._of("begins", None)))

    def values(self, name: str) -> list[dict[str, Any]]:
        """Return what the script has recorded about its fits of that name."""
        return self._of("finished", name)

    def lines(self, *parts: str) -> list[str]:
        """Return the lines of its output that contain all the parts."""
        return [line for line in self.output.splitlines() if all(part in line for part in parts)]

    def _of(self, event: str, name: str | None) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event and name in (None, each["name"])]


class Project:
    """A directory with a copy of the scripts, where they are started.

    Args:
        directory: The directory; created if it does not exist.
        environment: Variables for all starts.
        forks: Whether to fork scripts, and the Python processes that they start, from this process, which has
            imported torch and Lightning, instead of starting them as Python does: see `tests.harness.python`. Each
            start may choose for itself.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None, *, forks: bool = True) -> None:
        self.directory = directory
        self._forks = forks
        self.environment = dict(environment or {})
        self._home = directory.parent / "home"
        self._home.mkdir(parents=True, exist_ok=True)
        shutil.copytree(SCRIPTS, directory, ignore=shutil.ignore_patterns("__pycache__"))
        self._records = 0

    def edit(self, script: str, before: str, after: str) -> None:
        """Replace a text in one of the scripts."""
        path = self.directory / script
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))

    def variables(
        self, *, interrupt: str = "", protected: bool = True, sleep: float = 0, **more: str
    ) -> dict[str, str]:
        """Return the environment of one start, with a new record."""
        self._records += 1
        # The script must not see the settings of an outer run.
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("PL_", "SLURM_", "JPY_", "INTERRUPT", "PYTEST_"))
        }
        switch = {"PL_FAULT_TOLERANT_TRAINING": "1"} if protected else {}
        return {
            **inherited,
            **switch,
            "HOME": str(self._home),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RECORD": str(self.directory.parent / f"{self.directory.name}-{self._records}.jsonl"),
            **({"INTERRUPT": interrupt} if interrupt else {}),
            **({"SLEEP": str(sleep)} if sleep else {}),
            **self.environment,
            **more,
        }

    def launch(self, *command: str | Path, cwd: Path | None = None, forks: bool | None = None, **asked: Any) -> Process:
        """Start Python with these arguments, without waiting."""
        words, where, variables = [*map(str, command)], cwd or self.directory, self.variables(**asked)
        kind = Forked if (self._forks if forks is None else forks) else Process
        return kind([sys.executable, *words], where, variables)

    def start(self, *command: str | Path, **asked: Any) -> Started:
        """Start Python with these arguments, and wait for its end."""
        return self.launch(*command, **asked).wait()

    def tool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``lightning-faulttolerant`` where the script was started."""
        command = [sys.executable, "-m", "lightning_faulttolerant", *arguments]
        return subprocess.run(
            command, cwd=self.directory, env=self.variables(), capture_output=True, text=True, check=False
        )

    def rows(self) -> list[Row]:
        """Return the rows of ``metrics.csv``.

        A restart may continue the file of the first start, or begin one in its own directory. So the rows of
        all files count, and of two rows about one step the newer one.
        """
        files = sorted(self.directory.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
        read = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
        rows = {(row["epoch"], row["step"]): row for row in read}
        return [rows[key] for key in sorted(rows, key=lambda key: tuple(map(int, key)))]


class Process:
    """A running script.

    Args:
        command: The command to start.
        cwd: The working directory.
        environment: The environment variables.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._record = Path(environment["RECORD"])
        self._output = self._record.with_suffix(".txt")
        with open(self._output, "w") as output:
            self._popen = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to its group must not reach the test
            )
        self.process_id = self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    def now(self) -> Started:
        """Return what it has done so far."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        code = self._popen.poll()
        return Started(-999 if code is None else code, self._output.read_text(), [json.loads(line) for line in lines])

    def wait(self, timeout_seconds: float = 150) -> Started:
        """Wait for the script's end; like a scheduler, kill the processes it started if they live 10 seconds longer.

        Processes that do nothing for 2 seconds are not waited for any longer.
        """
        try:
            self._popen.wait(timeout_seconds)
            self._wait_for_others()
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the script did not end:\n{self.now().output}") from None
        finally:
            self.kill()
        return self.now()

    def _wait_for_others(self) -> None:
        began = idle_since = time.monotonic()
        before: list[str] = []
        while (living := self._living()) and time.monotonic() - began < 10:
            if (now := [_work(process_id) for process_id in living]) != before or any("S" not in work for work in now):
                before, idle_since = now, time.monotonic()
            if time.monotonic() - idle_since > 2:
                return
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the script and all processes that it has started."""
        while living := self._living():
            for process_id in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            self._popen.poll()
            time.sleep(0.05)
        self._popen.wait()

    def _living(self) -> list[int]:
        """Return the processes that have inherited the name of the record, without zombies."""
        mark = f"RECORD={self._record}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():  # that of a zombie is empty
                    found.append(int(path.parent.name))
        return found


def _work(process_id: int) -> str:
    """Return the state of a process, and the processor time that it has used."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return " ".join([str(process_id), fields[0], *fields[11:13]])
    return ""


class Forked(Process):
    """A script in a process that was forked from this one, as are the processes that it starts."""

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._record = Path(environment["RECORD"])
        self._output = self._record.with_suffix(".txt")
        self._output.touch()
        self._mark = self._record.with_suffix(".open")
        wanted = python.Command(words=command, directory=str(cwd), environment=environment)
        self._popen = python.Popen(wanted, output=self._output, mark=self._mark)
        self.process_id = self._popen.pid

    def _living(self) -> list[int]:
        return [*super()._living(), *python.marked(self._mark)]


@dataclass(frozen=True)
class Plain:
    """The run without the package."""

    started: Started
    rows: list[Row]


@functools.cache
def plain(*command: str, **environment: str) -> Plain:
    """Run a command without the package, in its own directory, once for all tests of this process."""
    with tempfile.TemporaryDirectory() as directory:
        project = Project(Path(directory) / "project")
        started = project.start(*command, protected=False, **environment)
        assert started.exit_code == 0, started.output
        return Plain(started, project.rows())


def continues(before: Started, after: Started, name: str = "fit", *, renamed: str | None = None) -> None:
    """Assert that a start continues the fit of the start before it: it begins in the middle, with the same weights."""
    begins = after.first(renamed or name)
    passed = {event["step"]: event["weights"] for event in before.events if event["name"] == name and "step" in event}
    assert begins["step"] > 0, f"it started over:\n{after.output}"
    assert begins["weights"] == passed[begins["step"]], after.output


def stopped_twice(
    project: Project,
    *command: str | Path,
    steps: tuple[str, str] = ("TERM@4", "TERM@9"),
    code: int = STOPPED,
    is_real: bool = False,
) -> tuple[Started, Started, Started]:
    """Start a command, stop it, start it again, stop it again, and let it finish.

    With `is_real`, the second start, which both resumes and is stopped, is not forked.
    """
    first = project.start(*command, interrupt=steps[0])
    assert first.exit_code == code, first.output
    second = project.start(*command, interrupt=steps[1], forks=not is_real)
    assert second.exit_code == code, second.output
    third = project.start(*command)
    assert third.exit_code == 0, third.output
    return first, second, third


def assert_same_fit(whole: Plain, starts: Sequence[Started], name: str = "fit") -> None:
    """Assert that the starts of a script together form one fit that equals the uninterrupted one."""
    for before, after in itertools.pairwise(starts):
        continues(before, after, name)
    assert starts[-1].weights()[name] == whole.started.weights()[name]
    assert starts[-1].num_batches(name) < whole.started.num_batches(name)


def assert_interrupted(started: Started, num_batches: int | range, name: str = "fit") -> None:
    """Assert that a start failed after this number of batches of a fit, and not earlier for another reason."""
    assert started.exit_code != 0
    expected = range(num_batches, num_batches + 1) if isinstance(num_batches, int) else num_batches
    assert started.num_batches(name) in expected, started.output


def assert_starts_over(started: Started, num_batches: int = NUM_BATCHES, name: str = "fit") -> None:
    """Assert that a start trained a fit from the beginning to the end."""
    assert started.exit_code == 0, started.output
    assert started.first(name)["step"] == 0, started.output
    assert started.num_batches(name) == num_batches, started.output


def run_names(project: Project) -> list[str]:
    """Return the names of the runs with autosaves: ``<dirpath>/<run_id>/fit-<n>/autosave-*.ckpt``."""
    found = project.directory.parent.rglob("fit-*/autosave-*.ckpt")
    return sorted({path.parents[1].name for path in found})


def num_saved(project: Project) -> int:
    """Return how many fits have an autosave from after their start."""
    found = project.directory.parent.rglob("fit-*/autosave-*.ckpt")
    return len({path.parent for path in found if "epoch=0-batch=0" not in path.name})

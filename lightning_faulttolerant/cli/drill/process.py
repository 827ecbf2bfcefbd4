"""One start of the user's command in a drill, with everything that it starts, and its ledger read while it runs.

Launchers, ranks, and loader workers belong to it even if they left its process group. The settings of the drill say
which commands and environments follow.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from lightning_faulttolerant.cli.drill.ledgers import FIT, STEPS, VALIDATION, Place, Resumption, place_of, resumption_of
from lightning_faulttolerant.processes import parents_and_states, send_signal, with_children
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line, each_line, parse_lines

KILL = "KILL"
TERM = "TERM"
EXCEPTION = "exception"
KINDS = (KILL, TERM, EXCEPTION)

_SWITCH_VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
_RUN_ID_VARIABLE = "PL_FAULT_TOLERANT_RUN_ID"
_RUN = "{run}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrikePlan:
    """What a process has to do for its coming strikes.

    Args:
        faults: The places where it raises an exception: the first one, then one more each time that a launcher in it
            restarts its ranks.
        saves: The batches before which it saves.
        hold: The batch before which it waits for its strike, if any.
    """

    faults: tuple[ledger.FaultPlace, ...] = ()
    saves: tuple[ledger.BatchPlace, ...] = ()
    hold: ledger.BatchPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillSettings:
    """The settings of a drill.

    Args:
        command: The user's own command, in words.
        num_strikes: Number of strikes.
        kind: ``KILL``, ``TERM`` or ``exception``.
        stages: What is struck, of `STAGES`: all that the script reaches if empty.
        at: Batches of these stages, or of training if there are none, to strike; counted over the whole run, from 0.
            Random ones if empty.
        is_checked: Whether the script runs uninterrupted twice.
        ignored: Patterns of names of logged values that are not compared.
        seed: Seed of the moments of the strikes.
        timeout_seconds: Time limit of each run; None for no limit.
        directory: Directory for ledgers and outputs.
        token: A name that is unique to this drill.
    """

    command: tuple[str, ...]
    num_strikes: int = 5
    kind: str = KILL
    stages: tuple[str, ...] = ()
    at: tuple[int, ...] = ()
    is_checked: bool = False
    ignored: tuple[str, ...] = ()
    seed: int = 0
    timeout_seconds: float | None = None
    directory: Path
    token: str

    def run_id(self, run: str) -> str:
        """Return the prefix of the run ids of one of the drill's runs. It keeps the user's existing runs untouched."""
        return f"drill-{self.token}-{run}"

    def words(self, run: str) -> tuple[str, ...]:
        """Return the command of one of the drill's runs."""
        return tuple(word.replace(_RUN, run) for word in self.command)

    def environment(self, run: str, given: Mapping[str, str], *, ledger_path: Path, plan: StrikePlan) -> dict[str, str]:
        """Return the environment variables of a process.

        Args:
            run: Name of the run that the process belongs to.
            given: Environment variables of the drill.
            ledger_path: Path of the process's ledger.
            plan: What the process has to do for its strikes.
        """
        asked = {
            ledger.FAULT_VARIABLE: ",".join(map(str, plan.faults)),
            ledger.SAVE_VARIABLE: ledger.places_text(plan.saves),
            ledger.HOLD_VARIABLE: ledger.places_text([plan.hold] if plan.hold is not None else []),
        }
        variables = {name: value for name, value in given.items() if name not in asked}
        variables.update({name: text for name, text in asked.items() if text})
        if not variables.get(_SWITCH_VARIABLE):  # the variable adds nothing if the script has the callback
            variables[_SWITCH_VARIABLE] = "1"
        variables[_RUN_ID_VARIABLE] = self.run_id(run)
        variables[ledger.LEDGER_VARIABLE] = str(ledger_path)
        return variables


_PROCESSES = Path("/proc")


@final
class ProcessTree:
    """One start of a command, as the leader of its own session: a Ctrl-C at the drill does not reach it.

    Args:
        command: Words of the command.
        environment: The complete environment.
        token: A unique text that is put into the environment.
        output: A file for everything that the command prints.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], token: str, output: Path) -> None:
        self._command = list(command)
        self._environment = {**environment, ledger.DRILL_VARIABLE: token}
        self._token = token
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command. If the start is interrupted, the command may be running; `close` ends it then too.

        Raises:
            OSError: If it can't be started.
        """
        with self._output.open("ab") as file:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the started process: negative for a signal, None before the start and while it is alive."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Ask the started process to end, as a scheduler does. A launcher passes the signal on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes together, like a machine that goes away: no process sees another one die."""
        stopped: set[int] = set()
        while True:  # a stopped process starts no others
            found = self._alive() - stopped
            if not found:
                break
            for process_id in found:
                send_signal(process_id, signal.SIGSTOP)
            stopped |= found
        for process_id in stopped:
            send_signal(process_id, signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, *, patience_seconds: float = 10.0) -> None:
        """Kill the remaining processes, and wait until none is left.

        Args:
            patience_seconds: How long to wait for processes that are being killed.
        """
        deadline = time.monotonic() + patience_seconds
        self.kill()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_seconds)
        while self._alive() and time.monotonic() < deadline:
            self.kill()
            time.sleep(0.01)

    def _alive(self) -> set[int]:
        """Return the ids of all processes that belong to the command and are not zombies."""
        started = {self._process.pid} if self._process is not None and self.exit_code is None else set()
        if not _PROCESSES.is_dir():
            return _by_ps(started)
        parents, states = parents_and_states()
        own = {process_id for process_id in parents if _has_token(process_id, self._token)} | started
        return {process_id for process_id in with_children(own, parents) if states.get(process_id, "Z") not in "ZX"}


def _has_token(process_id: int, token: str) -> bool:
    try:
        variables = (_PROCESSES / str(process_id) / "environ").read_bytes()
    except OSError:  # gone, or owned by another user
        return False
    return f"{ledger.DRILL_VARIABLE}={token}".encode() in variables.split(b"\0")


def _by_ps(process_ids: set[int]) -> set[int]:
    """Return processes and their descendants on systems without ``/proc``."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    pairs = (line.split() for line in listed.splitlines())
    return with_children(process_ids, {int(child): int(parent) for child, parent in pairs})


_RANK = re.compile(r"\.rank-(\d+)$")
_TAIL_BYTES = 20_000


@final
@dataclass(kw_only=True, slots=True)
class ProcessProgress:
    """The progress of one process, from the lines that its rank 0 has written so far.

    Args:
        number: Number of the process in its run, from 0.
    """

    number: int
    resumed: list[Resumption] = field(default_factory=list)
    """The places where fits continued before the first batch."""
    autosaves: list[Place] = field(default_factory=list)
    autosaves_before: list[Place] = field(default_factory=list)
    """The autosaves before the last restart by a launcher or before the end of the process."""
    last_saved: Place | None = None
    """The furthest of the autosaves."""
    done: Place | None = None
    """The place of rank 0's last batch, of training or of an evaluation."""
    num_batches: int = 0
    """Batches so far, of training and of evaluations."""
    num_trained: int = 0
    num_expected: int | None = None
    """Batches until the current fit is over, if it does not end before its last epoch."""
    evaluating: str = ""
    """The evaluation in progress and its finished batches, in words; empty while the process trains."""
    last_ended: int = 0
    """Number of the last fit or evaluation that finished."""
    num_restarts: int = 0
    """How often a launcher in the process restarted its ranks."""
    _trained: list[Place] = field(default_factory=list)
    _function: str = FIT
    _last_fit: int = 0
    _process_id: int | None = None
    _batch_times: tuple[float, float] | None = None

    def take(self, line: Line) -> None:
        """Note one more line."""
        kind, fit = line.get("event"), int(line.get("fit", 1))
        if kind == ledger.FIT:
            self._begin(line.get("pid"), fit)
            sizes = (line.get("num_batches"), line.get("max_epochs"))
            counts = [size for size in sizes if isinstance(size, int) and size > 0]
            self._function, self.evaluating = str(line.get("function", FIT)), ""
            if self._function == FIT:
                self.num_expected = self.num_trained + counts[0] * counts[1] if len(counts) == len(sizes) else None
        elif kind in STEPS:
            at = float(line.get("time", 0.0))
            self._batch_times = (self._batch_times[0] if self._batch_times is not None else at, at)
            self.done = place_of(line)
            self.num_batches += 1
            self._note_stage(kind, self.done)
        elif kind == ledger.END:
            self.last_ended = max(self.last_ended, fit)
        elif kind == ledger.AUTOSAVE:
            place = place_of(line)
            self.autosaves.append(place)
            self.last_saved = max(place, self.last_saved or place)
        elif kind == ledger.RESUMED and not self.num_batches:
            self.resumed.append(resumption_of(self.number, line))

    def _note_stage(self, kind: str, done: Place) -> None:
        if kind == ledger.EVALUATED:
            name = VALIDATION if self._function == FIT else self._function
            self.evaluating = f"{name} batch {done[3]:,}"
        else:
            self.evaluating = ""
            self.num_trained += 1
            self._trained.append(done)

    def _begin(self, process_id: int | None, fit: int) -> None:
        """Note that a fit begins: the next fit, or the same fit again if a launcher restarted the ranks."""
        is_again = fit <= self._last_fit
        self._last_fit = fit
        if is_again and self._process_id not in (None, process_id):
            self.num_restarts += 1
            self.autosaves_before = list(self.autosaves)
            self.resumed, self.num_batches, self.num_trained, self._batch_times = [], 0, 0, None
        self._process_id = process_id

    def num_trained_before(self, place: Place) -> int:
        """Return the number of training batches that this process has done before a place."""
        return bisect.bisect_right(self._trained, place)

    @property
    def has_begun(self) -> bool:
        """Whether a fit has begun in the process."""
        return self._process_id is not None

    @property
    def batches_per_second(self) -> float | None:
        """The training speed; None before the second batch."""
        if self._batch_times is None or self._batch_times[1] <= self._batch_times[0]:
            return None
        return (self.num_batches - 1) / (self._batch_times[1] - self._batch_times[0])


@final
class DrillProcess:
    """One process of one of the drill's runs, with everything that it starts.

    Args:
        settings: Settings of the drill.
        run: Name of the run.
        number: Number of the process in its run, from 0.
        environment: Environment variables of the drill.
        plan: What the process has to do for its strikes.
        follow: Called with each line that is read while the process runs.
    """

    def __init__(
        self,
        settings: DrillSettings,
        run: str,
        number: int,
        *,
        environment: Mapping[str, str] = os.environ,
        plan: StrikePlan | None = None,
        follow: Callable[[Line], None] | None = None,
    ) -> None:
        directory = settings.directory / run
        directory.mkdir(parents=True, exist_ok=True)
        self.number = number
        self.plan = plan or StrikePlan()
        """The places where the process raises an exception, and the batches before which it saves."""
        self.output = directory / f"process-{number}.log"
        self.ledger = directory / f"process-{number}.jsonl"
        self.began = time.time()
        self.seconds: float | None = None
        """Time from the start to the end of the process, or to the strike."""
        self.progress = ProcessProgress(number=number)
        self.last_line_at = time.monotonic()
        self._follow = follow
        self._offset = 0
        self._tree = ProcessTree(
            settings.words(run),
            environment=settings.environment(run, environment, ledger_path=self.ledger, plan=self.plan),
            token=f"{settings.run_id(run)}-{number}",
            output=self.output,
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code: negative for a signal, None while the process is alive."""
        code = self._tree.exit_code
        if code is not None and self.seconds is None:
            self.seconds = time.time() - self.began
        return code

    def read(self) -> None:
        """Read the lines that rank 0 has written since the last call."""
        try:
            with self.ledger.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in parse_lines(whole):
            self.last_line_at = time.monotonic()
            self.progress.take(line)
            if self._follow is not None:
                self._follow(line)

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: If it can't be started.
        """
        self.began = time.time()
        self.last_line_at = time.monotonic()
        self._tree.start()

    def terminate(self) -> None:
        """Ask the process to end."""
        self.seconds = time.time() - self.began
        self._tree.terminate()

    def kill(self) -> None:
        """End the process and everything that it started, without delay."""
        self.progress.autosaves_before = list(self.progress.autosaves)
        if self.seconds is None:
            self.seconds = time.time() - self.began
        self._tree.close()

    def lines(self) -> dict[int, Iterable[Line]]:
        """Return the lines of each rank, by rank. They are read lazily."""
        paths = {0: self.ledger}
        for path in self.ledger.parent.glob(f"{self.ledger.name}.rank-*"):
            found = _RANK.search(path.name)
            if found is not None:
                paths[int(found[1])] = path
        return {rank: each_line(path) for rank, path in sorted(paths.items())}

    def tail(self, num_lines: int = 20) -> list[str]:
        """Return the end of the process's output."""
        return tail_of(self.output, num_lines)


def tail_of(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a file, with each progress bar in its final state.

    Args:
        path: The file.
        num_lines: Number of lines.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-num_lines:]

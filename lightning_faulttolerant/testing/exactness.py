"""Holds your own model and loaders to the law: interrupted and resumed equals uninterrupted, event by event.

Needs a system that can fork (not Windows): each run is a process of its own, and they all start from this one, which
has imported everything.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.checkpoint.atomic import atomic_torch_save
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.trainer.callback import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt, Recorder, record_end

__all__ = ["Interruption", "KillAt", "NotTheSame", "assert_resumes_exactly"]

# Gets callbacks and a directory, gives the Trainer: this module does not import Lightning.
Fit = Callable[[list[Any], Path], Any]
Event = dict[str, Any]

_SEED = 1
_OTHER_SEED = 20_000
_PLACES = {"boundary": "batch", "validation": "validation"}


class NotTheSame(AssertionError):  # noqa: N818 - reads as what it says
    """An interrupted run, resumed, did not do what the uninterrupted one did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    """What one interruption cost.

    Args:
        exit_code: Of the process that was interrupted; negative for a signal that killed it.
        epoch: Where the next process went on.
        batch: Where in the epoch.
        num_batches_twice: How many training batches were done before and again after the interruption.
        num_batches_kept: How many were done before and not again.
    """

    exit_code: int
    epoch: int
    batch: int
    num_batches_twice: int
    num_batches_kept: int


def assert_resumes_exactly(
    fit: Fit,
    faults: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    without: str | None = None,
    directory: Path | None = None,
    may_begin_anew: bool = False,
    timeout_seconds: float = 120.0,
) -> list[Interruption]:
    """Run `fit` uninterrupted, then with `faults`, and compare the two.

    Compared are the contents of every batch, losses, learning rates, every value that a logger receives with its step,
    every validation batch and result, the final weights and optimizer states, the next draw of each global generator,
    and the states of those that the module and the loaders hold. The uninterrupted run has no callback, but with
    ``worker_rng="per_sample"``: without it nothing seeds each sample.

    Args:
        fit: Gets callbacks and a directory; builds data, model and ``Trainer(callbacks=..., default_root_dir=...)``,
            calls ``fit`` and returns the trainer. It must not seed: each process is seeded differently before it is
            called, but for the first, whose seed the uninterrupted run has too.
        faults: One for each process that is to be interrupted: a callback, such as `KillAt`, or several.
        options: Arguments of `FaultTolerance`.
        without: A part of the state to leave out of what is resumed from (see ``PARTS``): a negative control.
        directory: Where the runs are kept; a temporary one by default.
        may_begin_anew: Whether a process may begin from the beginning.
        timeout_seconds: For each process.

    Returns:
        What each interruption cost.

    Raises:
        NotTheSame: If the runs differ; it names the first event that does.

    Example::

        def fit(callbacks, directory):
            trainer = Trainer(callbacks=callbacks, default_root_dir=directory, max_epochs=2)
            trainer.fit(MyModel(), my_loader())
            return trainer

        assert_resumes_exactly(fit, [KillAt(5), KillAt(3)], options={"every_n_train_steps": 1})
    """
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        root = Path(temporary)
        runs = _Runs(fit, root, dict(options or {}), timeout_seconds)
        is_per_sample = (options or {}).get("worker_rng") == "per_sample"
        reference = runs.start("uninterrupted", [], seed=_SEED, with_callback=is_per_sample)
        if reference.exit_code != 0:
            raise NotTheSame(f"The uninterrupted run ended with exit code {reference.exit_code}.\n{reference.output}")
        transparent = runs.start("with-callback", [], seed=_SEED, with_callback=True)
        if transparent.exit_code != 0:
            raise NotTheSame(
                f"With the callback it ended with exit code {transparent.exit_code}.\n{transparent.output}"
            )
        _compare(reference.events, transparent.events, "the uninterrupted run with the callback")
        interrupted = _Interrupted(runs, reference.events, may_begin_anew=may_begin_anew, without=without)
        for fault in faults:
            interrupted.interrupt(fault)
        return interrupted.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trace:
    exit_code: int
    events: list[Event]
    resumed: Event | None
    output: str


class _Runs:
    """Starts processes that all begin alike."""

    def __init__(self, fit: Fit, root: Path, options: dict[str, Any], timeout_seconds: float) -> None:
        self._fit = fit
        self._root = root
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._num_started = 0

    def start(
        self, name: str, faults: Sequence[Any], *, seed: int, with_callback: bool, options: Mapping[str, Any] = {}
    ) -> _Trace:
        self._num_started += 1
        directory = self._root / name
        directory.mkdir(exist_ok=True)
        path = self._root / f"{name}-{self._num_started}.jsonl"
        path.touch()
        kept = {**self._options, **options} if with_callback else None
        main = functools.partial(self._run, path, directory, faults, kept)
        process_id = fork_and_run(main, output=path.with_suffix(".txt"), seed=seed)
        exit_code = self._wait(process_id)
        events = [json.loads(line) for line in path.read_text().splitlines()]
        resumed = [event for event in events if event["event"] == "resumed"]
        return _Trace(
            exit_code=exit_code,
            events=[event for event in events if event["event"] != "resumed"],
            resumed=resumed[0] if resumed else None,
            output=path.with_suffix(".txt").read_text()[-4000:],
        )

    def autosaves(self, name: str) -> list[Path]:
        return sorted((self._root / name).rglob("autosave-*.ckpt"))

    def _run(self, path: Path, directory: Path, faults: Sequence[Any], options: dict[str, Any] | None) -> None:
        recorder = Recorder(path)
        callbacks: list[Any] = [] if options is None else [FaultTolerance(**options)]
        trainer = self._fit([*callbacks, recorder, *faults], directory)
        record_end(recorder, trainer, _next_draws())

    def _wait(self, process_id: int) -> int:
        deadline = time.monotonic() + self._timeout_seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(process_id, os.WNOHANG)
            if done:
                _kill_group(process_id)  # workers that outlive a killed process
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        _kill_group(process_id)
        os.waitpid(process_id, 0)
        raise NotTheSame(f"A run did not end within {self._timeout_seconds:g} seconds.")


def fork_and_run(main: Callable[[], Any], *, output: Path, seed: int) -> int:
    """Run `main` in a forked process, leader of a group of its own; return the process id.

    Args:
        main: What to run; ``SystemExit`` and other exceptions give the exit code that a script would have.
        output: A file for all that it prints.
        seed: For the generators of Python, NumPy and torch.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process_id = os.fork()
    if process_id:
        return process_id
    code = 1
    # What the parent has left over is not to be collected here: a finalizer may wait for a thread that was not forked.
    gc.freeze()
    try:
        os.setsid()
        _print_to(output)
        _seed_everything(seed)
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever ends a run is its outcome
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_to(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # A test runner may have put objects of its own here, and loggers have kept the streams of their time.
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    logging.getLogger("lightning_faulttolerant").addHandler(logging.StreamHandler())


class _Interrupted:
    """One run that is interrupted again and again, and what all its processes did together."""

    def __init__(self, runs: _Runs, reference: list[Event], *, may_begin_anew: bool, without: str | None) -> None:
        self._runs = runs
        self._reference = reference
        self._may_begin_anew = may_begin_anew
        self._without = without
        self._events: list[Event] = []
        self._costs: list[Interruption] = []
        self._last: _Trace | None = None

    def interrupt(self, fault: Any) -> None:
        faults = list(fault) if isinstance(fault, Sequence) else [fault]
        trace = self._start(faults)
        if trace.exit_code == 0:
            raise NotTheSame(f"A run that was to be interrupted came to its end.\n{trace.output}")

    def finish(self) -> list[Interruption]:
        trace = self._start([])
        if trace.exit_code != 0:
            raise NotTheSame(f"The last run ended with exit code {trace.exit_code}.\n{trace.output}")
        _compare(self._reference, self._events, "the interrupted run")
        return self._costs

    def _start(self, faults: list[Any]) -> _Trace:
        is_first = self._last is None
        options: dict[str, Any] = {}
        if self._without is not None and not is_first:
            options["strict"] = False
            for path in self._runs.autosaves("interrupted"):
                _leave_out(path, self._without)
        seed = _SEED if is_first else _OTHER_SEED + len(self._costs)
        trace = self._runs.start("interrupted", faults, seed=seed, with_callback=True, options=options)
        if self._last is not None:
            self._join(self._last, trace)
        self._events += trace.events
        self._last = trace
        return trace

    def _join(self, last: _Trace, trace: _Trace) -> None:
        resumed = trace.resumed
        if resumed is None and (trace.exit_code != 0 or not self._may_begin_anew):
            raise NotTheSame(f"A restart began from the beginning, or ended before it could go on.\n{trace.output}")
        epoch, batch = (0, 0) if resumed is None else (resumed["epoch"], resumed["batch"])
        if (epoch, batch) == (0, 0) and not self._may_begin_anew:
            raise NotTheSame("A restart began from the beginning.")
        place = "validation" if resumed is not None and "validation" in resumed["text"] else "batch"
        kept = _before(self._events, place, epoch, batch)
        again = [event for event in self._events[len(kept) :] if event["event"] == "batch"]
        num_kept = sum(event["event"] == "batch" for event in kept)
        self._events = kept
        self._costs.append(
            Interruption(
                exit_code=last.exit_code,
                epoch=epoch,
                batch=batch,
                num_batches_twice=len(again),
                num_batches_kept=num_kept,
            )
        )


def _before(events: list[Event], place: str, epoch: int, batch: int) -> list[Event]:
    """Return the events up to a position."""
    for i, event in enumerate(events):
        if event["event"] == place and (event["epoch"], event["batch"]) == (epoch, batch):
            return events[:i]
    return list(events)


def _compare(expected: list[Event], found: list[Event], what: str) -> None:
    for i, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            before = "\n".join(f"  both:     {json.dumps(event)}" for event in expected[max(0, i - 2) : i])
            differs = f"  expected: {json.dumps(one)}\n  found:    {json.dumps(other)}"
            raise NotTheSame(f"Event {i} of {what} differs.\n{before}\n{differs}")
    if len(expected) != len(found):
        longer, name = (expected, "is missing in") if len(expected) > len(found) else (found, "is too many in")
        event = json.dumps(longer[min(len(expected), len(found))])
        raise NotTheSame(f"Event {min(len(expected), len(found))} {name} {what}: {event}")


def _leave_out(path: Path, part: str) -> None:
    checkpoint = load_file(path)
    for rank in checkpoint["lightning_faulttolerant"]["ranks"]:
        rank.pop(part, None)
    atomic_torch_save(checkpoint, path)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _next_draws() -> dict[str, str]:
    draws = {"python": [random.gauss(0, 1).hex(), random.random().hex()], "torch": torch.rand(2).tolist()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        draws["numpy"] = [float(numpy.random.randn()).hex(), float(numpy.random.rand()).hex()]
    return {name: str(values) for name, values in draws.items()}


def _kill_group(process_id: int) -> None:
    try:
        os.killpg(process_id, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return

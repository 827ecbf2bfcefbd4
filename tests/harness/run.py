"""Run the suite: ``python -m tests.harness.run -j 2 -m "not slow"``; other arguments are pytest's.

Each file of tests runs in its own process. The process is forked from this one, which has imported torch, Lightning,
and the package, but no tests. This keeps the processes that the laws fork small: with all tests in memory, a run takes
half as long again. Long files come first (`tests/durations.json`), so that none is left for the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.harness import durations, places, servers, warm

ROOT = Path(__file__).parent.parent.parent
_NO_TESTS = 5  # pytest's exit code
_PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin", "syrupy")
_IMPORTED = (
    *_PLUGINS,
    "hypothesis.strategies",
    "lightning_faulttolerant.cli",
    "lightning_faulttolerant.samplers",
    "lightning_faulttolerant.streaming",
    "lightning_faulttolerant.testing.exactness",
    # Lightning and torch import these lazily, so that each run would import them again.
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "s3fs",  # imported by each ModelCheckpoint and logger: half a second
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)
SHARED = {"tests/laws/test_resume.py": 4, "tests/laws/test_controls.py": 4}
"""How many processes share the tests of a long file."""
_KINDS = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")


@dataclass(kw_only=True, slots=True)
class FileRun:
    """The process that runs a file.

    Args:
        file: Relative to `ROOT`, with the requested tests in it.
        directory: Directory for its report, its output, and its temporary files.
    """

    file: str
    arguments: list[str]
    directory: Path
    process_id: int = 0
    began: float = field(default_factory=time.monotonic)

    def start(self, options: list[str]) -> None:
        self.directory.mkdir()
        self.process_id = os.fork()
        if self.process_id == 0:
            code = 1
            try:
                code = _run_here(self, options)
            except BaseException:  # noqa: BLE001 - the waiting process reports it
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    @property
    def output(self) -> str:
        path = self.directory / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def report(self) -> durations.Report | None:
        """The report on its tests; ``None`` if the process did not finish."""
        path = self.directory / "report.json"
        return durations.Report(**json.loads(path.read_text())) if path.exists() else None


def _run_here(run: FileRun, options: list[str]) -> int:
    """Run a file in this process, which was forked for it, and return pytest's exit code."""
    os.setpgid(0, 0)
    # A spawned worker imports the main module first. This module would take as long as the rest of the worker's run.
    this = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    this.__name__ = "tests.harness.run"  # its functions are running, so their globals must stay those of a module
    sys.modules[this.__name__] = this
    sys.argv = ["pytest"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of other packages' dependencies: a second per file
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(run.directory / "output.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, descriptor), (2, descriptor)):
        os.dup2(source, target)
    sys.stdin = open(0)  # noqa: SIM115 - until the end
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1)  # noqa: SIM115 - until the end
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1)  # noqa: SIM115 - until the end
    reporter = durations.Reporter(run.directory / "report.json")
    arguments = [f"--basetemp={run.directory / 'tmp'}", "-p", "no:cacheprovider", *options, *run.arguments]
    try:
        return int(pytest.main(arguments, plugins=[reporter, *(importlib.import_module(name) for name in _PLUGINS)]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Suite:
    """All requested files, some of them at a time.

    Args:
        num_jobs: Number of files at a time.
        options: pytest's options, for each file; with ``-x`` the first failure ends everything.
        directory: Directory for the files of its processes.
    """

    def __init__(self, *, num_jobs: int, options: list[str], directory: Path) -> None:
        self._num_jobs = num_jobs
        self._options = options
        self._stops_at_failure = not {"-x", "--exitfirst"}.isdisjoint(options)
        self._directory = directory
        self._running: list[FileRun] = []
        self.reports: dict[str, durations.Report] = {}
        self.failures: dict[str, str] = {}
        """The files that failed, with all their output."""

    def run(self, files: dict[str, list[str]]) -> None:
        """Run the files in this order."""
        try:
            # Not a `for` loop: a `for` line that leads to a fit means that its script runs several fits.
            waiting = list(enumerate(files.items()))[::-1]
            while waiting:
                number, (file, arguments) = waiting.pop()
                while len(self._running) == self._num_jobs:
                    self._wait()
                if self._has_to_stop():
                    return
                run = FileRun(file=file, arguments=arguments, directory=self._directory / str(number))
                run.start(self._options)
                self._running.append(run)
            while self._running and not self._has_to_stop():
                self._wait()
        finally:
            for run in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.process_id, signal.SIGKILL)

    def _has_to_stop(self) -> bool:
        return self._stops_at_failure and bool(self.failures)

    def _wait(self) -> None:
        process_id, status, usage = os.wait4(-1, 0)
        for run in [run for run in self._running if run.process_id == process_id]:
            self._running.remove(run)
            self._note(run, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
            shutil.rmtree(run.directory, ignore_errors=True)

    def _note(self, run: FileRun, exit_code: int, processor_seconds: float) -> None:
        report, seconds = run.report, time.monotonic() - run.began
        # pytest writes a report even if a file has no tests, so a missing report is always a failure.
        if report is None or (not report.outcomes and exit_code not in (0, _NO_TESTS)):
            print(f"{run.file}: ended with exit code {exit_code}, after {seconds:.0f} s", flush=True)
            self.failures[run.file] = run.output
            self.reports[run.file] = durations.Report(outcomes={"error": 1}, seconds=seconds)
            return
        if not report.outcomes:
            return
        report.processor_seconds = processor_seconds
        self.reports[run.file] = report
        used = f"{processor_seconds:.1f} s of processor time"
        print(f"{run.file}: {describe(report.outcomes)} in {seconds:.1f} s ({used})", flush=True)
        if exit_code not in (0, _NO_TESTS):
            print("".join(f"    not passed: {nodeid}\n" for nodeid in report.not_passed), end="", flush=True)
            self.failures[run.file] = run.output


def describe(outcomes: dict[str, int]) -> str:
    """Return the numbers of tests in pytest's form."""
    names = {"error": "errors"}
    counts = [f"{outcomes[kind]} {names.get(kind, kind)}" for kind in _KINDS if outcomes.get(kind)]
    return ", ".join(counts) or "no tests ran"


def find_files(paths: list[str], *, are_shared: bool = True) -> dict[str, list[str]]:
    """Return the test files below these paths, each with the arguments that select its tests.

    Args:
        paths: Files, directories, and tests.
        are_shared: Whether several processes share a long file.
    """
    files: dict[str, list[str]] = {}
    for argument in paths or ["tests"]:
        path = ROOT / argument.partition("::")[0]
        if not path.exists():
            raise SystemExit(f"There is no {argument}.")
        if path.is_dir():
            found = sorted(path.rglob("test_*.py"))
            files |= {str(file.relative_to(ROOT)): [str(file.relative_to(ROOT))] for file in found}
        else:
            files.setdefault(str(path.relative_to(ROOT)), []).append(argument)
    shares = [_shares(file, arguments) if are_shared else {file: arguments} for file, arguments in files.items()]
    return {name: found for each in shares for name, found in each.items()}


def _shares(file: str, arguments: list[str]) -> dict[str, list[str]]:
    """Return a name and arguments for each process that runs a share of a file: one, but for the files of `SHARED`."""
    num_shares = SHARED.get(file, 1) if arguments == [file] else 1
    if num_shares == 1:
        return {file: arguments}
    return {f"{file} {i + 1}/{num_shares}": [file, f"--part={i}/{num_shares}"] for i in range(num_shares)}


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Create the directory of this run, in memory if there is room, and remove it at the end."""
    directory = places.make_directory()
    servers.share_servers(directory)
    try:
        yield directory
    finally:
        servers.stop_servers(directory)
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Run the suite; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many files at a time")
    parser.add_argument("-m", dest="mark", default="", help="as pytest's")
    parser.add_argument("--record-durations", action="store_true", help="write tests/durations.json")
    arguments, rest = parser.parse_known_args()
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all processes are ended
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    paths = [argument for argument in rest if Path(argument).parts[:1] == ("tests",)]
    options = [argument for argument in rest if argument not in paths]
    options += ["-m", arguments.mark] if arguments.mark else []
    files = find_files(paths, are_shared=not {"--part", "--one-of-each-law"} & {*rest})
    kind = "slow" if arguments.mark == "slow" else "fast"
    with _directory() as directory:
        _get_ready()
        suite = Suite(num_jobs=arguments.jobs, options=options, directory=directory)
        suite.run({file: files[file] for file in durations.longest_first(files, kind)})
    if arguments.record_durations:
        durations.record(suite.reports, kind)
    _print_summary(suite, time.monotonic() - began)
    return 1 if suite.failures else 0 if suite.reports else _NO_TESTS


def _get_ready() -> None:
    """Import the modules that most tests need, and warm them up."""
    for name in _IMPORTED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        warm.warm_up()
    warm.settle_memory()


def _print_summary(suite: Suite, seconds: float) -> None:
    for output in suite.failures.values():
        print(f"\n{output}")
    slowest = sorted(suite.reports.items(), key=lambda item: -item[1].processor_seconds)[:10]
    if seconds > 60:
        print("\nslowest files, with their processor time:")
        lines = [f"{each.seconds:8.1f} s  {file} ({each.processor_seconds:.1f} s)\n" for file, each in slowest]
        print("".join(lines))
    total: Counter[str] = Counter()
    for report in suite.reports.values():
        total.update(report.outcomes)
    print(f"processor time: {sum(report.processor_seconds for report in suite.reports.values()):.0f} s")
    print(f"=== {describe(total)} in {seconds:.2f}s ===")


if __name__ == "__main__":
    sys.exit(main())

"""Run scripts from a process that has imported Lightning's dependencies, but neither Lightning nor this package.

So a script still decides which of the packages is imported, and when. ``python -m tests.harness.bare`` reads one start
from each line of its input, and answers with the exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness import python

ROOT = Path(__file__).parents[2]
_SCRIPTS_OWN = frozenset({"lightning", "lightning_fabric", "lightning_faulttolerant", "pytorch_lightning"})
_ALL = "import sys, lightning.pytorch, pytorch_lightning, lightning_faulttolerant; print(*sys.modules)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The result of a script: its exit code and its output."""

    exit_code: int
    output: str

    def line(self, word: str) -> str:
        """Return the first line that begins with a word."""
        return next(line for line in self.output.splitlines() if line.startswith(word))


class Starter:
    """The process that forks the scripts.

    Args:
        server: The `subprocess` object of that process.
    """

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def start(self, script: Path, **environment: str) -> Started:
        """Run a script in its directory to its end, with additional environment variables."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            variables = {**outer_variables(), **environment}
            asked = {"script": str(script), "environment": variables, "output": output.name}
            print(json.dumps(asked), file=self._server.stdin, flush=True)
            code = self._server.stdout.readline()
            assert code, f"{script} can't be started"
            return Started(exit_code=int(code), output=output.read())


@contextlib.contextmanager
def starter() -> Iterator[Starter]:
    """Yield the process that forks the scripts, and end it afterwards."""
    command = [sys.executable, "-m", "tests.harness.bare"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as server:
        yield Starter(server)


def outer_variables() -> dict[str, str]:
    """Return the environment variables of a script, without those of an outer run or of pytest."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST_"))}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _import_what_lightning_needs() -> None:
    listed = subprocess.run([sys.executable, "-c", _ALL], capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        if name.partition(".")[0] not in {*_SCRIPTS_OWN, "__main__"}:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> None:
    """Run the requested scripts."""
    _import_what_lightning_needs()
    for line in sys.stdin:
        asked = json.loads(line)
        script = Path(asked["script"])
        command = python.Command(
            words=[sys.executable, script.name], directory=str(script.parent), environment=asked["environment"]
        )
        with tempfile.NamedTemporaryFile() as mark:
            process = python.Popen(command, output=Path(asked["output"]), mark=Path(mark.name))
            print(process.wait(), flush=True)


if __name__ == "__main__":
    main()

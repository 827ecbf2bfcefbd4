"""Starts scripts from the documentation of libraries, unchanged, protected by the environment variable alone.

They run in ``.venv-libraries`` (``make libraries``). Each start is forked from a process that has imported the
libraries.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-libraries" / "bin" / "python"
PROTECTED = {"PL_FAULT_TOLERANT_TRAINING": "1"}
IMPORTED_FROM = f"{HERE / 'environment'}{os.pathsep}{ROOT}"
"""``PYTHONPATH`` of the scripts."""
_RESULTS = frozenset({"elbo", "forecast", "history", "latent", "loss", "metrics", "params", "prediction", "predictions",
                      "results", "weights", "LSTM", "NHITS"})  # fmt: skip
"""The first word of each line that a script prints itself, after its training."""
_END_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Started:
    """The exit code of one start of a script, checksums of the weights after each training batch, and the output."""

    exit_code: int
    weights: list[str]
    output: str

    @property
    def results(self) -> list[str]:
        """The lines that the script prints after its training."""
        return [line for line in self.output.splitlines() if line.partition(" ")[0] in _RESULTS]


class Script:
    """A script, of which each start gets a copy below `root`; its starts are forked from one process."""

    def __init__(self, source: Path, root: Path) -> None:
        self._source, self._root, self.directory = source, root, root / "run"
        self.directory.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST_"))}
        own = {"PYTHONPATH": IMPORTED_FROM, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        own |= {"HOME": str(root), "PWD": str(self.directory)}
        self._popen = subprocess.Popen(
            [PYTHON, HERE / "run_scripts.py", source],
            env={**inherited, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            start_new_session=True,
        )
        self._num_starts = 0

    def start(self, **variables: str) -> Started:
        """Run the script to its end, with more variables in its environment."""
        self._num_starts += 1
        shutil.copy(self._source, self.directory)
        record, output = (self._root / f"{self._num_starts}.{suffix}" for suffix in ("jsonl", "txt"))
        environment = {"RECORD": str(record), "INTERRUPT": "", **variables}
        asked = {"directory": str(self.directory), "variables": environment, "output": str(output)}
        print(json.dumps(asked), file=self._popen.stdin, flush=True)
        assert self._popen.stdout is not None
        code = self._popen.stdout.readline()
        assert code, f"{self._source} can't be started"
        lines = record.read_text().splitlines() if record.exists() else []
        weights = [json.loads(line)["weights"] for line in lines]
        return Started(exit_code=int(code), weights=weights, output=output.read_text())

    def forget(self) -> None:
        """Remove all files that the starts have written."""
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(_END_SECONDS)
        self._popen.stdout.close()


@contextlib.contextmanager
def script(source: Path, root: Path) -> Iterator[Script]:
    """Yield a script, and end its process."""
    assert PYTHON.exists(), "the environment of the libraries is missing: make libraries"
    found = Script(source, root)
    try:
        yield found
    finally:
        found.close()


def assert_continues(name: str, root: Path, *, more: Sequence[str] = ()) -> None:
    """Assert that all starts of a script that is stopped and then killed train, together, the same as one run.

    It is stopped by SIGTERM after 5 batches, killed by SIGKILL after 5 more, interrupted as `more` says, and finishes.
    """
    with script(HERE / "scripts" / name, root) as started:
        plain = started.start()
        assert plain.exit_code == 0, plain.output
        assert len(plain.weights) > 10, plain.output
        assert len(set(plain.weights)) == len(plain.weights), "the weights don't tell the batches apart"
        assert plain.results, plain.output
        started.forget()
        for number, interrupt in enumerate(("TERM@5", "KILL@5", *more)):
            cut = started.start(INTERRUPT=interrupt, **PROTECTED)
            assert cut.exit_code == {"T": 128 + signal.SIGTERM, "K": -signal.SIGKILL}[interrupt[0]], cut.output
            begun = plain.weights.index(cut.weights[0])
            assert cut.weights == plain.weights[begun : begun + len(cut.weights)], cut.output
            assert number > 1 or (begun, len(cut.weights)) == (5 * number, 5), cut.output
        ended = started.start(**PROTECTED)
        assert ended.exit_code == 0, ended.output
        assert "Resumed exactly" in ended.output
        assert 0 < len(ended.weights) < len(plain.weights)
        assert ended.weights == plain.weights[-len(ended.weights) :], ended.output
        assert ended.results == plain.results, ended.output


def assert_refused(name: str, root: Path, reasons: Mapping[tuple[str, str], str]) -> None:
    """Assert that a script with a change in its text trains nothing, and that the script as it is starts after that.

    `reasons` has, for each change of what to what, a part of the message.
    """
    source = HERE / "scripts" / name
    changed = Path(shutil.copy(source, root))
    with script(changed, root) as started:
        for (before, after), reason in reasons.items():
            changed.write_text(source.read_text().replace(before, after))
            refused = started.start(**PROTECTED)
            assert (refused.exit_code, refused.weights) == (1, []), refused.output
            assert reason in refused.output
        shutil.copy(source, root)
        mended = started.start(INTERRUPT="TERM@5", **PROTECTED)
        assert (mended.exit_code, len(mended.weights)) == (128 + signal.SIGTERM, 5), mended.output

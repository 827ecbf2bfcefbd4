"""A script that is started again and again, each time in another situation, and what a user sees of each start."""

from __future__ import annotations

import _thread
import functools
import os
import queue
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_faulttolerant import FaultTolerance
from tests.laws.cuts import Cut, Cuts
from tests.laws.events import Broken, Event, Events, read, slice_of, write_end
from tests.laws.processes import fork, signal_to
from tests.laws.rows import Group, Row
from tests.laws.runs import QUIET
from tests.messages import plain
from tests.processes import as_script

_OF_ROWS = {"module", "train", "validation", "callbacks", "data", "trainer"}
_OF_OTHERS = re.compile(
    r"GPU |TPU |HPU |💡|Rest\w+ (all )?states |Loaded model weights|`Trainer.fit` stopped|.*site-packages/|Seed set|$"
    r"|A kill repeats at most|Saved step |Autosave of .* held training"
)
"""Lines of Lightning and torch, and those that each start has, or each autosave."""
_TRACEBACK = re.compile(
    r"(The above exception .*\n|During handling .*\n|\n)*Traceback \(most recent call last\):\n(?:(?: .*)?\n)+"
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a script.

    Args:
        fits: The arguments of `Script.fit` for each fit, or a function that gets the script.
        argv: The arguments of the command.
        path: The file of the script, below the directory unless it is absolute.
        environment: Variables.
        before: What the process does first.
        prepares: Whether it only makes what the others need.
    """

    fits: Sequence[Mapping[str, Any]] | Callable[[Script], object] = ({},)
    argv: tuple[str, ...] = ()
    path: str = "train.py"
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[Path], object] | None = None
    prepares: bool = False


_OF_STARTS = Start.__dataclass_fields__.keys()


def one(cut: tuple[int, int] | Cut | None = None, **values: Any) -> Start:
    """Return a start with one fit, which is killed at a batch if it is to be; `values` are those of both."""
    cut = Cut(at=cut) if isinstance(cut, tuple) else cut
    start = {name: values.pop(name) for name in _OF_STARTS & values.keys()}
    return Start(fits=[{"cut": cut, **values}], **start)


class Script:
    """A script in a directory.

    Args:
        root: The directory.
        is_plain: Whether nobody interrupts it, and it does not have the callback.
    """

    def __init__(self, root: Path, *, is_plain: bool = False) -> None:
        self.root, self.is_plain, self._number = root, is_plain, -1
        root.mkdir(exist_ok=True, parents=True)

    @property
    def name(self) -> str:
        return f"start-{self._number}"

    def launch(self, start: Start) -> int:
        """Start it, and return its process."""
        self._number += 1
        output, seed = self.root / f"{self.name}.txt", 1 + 1000 * self._number
        output.touch()
        started: queue.Queue[int] = queue.Queue()
        # In a thread, whose stack is empty: a script has several fits if there is a loop on its stack.
        _thread.start_new_thread(
            lambda: started.put(fork(lambda: self.run(start), output=output, seed=seed, environment={})), ()
        )
        return started.get()

    @contextmanager
    def running(self, start: Start) -> Iterator[int]:
        """Start it, yield its process, and end it."""
        process_id = self.launch(start)
        try:
            yield process_id
        finally:
            signal_to(process_id, signal.SIGKILL, os.killpg)

    def wait(self, process_id: int) -> int:
        """Wait for the end of a process, and return its exit code; end what it leaves behind."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
        finally:
            signal_to(process_id, signal.SIGKILL, os.killpg)

    def start(self, start: Start) -> int:
        return self.wait(self.launch(start))

    def run(self, start: Start) -> None:
        """Do in this process what a start does."""
        as_script(functools.partial(self._main, start), start.argv, str(self.root / start.path))

    def _main(self, start: Start) -> None:
        sys.orig_argv = ["python", *sys.argv]
        os.environ["PL_FAULT_TOLERANT_REGISTRY"] = str(self.root / "registry")
        os.environ.update({name: value.replace("DIR", str(self.root)) for name, value in start.environment.items()})
        os.chdir(self.root)
        if start.before is not None:
            start.before(self.root)
        if callable(start.fits):
            start.fits(self)
        elif len(start.fits) == 1:
            self.fit(**start.fits[0])  # not in a loop: a script with a loop has several fits
        else:
            for fit in start.fits:
                self.fit(**fit)

    def fit(
        self,
        *,
        name: str = "fit",
        cut: Cut | None = None,
        root: str = "runs",
        seed: int | None = 7,
        options: Mapping[str, Any] | None = None,
        ckpt: str | Callable[[Path], Path | None] | None = None,
        more: Sequence[Any] = (),
        companions: Callable[[], Sequence[Any]] = list,
        **values: Any,
    ) -> Trainer:
        """Fit in the script: `values` are those of a row, or of the Trainer; a plain fit has no companions."""
        if seed is not None:
            seed_everything(seed, verbose=False)
        row = {key: values.pop(key) for key in _OF_ROWS & values.keys()}
        row["trainer"] = {**row.get("trainer", {}), **values}
        group = Group(rows=(Row(name="fit", **row),))
        arguments = {**QUIET, "default_root_dir": self.root / root, "logger": False, **group.trainer()}
        if callable(arguments["logger"]):
            arguments["logger"] = arguments["logger"]()
        path = self.root / f"{self.name}-{name}.jsonl"
        ours = [] if self.is_plain else [FaultTolerance(**{"every_n_train_steps": 1, **(options or {})}), *companions()]
        trainer = Trainer(
            callbacks=[*group.callbacks(), *ours, *more, Events(path), Cuts(None if self.is_plain else cut)],
            **arguments,
        )
        warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer`")
        if callable(ckpt):
            ckpt = ckpt(self.root)
        where = ckpt if ckpt in (None, "last") else self.root / str(ckpt)
        trainer.fit(group.module(), ckpt_path=where, **group.data())
        write_end(path, trainer, [])
        return trainer

    def fits(self) -> dict[str, list[Event]]:
        """Return the events of each fit of the last start."""
        found = sorted(self.root.glob(f"{self.name}-*.jsonl"), key=lambda path: path.stat().st_ctime_ns)
        return {path.stem.removeprefix(f"{self.name}-"): read(path) for path in found}

    def output(self, number: int | None = None) -> str:
        """Return all that a start has printed, the last one by default."""
        return (self.root / f"start-{self._number if number is None else number}.txt").read_text()

    def said(self, number: int | None = None) -> str:
        """Return what the package has said in a start, without tracebacks."""
        text = _TRACEBACK.sub("\n", self.output(number)).replace("lightning_faulttolerant.errors.", "")
        text = re.sub(r", in \d+(\.\d+)? s$", "", text, flags=re.MULTILINE)
        return "\n".join(line for line in text.splitlines() if not _OF_OTHERS.match(line))

    def autosaves(self) -> list[Path]:
        """Return the autosaves that are there."""
        return sorted(self.root.rglob("autosave-*.ckpt"))


_NO_MATTER = {"cut", "root", "options", "callbacks", "enable_checkpointing", "more", "companions"}
"""Arguments of a fit that change no event."""


def _content(fits: Any) -> Any:
    return fits if callable(fits) else [{k: v for k, v in fit.items() if k not in _NO_MATTER} for fit in fits]


_wholes: dict[str, dict[str, list[Event]]] = {}


def whole(starts: Sequence[Start]) -> dict[str, list[Event]]:
    """Return the events of the first start that does not only prepare, undisturbed and without the package."""
    last = next(number for number, start in enumerate(starts) if not start.prepares)
    key = str([_content(start.fits) for start in starts[: last + 1]])
    if key not in _wholes:
        with tempfile.TemporaryDirectory() as directory:
            script = Script(Path(directory), is_plain=True)
            for start in starts[: last + 1]:
                before = start.before if start.prepares else None
                code = script.start(Start(fits=start.fits, argv=start.argv, before=before))
            _wholes[key] = {} if code else script.fits()  # it fails without the package, too
    return _wholes[key]


def trained(events: Sequence[Event], expected: Sequence[Event] = ()) -> str:
    """Return which batches a fit has trained, and whether they are those of the uninterrupted run, to its end."""
    batches = [f"{event['epoch']}:{event['batch']}" for event in events if event["kind"] == "trained"]
    text = f"{batches[0]} to {batches[-1]}" if batches else "nothing"
    try:
        _, end = slice_of(list(expected), list(events), whole_name="whole", part_name="part")
    except Broken:
        return text
    if not events:
        return text
    return f"{text}, as uninterrupted{', to the end' if end == len(expected) else ''}"


def told(root: Path, starts: Sequence[Start], **paths: Any) -> str:
    """Start a script in these situations, and tell what each start has trained and said."""
    script, expected, lines = Script(root), whole(starts), []
    for start in starts:
        code = script.start(start)
        if start.prepares:
            assert code == 0, script.output()
            continue
        fits = [f"{name}: {trained(events, expected.get(name, ()))}" for name, events in script.fits().items()]
        lines += [" ".join(["$", start.path, *start.argv, f"({code})"]), *fits, script.said()]
    lines.append(f"{len(script.autosaves())} autosaves")
    return plain("\n".join(line for line in lines if line), DIR=script.root, HOST=os.uname().nodename, **paths)


def slow_half(scenarios: Mapping[str, object]) -> list[Any]:
    """Return the names of scenarios as cases; every second one is slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (number % 2)) for number, name in enumerate(scenarios)]

"""Starts of a training: plain, with the callback, cut, and again; and what all laws compare."""

from __future__ import annotations

import importlib
import os
import re
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_faulttolerant import FaultTolerance
from tests.laws.cuts import Cut, Cuts
from tests.laws.events import Broken, Event, Events, Logs, read, slice_of, write_end
from tests.laws.processes import run_ranks
from tests.laws.rows import Group, forget_others
from tests.messages import plain

_SEED, _OTHER_SEED = 1, 20_000
_PRINTED_CHARACTERS = 6_000

_ADVICE = (
    "You have overridden `on_before_batch_transfer`",  # beside a data module: the hook of the module counts
    "Your `IterableDataset` has `__len__` defined",
    "This DataLoader will create . worker processes",  # more than the machine has cores
    "Your `val_dataloader`'s sampler has shuffling enabled",
    "You requested to overfit but enabled",
)

Script = Callable[[Trainer, LightningModule, Group], object]

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a start of a training did.

    Args:
        codes: The exit code of each rank; negative for a signal.
        events: The events of each rank.
        output: The end of what each rank printed.
    """

    codes: list[int]
    events: list[list[Event]]
    output: str


@dataclass(kw_only=True, slots=True)
class Training:
    """A training of a group in a directory, started again and again.

    Args:
        group: Its features.
        root: Its directory.
        num_ranks: Its number of processes.
        with_callback: Whether it has the callback.
    """

    group: Group
    root: Path
    num_ranks: int = 1
    with_callback: bool = True
    stage: str | Script = "fit"
    """Functions of the Trainer, joined by "+", or a script that calls them."""
    more: Callable[[], list[Callback]] = list
    """Makes callbacks that come last."""
    ckpt_path: Path | None = None
    before: Callable[[], object] | None = None
    """What each process does first."""
    beside: Callable[[list[int]], object] | None = None
    """What another process does meanwhile, with the ids of the ranks' processes."""
    starts: list[Start] = field(default_factory=list)

    def start(self, cut: Cut | None = None, **options: Any) -> Start:
        """Start it, wait for its end, and return what it did."""
        number = len(self.starts)
        self.root.mkdir(exist_ok=True, parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in [name for each in self.group.rows for name in each.imports]:
                importlib.import_module(name)
        paths = [self.root / f"start-{number}-rank-{rank}.jsonl" for rank in range(self.num_ranks)]
        outputs = [path.with_suffix(".txt") for path in paths]
        options = {"every_n_train_steps": cut.every if cut else 1, **self.group.options, **options}
        codes = run_ranks(
            lambda rank: self.run(paths[rank], cut, options),
            outputs=outputs,
            seed=_OTHER_SEED + number if any(self.root.rglob("autosave-*")) else _SEED,  # or it starts afresh
            beside=self.beside,
        )
        printed = [path.read_text(errors="replace")[-_PRINTED_CHARACTERS:] for path in outputs if path.exists()]
        start = Start(codes=codes, events=[read(path) for path in paths], output="\n".join(printed))
        self.starts.append(start)
        return start

    def said(self, *words: str) -> str:
        """Return the lines of all starts with one of these words, without what differs from run to run."""
        lines = [line for start in self.starts for line in start.output.splitlines()]
        return self.told("\n".join(line for line in lines if any(word in line for word in words)))

    def told(self, text: str) -> str:
        """Return a text with names for paths, durations, and the command."""
        text = re.sub(r"\b\d+(\.\d+)? (ms|s|min|seconds?)\b", "SOME s", plain(text, DIR=self.root))
        return re.sub(r"(type: |-- )(\S*python|python) .*", r"\1COMMAND", text)

    def run(self, path: Path, cut: Cut | None, options: dict[str, Any]) -> None:
        """Do in this process what one rank does, and write its events."""
        forget_others(self.group.rows)
        os.chdir(self.root)
        for message in [*_ADVICE, *(message for each in self.group.rows for message in each.warns)]:
            warnings.filterwarnings("ignore", message)
        if self.before is not None:
            self.before()
        os.environ["PL_FAULT_TOLERANT_REGISTRY"] = str(self.root / "registry")  # else it is that of the tests
        own = [FaultTolerance(**options)] if self.with_callback else []
        arguments = self.group.trainer()
        loggers = arguments.pop("logger", list)()  # made here: each process has its own
        ranks = {"devices": self.num_ranks, "strategy": "ddp"} if self.num_ranks > 1 else {}
        trainer = Trainer(
            callbacks=[*self.group.callbacks(), *own, Events(path), Cuts(cut), *self.more()],
            logger=[*(loggers if isinstance(loggers, list) else [loggers]), Logs(path)],
            **{"default_root_dir": self.root, **QUIET, **ranks, **arguments},
        )
        returned = run_stage(trainer, self.group, self.stage, self.ckpt_path)
        write_end(path, trainer, returned)

    def ended(self, cut: Cut | None = None, *, code: int = 0, **options: Any) -> Start:
        """Start it; each rank must end by the cut, or with this exit code."""
        start, expected = self.start(cut, **options), cut.exit_code if cut else code
        if {*start.codes} != {expected}:
            raise Broken(f"It ended with the exit codes {start.codes}, not {expected}.\n{start.output}")
        return start

    def finished(self) -> Start:
        """Start it once without a cut; it must finish."""
        return self.ended()


def run_stage(trainer: Trainer, group: Group, stage: str | Script, ckpt_path: Path | None = None) -> list[Any]:
    """Let a trainer fit, validate, test, or predict, or several of them, and return what it returns."""
    module = group.module()
    if callable(stage):
        return [stage(trainer, module, group)]
    returned = []
    for function in stage.split("+"):
        data = group.data()
        if function == "fit":
            trainer.fit(module, ckpt_path=ckpt_path, **data)
        else:
            loaders = data.get("val_dataloaders")
            given = {"dataloaders": loaders} if loaders is not None else data
            returned.append(getattr(trainer, function)(module, **given))
    return returned


def assert_same(whole: list[list[Event]], start: Start, *, name: str) -> list[tuple[int, int]]:
    """Check that each rank's events are a slice of its events in the whole run, and return the slices."""
    try:
        return [
            slice_of(one, other, whole_name="the whole run", part_name=name)
            for one, other in zip(whole, start.events, strict=True)
        ]
    except Broken as error:
        raise Broken(f"{error}\n{start.output}") from None


def assert_continues(whole: list[list[Event]], training: Training, cuts: Sequence[Cut]) -> None:
    """Cut a training again and again, then let it finish: each start is a slice of the whole run, without gaps.

    Raises:
        Broken: If it is not so.
    """
    ends = [0] * training.num_ranks
    for number, cut in enumerate([*cuts, None]):
        start = training.start(cut)
        name = f"start {number} ({cut or 'to the end'})"
        _check_codes(start, cut, name)
        slices = assert_same(whole, start, name=name)
        for rank, (begin, end) in enumerate(slices):
            if not start.events[rank]:
                continue
            if begin > ends[rank]:
                raise Broken(f"{name} leaves out events {ends[rank]} to {begin} of the whole run.\n{start.output}")
            twice = sum(event["kind"] == "batch" for event in whole[rank][begin : ends[rank]])
            allowed = training.group.repeats * (cuts[number - 1].every if number else 0) + 1
            if twice > allowed:
                raise Broken(f"{name} repeats {twice} batches; at most {allowed} are allowed.\n{start.output}")
            ends[rank] = end
    if any(end != len(one) for end, one in zip(ends, whole, strict=True)):
        raise Broken(f"The last start ended after {ends} events; the whole run has {[len(one) for one in whole]}.")


def _check_codes(start: Start, cut: Cut | None, name: str) -> None:
    expected = cut.exit_code if cut else 0
    codes = start.codes if cut is None or cut.rank is None else [start.codes[cut.rank]]
    # A rank that is all but over when another one has ended gets SIGTERM from whoever started both.
    late = {-signal.SIGTERM} if cut is not None and expected in start.codes else set()
    if not {*codes} <= {expected, *late}:
        raise Broken(f"{name} ended with the exit codes {start.codes}, not {expected}.\n{start.output}")


def whole_run(group: Group, root: Path, *, num_ranks: int = 1, stage: str | Script = "fit") -> list[list[Event]]:
    """Return the events of an uninterrupted run, without the callback if that is possible."""
    whole = Training(group=group, root=root / "whole", num_ranks=num_ranks, stage=stage, with_callback=group.only_with)
    found = whole.finished().events
    logged = [event["values"] for events in found for event in events if event["kind"] == "log"]
    if logged and "nan" in logged[-1].values():
        raise Broken(f"It diverges, so that nothing differs any more: {logged[-1]}")
    return found


def refusal(output: str, root: Path) -> str:
    """Return the text of the error that ended a start, without the commands that it shows."""
    return plain(output.rpartition("lightning_faulttolerant.errors.")[2].partition("\nThe result")[0], DIR=root)

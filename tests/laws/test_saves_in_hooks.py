"""The law for checkpoints that other code saves in a hook: a run that starts from one does the rest of the run."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import AtomicCheckpointIO
from tests.laws.events import Broken, Event, slice_of
from tests.laws.features.saved_objects import IN_FILES
from tests.laws.groups import check, groups_of, seed
from tests.laws.ranks import FOR_RANKS, Apart, batches
from tests.laws.rows import Group, Net, Row, all_rows
from tests.laws.runs import Training, whole_run
from tests.messages import plain

pytestmark = [*FOR_RANKS, pytest.mark.filterwarnings("ignore:The dirpath has changed from")]

Call = tuple[str, int, int | None]
LAST = -1
# A hook, the epoch, and the batch of the call that saves.
CALLS = (
    ("on_train_batch_start", 0, 0), ("on_train_batch_start", 1, 2), ("on_before_optimizer_step", 0, 3),
    ("on_train_batch_end", 0, 0), ("on_train_batch_end", 0, 2), ("on_train_batch_end", 0, LAST),
    ("on_train_batch_end", 1, 1), ("on_train_batch_end", 1, LAST),
    ("on_train_epoch_start", 0, None), ("on_train_epoch_start", 1, None), ("on_train_epoch_end", 0, None),
    ("on_train_epoch_end", 1, None), ("on_validation_start", 0, None), ("on_validation_batch_end", 0, 1),
    ("on_validation_batch_end", 1, 0), ("on_validation_end", 0, None), ("on_validation_end", 1, None),
)  # fmt: skip
# Where a run that starts from this hook's checkpoint begins: at the batch or the validation run of the save.
BEFORE = {
    "on_train_batch_start": "batch",
    "on_before_optimizer_step": "batch",
    "on_validation_start": "evaluated",
    "on_validation_batch_end": "evaluated",  # from the state before the batch
}
AFTER = {
    "on_train_batch_end": "trained",
    "on_train_epoch_start": "epoch",
    "on_train_epoch_end": "epoch end",
    "on_validation_end": "evaluation end",
}
USED_UP = [call for call in CALLS if call[2] == LAST or "validation" in call[0] or call[0] == "on_train_epoch_end"]


def file_of(directory: Path, call: Call) -> Path:
    """Return the file of a call."""
    return directory / "{}-{}-{}.ckpt".format(*call)


def saves(directory: Path, *, kind: type[Callback] = Callback) -> Callback:
    """Return a callback that saves a checkpoint in each of `CALLS`; it has no state."""

    def hook_of(hook: str) -> Callable[..., None]:
        def save(self: Callback, trainer: Trainer, *arguments: Any) -> None:
            numbers = [argument for argument in arguments if isinstance(argument, int)]
            batch = trainer.fit_loop.batch_idx if hook == "on_before_optimizer_step" else (numbers or [None])[0]
            if hook == "on_train_batch_end" and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                batch = LAST
            call = hook, trainer.current_epoch, batch
            if call in CALLS and not trainer.sanity_checking:
                trainer.save_checkpoint(file_of(directory, call))

        return save

    return type("Saves", (kind,), {hook: hook_of(hook) for hook, *_ in CALLS})()


class LastOfAll(Checkpoint):
    """Lightning calls it after all other callbacks."""


def assert_continues_from(group: Group, calls: Sequence[Call], kind: type[Callback], *, num_ranks: int) -> None:
    """Check that a run from each of these calls' files does what the whole run does from there on."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        wholes = whole_run(group, root, num_ranks=num_ranks)
        ranks: dict[str, Any] = {"group": group, "num_ranks": num_ranks}
        saving = Training(root=root / "saving", more=lambda: [saves(root, kind=kind)], **ranks)
        if any(saving.start(overhead_budget=1.0, every_n_train_steps=1000).codes):
            raise Broken(saving.starts[0].output)
        for whole, events in zip(wholes, saving.starts[0].events, strict=True):
            slices = slice_of(whole, events, whole_name="the whole run", part_name="the run that saves")
            assert slices == (0, len(whole))
        for call in calls:
            path = file_of(root, call)
            resumed = Training(root=root / path.stem, ckpt_path=path, **ranks).finished()
            for whole, found in zip(wholes, resumed.events, strict=True):
                begin, end = slice_of(whole, found, whole_name="the whole run", part_name=f"the run from {path.name}")
                expected = begin_of(whole, call)
                again = begin_of(whole, ("on_validation_start", call[1], None)) if "validation" in call[0] else expected
                if end != len(whole) or begin not in (expected, again):  # the whole validation run is done again
                    raise Broken(f"The run from {path.name} has events {begin} to {end}, not from {expected} on.")


def begin_of(whole: list[Event], call: Call) -> int:
    """Return the first event of a run that starts from a call's file."""
    hook, epoch, batch = call
    batch = 0 if hook == "on_validation_start" else batch
    kind = BEFORE.get(hook) or AFTER[hook]
    of_epoch = [i for i, event in enumerate(whole) if event["kind"] == kind and event["epoch"] == epoch]
    if batch not in (None, LAST):
        of_epoch = [i for i in of_epoch if whole[i]["batch"] == batch]
    begin = of_epoch[-1] + (hook in AFTER)
    while kind == "batch" and whole[begin - 1]["kind"] == "log" and whole[begin - 1]["step"] == whole[begin]["step"]:
        begin -= 1  # what a callback logs when the batch begins
    return begin


REFUSED = {"exponential average", "torchdata in a data module that keeps its state", "Draws", "ReturnsItsAttributes"}
"""Rows whose files are rightly refused: they change weights in that hook, keep another moment, or are unsafe."""


def is_quiet(row: Row) -> bool:
    """Return whether a row has no module, whose code would come after the save, and each epoch is a plain one."""
    lengths = {"max_steps", "max_epochs", "val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches"}
    # Objects in a file of the user's are refused.
    is_plain = row.module is None and row.repeats == 1 and not row.validation and not row.trainer.keys() & lengths
    return is_plain and IN_FILES not in row.takes and row.name not in REFUSED


GROUPS = groups_of(is_quiet)


def cases() -> Iterator[Any]:
    """Yield the rows of each training, the calls that save in it, the kind of callback, and the number of ranks."""

    def case(
        name: str, rows: Sequence[Row], calls: Sequence[Call], kind: Any = Callback, ranks: int = 1, slow: bool = False
    ) -> Any:
        marks = [pytest.mark.slow] * slow
        return pytest.param(Group(rows=tuple(rows)), calls, kind, ranks, marks=marks, id=name)

    # What a generator of the user's would do at its next batch isn't owed to the next epoch.
    used_up = [("on_train_batch_end", 0, LAST), ("on_validation_end", 0, None)]
    limited = Row(name="limited", trainer={"limit_train_batches": 6})
    yield case("used up", [all_rows()["iter that unpacks"]], used_up)
    yield case("used up, with a state", [all_rows()["stream with a state"]], used_up)
    yield case("used up by a limit", [all_rows()["stream with a state"], limited], used_up)
    enabled = Row(name="checkpointing", trainer={"enable_checkpointing": True})
    yield case("last of all", [enabled], [call for call in CALLS if call[1:] in ((0, LAST), (0, None))], LastOfAll)
    yield case("in order", [enabled], CALLS[::2])
    yield case("in order, the others", [enabled], CALLS[1::2], slow=True)
    pickles = Row(name="pickles", trainer={"plugins": [AtomicCheckpointIO(weights_only=False)]})
    yield case("schedulers as torch pickles them", [all_rows()["WrappedByWarmup"], pickles], [CALLS[1], CALLS[6]])
    of_ranks = [("on_train_batch_start", 1, 2), ("on_train_batch_end", 0, 2), ("on_validation_batch_end", 0, 1)]
    yield case("on ranks", [Row(name="apart", module=Apart), batches()], of_ranks, ranks=2, slow=True)
    for number, group in enumerate(GROUPS):  # whatever the loaders and settings
        chosen = random.Random(f"{seed()} {group}")
        calls = [*dict.fromkeys([*chosen.sample(CALLS, 2), chosen.choice(USED_UP)])]  # one when all batches are used up
        yield case(str(group), group.rows, calls, slow=number != 1)


@pytest.mark.parametrize(("group", "calls", "kind", "num_ranks"), [*cases()])
def test_saved_in_a_hook(group: Group, calls: list[Call], kind: type[Callback], num_ranks: int) -> None:
    """A checkpoint that a hook saves continues the run."""
    check(group, lambda part: assert_continues_from(part, calls, kind, num_ranks=num_ranks))


class Teacher(Net):
    """Updates a teacher in its own hook, after every callback."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher += next(self.parameters()).sum().detach()


class SavesInItsStep(Net):
    """Saves between the step of the optimizer and the end of the batch."""

    def lr_scheduler_step(self, *arguments: Any) -> None:
        super().lr_scheduler_step(*arguments)
        if self.trainer.global_step == 3:
            self.trainer.save_checkpoint("../on_train_batch_end-0-2.ckpt")


@pytest.mark.parametrize("module", [Teacher, SavesInItsStep])
def test_save_that_cannot_be_exact(module: type[Net], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What comes after the save is named, by the save and by a start from it, which is refused unless strict is off."""
    group = Group(rows=(Row(name="module", module=module),))
    path = file_of(tmp_path, ("on_train_batch_end", 0, 2))
    more = (lambda: [saves(tmp_path)]) if module is Teacher else list
    saving = Training(group=group, root=tmp_path / "saving", more=more)
    saving.finished()
    refused = Training(group=group, root=tmp_path / "refused", ckpt_path=path)
    refused.ended(code=1)
    refused.ended(strict=False)
    outputs = [saving.starts[0].output, *(start.output for start in refused.starts)]
    lines = [line for output in outputs for line in plain(output, DIR=tmp_path).splitlines()]
    said = [line for line in lines if "exact" in line and "self._" not in line]
    assert "\n".join(dict.fromkeys(said)) == snapshot

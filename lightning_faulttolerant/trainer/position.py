"""Where in a run a state was taken: the function that runs, and the place in it. Which of two places is later.

The functions of a Trainer are ``fit``, ``validate``, ``test``, and ``predict``. A fit closes an epoch in its middle
when it reaches ``max_steps``: the rest of that epoch can't be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.schema import SavedPosition
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.history import EVALUATIONS

FIT = "fit"


def function_of(trainer: Trainer) -> str:
    """Return the name of the function that runs."""
    return FIT if trainer.state.fn is None else str(trainer.state.fn.value)


def stage_of(trainer: Trainer) -> str:
    """Return the word for the running evaluation in the names of hooks, as in ``on_test_start``."""
    function = function_of(trainer)
    return function if function in ("test", "predict") else "validation"


def loop_of(trainer: Trainer) -> Any:
    """Return the evaluation loop of the function that runs; for ``fit`` that of its validation runs."""
    function = function_of(trainer)
    if function == "validate":
        return trainer.validate_loop
    if function == "test":
        return trainer.test_loop
    return trainer.predict_loop if function == "predict" else trainer.fit_loop.epoch_loop.val_loop


def num_evaluated(trainer: Trainer) -> int:
    """Return how many batches of the validation run, or of the evaluation, have begun."""
    return int(loop_of(trainer).batch_progress.current.ready)


BOUNDARY = "boundary"
EPOCH_START = "epoch start"
BATCH_END, EPOCH_END, IN_EVALUATION = ledger.BATCH_END, ledger.EPOCH_END, ledger.IN_EVALUATION
VALIDATION, IN_VALIDATION, VALIDATION_END = ledger.AT_VALIDATION
FINISHED, EVALUATED = ledger.ENDS[0], ledger.ENDS[1:]
IN_EPOCH = (BOUNDARY, EPOCH_START, BATCH_END, VALIDATION, IN_VALIDATION, VALIDATION_END, EPOCH_END)

REMEDY_OF_CUT = (
    "Resume from a checkpoint that ModelCheckpoint saved after a batch (with every_n_train_steps): it continues in "
    "the middle of the epoch"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPosition:
    """A place in a run.

    Args:
        where: ``boundary``: before batch `batch` of the epoch is fetched; ``epoch start``: in ``on_train_epoch_start``;
            ``batch end``: in ``on_train_batch_end`` of batch `batch` - 1; ``validation``: at the start of the
            validation run after that batch; ``in validation``: before batch `validation_batch` of that run;
            ``validation end``: in its ``on_validation_end``; ``epoch end``: in ``on_train_epoch_end``; ``finished``:
            after the last batch of the fit; ``in validate``, ``in test``, ``in predict``: before batch
            `validation_batch` of an evaluation outside ``fit``; ``after validate`` and so on: after its end. Any other
            value is the name of a hook where no run can be resumed.
        epoch: Counted from 0.
        batch: How many batches of the epoch are consumed.
        global_step: Optimizer steps so far.
        hook: The hook in which other code requested the checkpoint; empty for an autosave.
        validation_batch: How many batches of a validation run, or of an evaluation, are consumed.
    """

    where: str
    epoch: int
    batch: int
    global_step: int
    hook: str = ""
    validation_batch: int = 0

    @property
    def is_resumable(self) -> bool:
        """Return whether a run can continue from here at all."""
        return self.where in IN_EPOCH or self.where == FINISHED

    @property
    def is_finished(self) -> bool:
        """Return whether the fit, or the evaluation, was finished."""
        return self.where == FINISHED or self.where in EVALUATED

    @property
    def num_validated(self) -> int | None:
        """How many batches of a validation run are consumed; ``None`` outside one."""
        return self.validation_batch if self.where == IN_VALIDATION else None

    @property
    def num_evaluated(self) -> int | None:
        """How many batches of its validation run or evaluation are consumed, 0 at the start; ``None`` elsewhere."""
        is_inside = self.where in (VALIDATION, IN_VALIDATION, *IN_EVALUATION)
        return self.validation_batch if is_inside else None

    @property
    def is_of_evaluation(self) -> bool:
        """Return whether it is a place in ``validate``, ``test``, or ``predict``."""
        return self.where in IN_EVALUATION or self.where in EVALUATED

    @property
    def is_in_epoch(self) -> bool:
        """Return whether an epoch was in progress."""
        return self.where in IN_EPOCH

    def state_dict(self) -> SavedPosition:
        """Return the position as plain values."""
        return {
            "where": self.where,
            "epoch": self.epoch,
            "batch": self.batch,
            "global_step": self.global_step,
            "hook": self.hook,
            "validation_batch": self.validation_batch,
        }

    @classmethod
    def from_state_dict(cls, state: SavedPosition) -> TrainerPosition:
        """Return the position that has this state."""
        return cls(**state)

    def reason_of_cut(self, path: str) -> str:
        """Return why the checkpoint `path` can't be trained further, if its epoch was closed in the middle."""
        return (
            f"{path} comes from a fit that ended in the middle of an epoch, after batch {self.batch}. The epoch was "
            "closed there, so the rest of it can't be trained"
        )

    def is_cut(self, trainer: Trainer, checkpoint: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
        """Return whether `trainer` would train on without the rest of an epoch that ``max_steps`` had ended.

        Args:
            trainer: The trainer that runs the fit.
            checkpoint: The checkpoint that was saved here.
            saved: What the trainer was when it was saved, the part ``trainer`` of the state.
        """
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
        if self.where != EPOCH_END or progress is None or saved.get("should_stop"):
            return False
        # A batch that on_train_batch_start skipped, with the rest of its epoch, is begun and never completed.
        is_whole = progress["current"]["completed"] < progress["current"]["ready"] or progress["is_last_batch"]
        is_cut = not is_whole and self.batch < saved.get("num_training_batches", 0)
        return is_cut and (trainer.max_steps < 0 or trainer.max_steps > self.global_step)

    def __str__(self) -> str:
        run = f"the validation run after batch {self.batch} of epoch {self.epoch}"
        places = {
            BOUNDARY: f"before batch {self.batch} of epoch {self.epoch}",
            EPOCH_START: f"at the start of epoch {self.epoch}",
            BATCH_END: f"after the step of batch {self.batch - 1} of epoch {self.epoch}",
            VALIDATION: f"at {run}",
            IN_VALIDATION: f"before batch {self.validation_batch} of {run}",
            VALIDATION_END: f"at the end of {run}",
            EPOCH_END: f"at the end of epoch {self.epoch}",
            FINISHED: "after the end of the fit",
            **{f"in {of}": f"before batch {self.validation_batch} of {of}" for of in EVALUATIONS},
            **{f"after {of}": f"after the end of {of}" for of in EVALUATIONS},
        }
        place = places.get(self.where, f"at batch {self.batch} of epoch {self.epoch}")
        return f"{place}, saved in {self.hook}" if self.hook else place


def position_of(trainer: Trainer, where: str, hook: str = "") -> TrainerPosition:
    """Return where `trainer` is now."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    # In on_train_batch_end the batch is consumed, though the loop has not closed it yet.
    batch = progress.ready if where == BATCH_END else progress.completed
    is_evaluating = where in (IN_VALIDATION, *IN_EVALUATION)  # at the end, ranks may have had different numbers
    validated = num_evaluated(trainer) if is_evaluating else 0
    return TrainerPosition(
        where=where,
        epoch=trainer.current_epoch,
        batch=batch,
        global_step=trainer.global_step,
        hook=hook,
        validation_batch=validated,
    )


def progress_of(checkpoint: Mapping[str, Any], part: Mapping[str, Any] | None) -> float:
    """Return the progress of a checkpoint: the training batches begun, or infinity after the end of the fit."""
    if part is not None and part["position"]["where"] == FINISHED:
        return float("inf")
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loops.get("epoch_loop.batch_progress", {})
    begun: float = progress.get("total", {}).get("ready", 0)
    return begun


def load_into_loops(loops: dict[str, Any], position: TrainerPosition) -> None:
    """Set Lightning's counters in a checkpoint to the place where the loops continue the run.

    Lightning guesses from them where a checkpoint was taken. The guess is wrong nearly everywhere except between two
    batches. So the counters are set to such a place, and the loops do the work that is still owed once they are there.

    Args:
        loops: ``checkpoint["loops"]["fit_loop"]``. It is changed in place.
        position: Where the checkpoint was taken.
    """
    batch, epoch = loops.get("epoch_loop.batch_progress"), loops.get("epoch_progress")
    if batch is None or epoch is None:
        return
    for counts in ("current", "total"):
        if position.where == BATCH_END:
            batch[counts]["completed"] = batch[counts]["processed"]
        if position.where == EPOCH_START:
            epoch[counts]["started"] = epoch[counts]["ready"]
        if position.where == EPOCH_END:
            epoch[counts]["processed"] = epoch[counts]["completed"]
    # These are Lightning's own states of loaders. Their places are in our part.
    loops.get("state_dict", {}).pop("combined_loader", None)


def place_of(trainer: Trainer, position: TrainerPosition | None) -> dict[str, Any]:
    """Return the fields of a report for a position, or for the place where Lightning takes the run to be."""
    if position is not None:
        place = {"where": position.where, "epoch": position.epoch, "batch": position.batch}
        return {"position": str(position), **place, "num_validated": position.num_validated}
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return {"position": "where Lightning expects it", "epoch": trainer.current_epoch, "batch": batch}

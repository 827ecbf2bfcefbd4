"""The batches of validation runs and evaluations: what a ledger says of each, and where a drill finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.records.ledger import EVALUATED
from lightning_faulttolerant.state.rng import rng_state
from lightning_faulttolerant.trainer.compat import num_completed
from lightning_faulttolerant.trainer.evaluation.compat import is_predicting, num_evaluated
from lightning_faulttolerant.trainer.functions import FIT, function_of, loop_of, stage_of
from lightning_faulttolerant.trainer.ledger.compat import fetches_seen, fetching_by_itself
from lightning_faulttolerant.trainer.ledger.digests import Digest, digest, exact, exact_metrics
from lightning_faulttolerant.trainer.patches import Method, Patches


def is_evaluating(trainer: Trainer) -> bool:
    """Return whether a validation run or an evaluation is in progress."""
    return trainer.validating or trainer.testing or trainer.predicting


def training_place(trainer: Trainer) -> dict[str, int]:
    """Return the epoch, and how many of its batches are done; zeros outside a fit."""
    if function_of(trainer) != FIT:
        return {"epoch": 0, "batch": 0}
    return {"epoch": trainer.current_epoch, "batch": num_completed(trainer)}


def around_steps(trainer: Trainer, patches: Patches, wrapper: Method) -> None:
    """Let `wrapper` run around the steps of validation runs, or of the evaluation, except in the sanity check."""

    def unless_sanity_checking(step: Method, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs) if trainer.sanity_checking else wrapper(step, *args, **kwargs)

    patches.around(trainer.strategy, f"{stage_of(trainer)}_step", unless_sanity_checking)


class EvaluatedBatches:
    """Writes a line for each batch.

    Args:
        trainer: The trainer that evaluates.
        write: Writes a line of a kind, with these values.
    """

    def __init__(self, trainer: Trainer, write: Callable[..., None]) -> None:
        self._trainer = trainer
        self._write = write

    def around_step(self, original: Method, batch: Any, *args: Any) -> Any:
        """Run a step, and write its line."""
        trainer = self._trainer
        rng = digest(rng_state())
        if fetching_by_itself(loop_of(trainer)):
            contents = Digest()
            with fetches_seen(loop_of(trainer), contents.feed):
                output = original(batch, *args)
            content = contents.text()
        else:
            content = digest(batch)
            output = original(batch, *args)
        number = {"validation_batch": num_evaluated(trainer)}
        values = {"content": content, "rng": rng, "output": exact(output)}
        self._write(EVALUATED, **training_place(trainer), **number, **values)
        return output


def returned_by(loop: Any, results: Any) -> dict[str, Any]:
    """Return what an evaluation returned, in a form that JSON can hold.

    Args:
        loop: The loop of the evaluation.
        results: Its results: metrics of each loader, or predictions.
    """
    if results is None:
        return {}
    if not is_predicting(loop):
        return {name: value for metrics in results for name, value in exact_metrics(metrics).items()}
    of_loaders = results if loop.num_dataloaders > 1 else [results]
    number = sum(len(predictions) for predictions in of_loaders)
    return {"number of predictions": number, "predictions": digest(of_loaders)}

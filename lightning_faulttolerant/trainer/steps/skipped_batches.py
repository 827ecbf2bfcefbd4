"""The training batches that one fit leaves out, and what it does instead of training them.

A batch that is left out is loaded like any other: samplers, data sets, and workers draw what they would draw. It keeps
its number, so later batches keep theirs. Nothing else happens: no hook, no step, no scheduler of steps.

With accumulated gradients, it stays in its window of batches: the optimizer steps after the last batch of the window
that is trained. If all batches of a window are left out, it does not step. Which batch that is must be known in time:
if the rest of a window turns out to be left out only when its gradients wait for a later batch, that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.records.requests import Skip, skips_in_words, text_of_skips
from lightning_faulttolerant.trainer.compat import fetches_ahead, step_fetches
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.steps import compat

_log = logging.getLogger(__name__)

SKIPPED: Final = "skipped"
"""The key in our part of a checkpoint."""


@final
class SkippedBatches:
    """Leaves batches of one fit out.

    Once a start of a run has named a batch, later starts leave it out, too.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The fit's loaders.
        ranks: The ranks that train together: all leave the same batches out.
        requested: The batches that this start names.
        history: Receives each batch that is left out.
    """

    def __init__(
        self, trainer: Trainer, loaders: Loaders, ranks: Ranks, requested: Iterable[Skip], history: HistoryWriter
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._history = history
        self._wanted: set[Skip] = set(ranks.from_first("the batches to leave out", sorted(requested)))
        self._done: list[Skip] = []
        self._began: Skip = (-1, -1)
        """The first place of this start."""
        self._wanted_before: set[Skip] = set()
        """The batches to leave out that were known when the batches before this start were trained."""
        self.on_skipped: Sequence[Callable[[int, int], None]] = ()
        """Called with epoch and batch of each batch that is left out, once it is loaded."""

    def begin(self, patches: Patches, saved: Mapping[str, Any], position: TrainerPosition | None) -> list[str]:
        """Take the seam of the loops that is needed, and return lines for the report of a resume.

        Args:
            patches: Applies the patch to the trainer.
            saved: The `state_dict` in the checkpoint that the fit continues from, if any.
            position: Where that checkpoint was taken.
        """
        here = (-1, -1) if position is None else (position.epoch, position.batch)
        done = [(epoch, batch) for epoch, batch in saved.get("done", ())]
        self._done = [skip for skip in done if skip < here]  # the state may be older than the save
        self._began = here
        self._wanted_before = {(epoch, batch) for epoch, batch in saved.get("wanted", ())}
        self._wanted |= self._wanted_before
        late = sorted(skip for skip in self._wanted - {*self._done} if skip < here)
        for skip in late:
            _log.warning(
                "%s was trained before this start, so it is not left out. To leave it out, begin a branch from an"
                " earlier autosave: lightning-faulttolerant run --from STEP --skip %s -- COMMAND",
                skips_in_words(skip).capitalize(),
                text_of_skips([skip]),
            )
        self._wanted -= {*late}
        coming = self._coming
        self._history.skips = sorted(self._done)
        if coming:
            self._loaders.guards_samples = True
            patches.around(self._trainer.fit_loop.epoch_loop, compat.SHOULD_ACCUMULATE, self._around_accumulate)
            tell(f"This run leaves out {_listed(coming)}.")
        return [f"{skips_in_words(skip)} was left out" for skip in self._done]

    @property
    def _coming(self) -> list[Skip]:
        return sorted(self._wanted - {*self._done})

    def state_dict(self) -> dict[str, object] | None:
        """Return which batches were left out, and which are to be, or ``None`` if there are none."""
        if not self._wanted and not self._done:
            return None
        places = {"done": self._done, "wanted": sorted(self._wanted)}
        return {name: [list(skip) for skip in skips] for name, skips in places.items()}

    def is_next(self, fetcher: object) -> bool:
        """Return whether the next batch is left out.

        Args:
            fetcher: The fetcher of the epoch.
        """
        if not self._wanted or compat.next_batch(self._trainer) not in self._wanted:
            return False
        return not compat.owes_validation(self._trainer, fetcher)

    def pass_over(self, fetcher: object) -> None:
        """Load the next batch, and count it without training it.

        Args:
            fetcher: The fetcher of the epoch.

        Raises:
            NotExactError: If ``training_step`` fetches its batches by itself, or if this batch is the last of its
                window, and the gradients of an earlier one wait for it.
        """
        trainer, place = self._trainer, compat.next_batch(self._trainer)
        if step_fetches(trainer):
            raise NotExactError(
                f"{skips_in_words(place).capitalize()} is to be left out, but this training_step takes its batches "
                "from dataloader_iter: only the step itself knows how many there are. Leave batches out in the step, "
                "without --skip."
            )
        why = compat.pass_over(trainer, fetcher, self._fetch)
        self._begin_window(place[1])
        self._done.append(place)
        self._history.skip(place, why)
        for told in self.on_skipped:
            told(*place)
        more = f" It could not be loaded: {why}" if why else ""
        tell(f"{skips_in_words(place).capitalize()} is left out, as --skip says.{more}")

    def _fetch(self, fetcher: Any) -> str:
        """Fetch the batch. Return why it could not be loaded, if the loader has moved past it nevertheless."""
        is_ahead = fetches_ahead(self._trainer)  # then it is the batch after this one that is loaded
        why = ""
        try:
            next(fetcher)
        except StopIteration:
            raise
        except Exception as error:
            if is_ahead or not self._loaders.count_failed_fetch():
                raise
            compat.count_failed_fetch(fetcher)
            why = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
        self._check_window(is_last=fetcher.done)
        return why

    def _check_window(self, *, is_last: bool) -> None:
        """Check that no gradients get lost if the next batch, which is left out, ends its window.

        Args:
            is_last: Whether it is the last batch of the epoch.
        """
        epoch, batch = place = compat.next_batch(self._trainer)
        first, end = self._window_of(batch)
        if not self._trainer.lightning_module.automatic_optimization or not (is_last or batch + 1 == end):
            return
        left_out = {*self._done, place}
        trained = [number for number in range(first, batch) if (epoch, number) not in left_out]
        if not trained or self._steps_after(epoch, trained[-1]):
            return
        lost = (
            f"--skip: {skips_in_words(place)} ends a window of accumulated gradients. Without it, no optimizer step "
            "uses the gradients of the window's earlier batches, which were trained before --skip named it"
        )
        if self._loaders.exactness.strict:
            raise NotExactError(
                f"{lost}. Leave out all batches of the window, starting from an autosave before it, or give the loader "
                "a length, or pass FaultTolerance(strict=False) to lose these gradients."
            )
        _log.warning("%s. These gradients are lost, because strict is off.", lost)

    def _begin_window(self, batch: int) -> None:
        """Begin a window of accumulated gradients without its first batch, which would have cleared the old ones."""
        if self._trainer.lightning_module.automatic_optimization and batch % self._window == 0:
            for optimizer in self._trainer.optimizers:
                optimizer.zero_grad()

    @property
    def _window(self) -> int:
        return self._trainer.accumulate_grad_batches

    def _around_accumulate(self, original: Method) -> bool:
        """Replace the epoch loop's `_should_accumulate`: whether the batch that has begun last makes no step."""
        accumulates: bool = original()
        epoch, batch = self._trainer.current_epoch, self._trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        if (epoch, batch) in self._done:
            return True
        return accumulates and not self._steps_after(epoch, batch)

    def _window_of(self, batch: int) -> tuple[int, int]:
        """Return the first batch of the window of a batch, and the one after its last, as far as that is known."""
        first = batch // self._window * self._window
        return first, int(min(first + self._window, self._trainer.num_training_batches))

    def _steps_after(self, epoch: int, batch: int) -> bool:
        """Return whether the rest of the window of a batch was to be left out when that batch was trained."""
        wanted = self._wanted if (epoch, batch) >= self._began else self._wanted_before
        return all((epoch, number) in wanted for number in range(batch + 1, self._window_of(batch)[1]))

    def end(self) -> None:
        """Warn of batches that never came. Call it when the fit has finished."""
        if self._coming:
            _log.warning("--skip names %s, which the run never reached.", _listed(self._coming))


def _listed(skips: Iterable[Skip]) -> str:
    skips = list(skips)
    return (
        skips_in_words(skips[0]) if len(skips) == 1 else f"{len(skips)} batches (EPOCH:BATCH): {text_of_skips(skips)}"
    )

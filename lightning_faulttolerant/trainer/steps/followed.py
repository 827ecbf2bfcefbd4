"""What is known of each batch: its indices, as the index samplers have yielded them, and, on request, all of its step.

The repetition notes a sample of each batch, since it runs always. The ledger of a drill and the dump of a replay take
whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from lightning.pytorch import Trainer

from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.rng import rng_state
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders
from lightning_faulttolerant.trainer.loaders.trackers import PrefetchStates
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import FIT, function_of, loop_of, stage_of
from lightning_faulttolerant.trainer.steps.compat import fetches_seen, fetching_by_itself

_MASK = 0xFFFF_FFFF


@dataclass(kw_only=True, slots=True)
class _Followed:
    """A loader of the loop, with its last iteration, and how many batches that had yielded then."""

    place: str
    tracker: TrackedLoader
    iteration: Any = None
    num_out: int = 0


@final
class FollowedLoop:
    """One of the Trainer's loops: its counter, and the indices that its loaders yield.

    Args:
        loop: The loop that counts the batches.
        loaders: The loaders of the run.
        stage: The prefix of the places of the loop's loaders.
    """

    def __init__(self, loop: Any, loaders: Loaders, stage: str) -> None:
        self.current = loop.batch_progress.current
        self._loaders = loaders
        self._stage = stage
        self._followed: list[_Followed] = []
        self._moved: tuple[_Followed, ...] = ()
        """Those that have yielded the last batch."""
        self._ahead: PrefetchStates | None = None
        """Where the loaders were before the last fetch, if that is one batch ahead."""

    def begin(self) -> None:
        """Find the loaders that have indices. From here on, what they yield counts."""
        self._find_trackers()
        self.order()

    def _find_trackers(self) -> None:
        known = {id(one.tracker): one for one in self._followed}
        self._followed = [
            known.get(id(one)) or _Followed(place=place, tracker=one)
            for place, one in self._loaders.trackers.items()
            if place.startswith(self._stage) and isinstance(one, TrackedLoader) and not one.is_gone
        ]
        prefetches = self._loaders.prefetches
        self._ahead = prefetches if self._stage == TRAIN and prefetches.is_on else None

    def order(self) -> int:
        """Return a checksum of the indices of the loaders that have yielded a batch since the last call; 0 if none."""
        # Called after a step: then, each function and each attribute costs more than its work.
        if self.current.ready <= 1:  # the first batch of an epoch, or of an evaluation
            self._find_trackers()
        ahead = None if self._ahead is None else self._ahead.last
        found = None
        for one in self._followed:
            iteration: Any = one.tracker.iteration
            num_out = 0 if iteration is None else iteration.num_out
            if ahead is not None:
                iteration, num_out = ahead.iterations.get(one.place, (None, 0))
            if iteration is None or num_out == (one.num_out if iteration is one.iteration else 0):
                continue
            one.iteration, one.num_out = iteration, num_out
            order = iteration.record.checksum(num_out - 1)
            found, self._moved = (order, (one,)) if found is None else (31 * found + order, (*self._moved, one))
        return 0 if found is None else found & _MASK

    def indices(self) -> dict[str, object] | None:
        """Return the indices of the last batch, by the place of their loader; ``None`` if they are not known."""
        found = {one.place: one.iteration.record.batch(one.num_out - 1) for one in self._moved}
        return None if None in found.values() else found or None


@dataclass(kw_only=True, slots=True)
class WholeStep:
    """The step of a batch: of training, of a validation run, or of an evaluation.

    Args:
        is_training: Whether it is a training step.
        generators: The states of the main process's generators before it.
        batches: Its batch, as it is kept; several if it fetches them by itself.
        orders: A checksum of the indices of each; 0 if they are not known.
        indices: The indices of the last one, by the place of their loader.
        output: What it returned.
    """

    is_training: bool
    generators: Mapping[str, bytes]
    batches: list[object] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)
    indices: Mapping[str, object] | None = None
    output: object = None


class WholeSteps:
    """Follows the steps of a fit or an evaluation, except those of the sanity check.

    Args:
        trainer: The trainer that runs them.
        loaders: Its loaders; ``None`` if they are not followed, so that no indices are known.
        keep: Returns what is kept of a batch. The step may change the batch.
        begun: Called before a step, and after each batch that it fetches by itself.
        done: Called after a step.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders | None,
        *,
        keep: Callable[[object], object],
        begun: Callable[[WholeStep], None] = lambda step: None,
        done: Callable[[WholeStep], None],
    ) -> None:
        self._trainer = trainer
        loop = trainer.fit_loop.epoch_loop
        self._followed = None if loaders is None else FollowedLoop(loop, loaders, TRAIN)
        self._progress = loop.batch_progress
        self._last = 0
        self._keep, self._begun, self._done = keep, begun, done

    def take_seams(self, patches: Patches) -> None:
        """Begin to follow the steps."""
        strategy = self._trainer.strategy
        patches.around(strategy, f"{stage_of(self._trainer)}_step", self._around_step)
        if function_of(self._trainer) == FIT:
            patches.around(strategy, "training_step", self._around_step)
            patches.around(self._trainer.fit_loop.epoch_loop, "on_run_start", self._around_epoch_start)

    def _around_epoch_start(self, original: Method, data_fetcher: object) -> None:
        original(data_fetcher)
        if self._followed is not None:
            self._followed.begin()

    def _around_step(self, original: Method, *args: Any, **kwargs: object) -> object:
        trainer, number = self._trainer, self._progress.total.ready
        is_again = trainer.training and number == self._last  # some optimizers call a step again
        if trainer.sanity_checking or is_again:
            return original(*args, **kwargs)
        loop, self._last = (trainer.fit_loop, number) if trainer.training else (loop_of(trainer), self._last)
        step = WholeStep(is_training=trainer.training, generators=rng_state())

        def seen(batch: object) -> None:
            step.batches.append(self._keep(batch))
            if step.is_training and self._followed is not None:
                step.orders.append(self._followed.order())
                step.indices = self._followed.indices()
            self._begun(step)

        with fetches_seen(loop, seen):
            if fetching_by_itself(loop):
                self._begun(step)
            else:
                seen(args[0])
            step.output = original(*args, **kwargs)
        self._done(step)
        return step.output

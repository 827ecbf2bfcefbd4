"""A validation run inside ``fit``: its place between two batches, and how a resumed fit continues it there.

A run that continues does not call the user's hooks of its start again: what they have changed is state, and carried.
If a checkpoint can't carry something that has changed since the run began (a file that a hook opened, a forward hook
that it registered), the run is repeated.

Several ranks save before batches that all of them reach. Each rank knows how many batches it has. The ranks learn the
smallest of these numbers at the start, and whenever they have saved, rank 0 says before which batch they save next. So
no rank waits for another one that has no more batches.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.objects.graph import of_hooks
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import swap_for_validation, swaps_in_its_own_way
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.loaders.loaders import VALIDATION, Loaders
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import FIT, function_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _BeforeFetch:
    """The state right before the batch was fetched that the loop will use next."""

    num_out: dict[str, int]
    held: Mapping[str, object]
    rng: Mapping[str, object]

    def state_dict(self) -> dict[str, object]:
        """Return what is restored before the batch is fetched again."""
        return {"held": self.held, "rng": self.rng}


class ValidationRun:
    """The validation run in progress.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The trainer's loaders.
        may_be_resized: Whether a different number of ranks may continue the fit. They can't continue inside a run.
    """

    def __init__(self, trainer: Trainer, loaders: Loaders, *, may_be_resized: bool) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._may_be_resized = may_be_resized
        self._is_known: bool | None = None
        self.reason = ""
        """Why the run is repeated, if it is."""
        self.first_loop_iter: bool | None = None
        """How far the logger connector was in the training batch before the run."""
        self.lost_before: frozenset[str] = frozenset()
        """What a checkpoint could not carry at the start of the run."""
        self.is_ahead = False
        """Whether each batch is fetched ahead of its step, so that `note_fetch` must be called before it is fetched."""
        self._ahead: _BeforeFetch | None = None
        self._begun_with: dict[str, object] = {}
        self._before_check: dict[str, object] = {}
        self.is_continuing = False
        """Whether the run that begins next is one that an earlier process began."""

    def before_sanity_check(self) -> None:
        """Note what there is before the sanity check, which a resumed run does not repeat."""
        self._before_check = _never_carried(self._trainer)

    def after_sanity_check(self) -> None:
        """Keep of that what the sanity check has changed."""
        then = self._before_check
        self._before_check = then and {name: then.get(name) for name in _changed(then, _never_carried(self._trainer))}

    def begin(self) -> None:
        """Note that a run begins."""
        self._is_known, self._ahead, self.is_ahead = None, None, False
        self._begun_with = {**_never_carried(self._trainer), **self._before_check}
        self.first_loop_iter = runs.first_loop_iter(self._trainer)

    @property
    def can_be_resumed(self) -> bool:
        """Whether a fit can continue before the next batch of this run. If not, it repeats the run."""
        if self._is_known is None:
            self._is_known = True
            reason = self._why_repeated()
            if reason is not None:
                self.repeat(reason)
        return self._is_known

    def repeat(self, reason: str) -> None:
        """Let a fit that ends inside this run repeat it from its start."""
        self._is_known, self.reason = False, reason
        _log.debug("A fit that ends inside this validation run repeats it: %s.", reason)

    def check_objects(self, lost: Set[str]) -> None:
        """Repeat the run if something has changed in it that a checkpoint can't carry.

        Args:
            lost: The paths of all that a checkpoint of this instant would lack.
        """
        now = {**_never_carried(self._trainer), _GRADIENTS: torch.is_grad_enabled()}
        if more := sorted(_changed(self._begun_with, now) | (lost - self.lost_before)):
            self.repeat(f"a checkpoint can't carry what the run has made or changed: {', '.join(more)}")

    def check_loaders(self) -> None:
        """Repeat the run if a loader can't report its place at this instant."""
        try:
            self._loaders.state_dict(in_epoch=True, validated=self.num_consumed())
        except NotExactError as error:
            self.repeat(str(error))

    def _why_repeated(self) -> str | None:
        if self._may_be_resized and function_of(self._trainer) == FIT:
            return "a different number of ranks may continue it"
        if isinstance(self._trainer.strategy, FSDPStrategy) and function_of(self._trainer) == FIT:
            return "FSDP1 stores its gradients in another form there"
        if swaps_in_its_own_way(self._trainer):
            return "a callback swaps the weights in its own way"
        trackers = self._trackers()
        if len(trackers) < self._val_loop.num_dataloaders:
            return "the position of a loader can't be saved"
        return runs.why_unknown(self._val_loop)

    @property
    def stage(self) -> str:
        """The prefix of its loaders' places."""
        function = function_of(self._trainer)
        return VALIDATION if function == FIT else function

    @property
    def _val_loop(self) -> Any:
        return compat.validation_loop(self._trainer)

    def _trackers(self) -> list[TrackedLoader]:
        places = [f"{self.stage}/{number}" for number in range(self._val_loop.num_dataloaders)]
        found = [self._loaders.trackers.get(place) for place in places]
        return [tracker for tracker in found if isinstance(tracker, TrackedLoader)]

    def state_dict(self) -> dict[str, object]:
        """Return the state of the run between two batches, without its loaders' places."""
        before = compat.before_validation(self._trainer, self.first_loop_iter)
        ahead = self._ahead.state_dict() if self._ahead is not None else None
        return {**runs.run_state(self._val_loop), **before, "ahead": ahead}

    def num_consumed(self) -> dict[str, int]:
        """Return how many batches of each loader in use are consumed, by its place."""
        if self._ahead is not None:  # its batch is fetched again
            return self._ahead.num_out
        current = runs.current_loader(self._val_loop)
        iterations = {number: tracker.iteration for number, tracker in enumerate(self._trackers())}
        in_use = {number: one for number, one in iterations.items() if one is not None and current in (None, number)}
        return {f"{self.stage}/{number}": one.num_out for number, one in in_use.items()}

    def prepare(self, state: Mapping[str, object]) -> None:
        """Set up the run again, at the place of `state`. Call this before the random states are restored.

        The loaders have their places already. They are requested here if they are not set up, and the first of them
        does not begin if a later one was current.
        """
        compat.set_up_validation(self._trainer)
        self._trainer.validating = True
        self.reset(state, self._val_loop.reset)
        self._trainer.training = True

    def reset(self, state: Mapping[str, Any], original: Callable[[], None]) -> None:
        """Begin to iterate at the place of `state`. `original` is the loop's own reset."""
        number, ahead = state["loader"], state.get("ahead")
        first = self._trackers()[0]
        if ahead is not None:
            self._loaders.load_held(ahead["held"])
            set_rng_state(ahead["rng"])
        self.watch_first_fetch()
        with first.owner.holding_back() if number else contextlib.nullcontext():
            original()
        with self._loaders.iterated_by_trainer():
            runs.load_run_state(self._val_loop, state)

    def watch_first_fetch(self) -> None:
        """Note the state before the very first fetch. Without a length, it comes while the loop is reset."""
        for tracker in self._trackers():
            tracker.owner.call_before_first_batch(self._note_first_fetch)

    def _note_first_fetch(self) -> None:
        self.is_ahead = runs.has_no_length(self._val_loop)
        if self.is_ahead:
            self.note_fetch()

    def note_fetch(self) -> None:
        """Note the state right before a batch is fetched ahead of its step."""
        trackers = {f"{self.stage}/{number}": tracker for number, tracker in enumerate(self._trackers())}
        iterations = {place: tracker.iteration for place, tracker in trackers.items()}
        self._ahead = _BeforeFetch(
            num_out={place: 0 if one is None else one.num_out for place, one in iterations.items()},
            held={place: tracker.held.state_dict() for place, tracker in trackers.items()},
            rng=rng_state(),
        )

    @contextlib.contextmanager
    def continued(self, state: Mapping[str, Any], begin: Callable[[], None]) -> Iterator[None]:
        """Inside the context, let the loop continue the run that `prepare` has set up, instead of starting one.

        Args:
            state: A result of `state_dict`.
            begin: Called in place of the hooks at the start of a run.
        """
        val_loop = self._val_loop
        during, self.first_loop_iter = runs.first_loop_iter(self._trainer), state["first_loop_iter"]
        self._is_known, self._begun_with = None, _never_carried(self._trainer)
        runs.set_first_loop_iter(self._trainer, self.first_loop_iter)  # the training loop keeps it from here

        def start() -> None:
            runs.set_first_loop_iter(self._trainer, during)
            swap_for_validation(self._trainer)
            begin()

        patches = Patches()
        for name in ("setup_data", "reset"):
            patches.wrap(val_loop, name, lambda original: lambda: None)
        patches.wrap(val_loop, "on_run_start", lambda original: start)
        runs.store_once(val_loop, patches, fetched_before=state["fetched"], loader=state["loader"])
        self.is_continuing = True
        try:
            with zeroed(self._trainer):
                yield
        finally:
            self.is_continuing = False
            patches.undo()


_GRADIENTS = "torch.is_grad_enabled()"


def _never_carried(trainer: Trainer) -> dict[str, object]:
    """Return, by name, the user's hooks on modules, the modules, and the environment."""
    found: dict[str, object] = {
        _GRADIENTS: False,  # what Lightning sets for an evaluation
        **{f"os.environ[{name!r}]": value for name, value in os.environ.items()},
    }
    for path, module in trainer.lightning_module.named_modules(prefix="module"):
        found[path] = id(module)  # metrics have an operator in place of a comparison
        hooks = of_hooks(path, module)
        found |= {name: one for name, one in hooks if not str(getattr(one, "__module__", "")).startswith("torch.")}
    return found


def _changed(then: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    return {each for each in then.keys() | now.keys() if then.get(each) != now.get(each)}


@contextlib.contextmanager
def zeroed(trainer: Trainer) -> Iterator[None]:
    """Inside the context, skip the hook that zeroes gradients before a validation run: it ran before the save."""
    patches = Patches()
    patches.wrap(trainer.lightning_module, "on_validation_model_zero_grad", lambda original: lambda: None)
    try:
        yield
    finally:
        patches.undo()


class CommonPace:
    """Decides before which batches of an evaluation the ranks meet, to save there; a collective.

    Args:
        ranks: The ranks that evaluate together.
        batch: The batch that comes first when the evaluation begins, or continues.
        num_batches: How many batches this rank has in all; infinite if that is not known.
    """

    def __init__(self, ranks: Ranks, batch: int, num_batches: float) -> None:
        self._ranks = ranks
        self._num_common: float = min(self._ranks.to_all("the number of batches", num_batches))
        self._began = batch, perf_counter()
        self._next = batch if self._can_meet(batch) else math.inf

    def _can_meet(self, batch: float) -> bool:
        return batch < self._num_common < math.inf

    def is_here(self, batch: int) -> bool:
        """Return whether the ranks meet before this batch."""
        return batch == self._next

    def meet_again(self, batch: int, in_seconds: float) -> None:
        """Decide where the ranks meet next; a collective.

        Args:
            batch: The batch before which they are.
            in_seconds: In how many seconds the next autosave is due. Only rank 0's counts.
        """
        first, began = self._began
        num_more = 1
        if batch > first:  # then rank 0 knows how long a batch takes
            seconds_per_batch = max((perf_counter() - began) / (batch - first), 1e-9)
            num_more = max(math.ceil(in_seconds / seconds_per_batch), 1)
        following = batch + num_more
        self._next = self._ranks.from_first("where to meet", following if self._can_meet(following) else math.inf)

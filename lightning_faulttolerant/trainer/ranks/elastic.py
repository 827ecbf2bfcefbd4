"""A run that continues with a different number of ranks: the state that each rank gets from the ranks that saved.

The order of the epoch in progress resumes exactly. State that the ranks share (metrics, logged values, gradients) is
merged. Random generators belong to ranks: the numbers they would have drawn are lost with them.

The random generators of a rank when a different number of ranks continues, and what the report says about them.

A rank that existed before continues with its own. The others begin with states that follow from rank 0's.

An open accumulation window is continued with gradients that are scaled for the new number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from sys import maxsize
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.remaining import RankShare
from lightning_faulttolerant.loader.resized import DEAL, between, is_dealt_stream, state_for_others
from lightning_faulttolerant.state.generators import fresh_held_state, fresh_rng_state, of_devices_here
from lightning_faulttolerant.state.metrics import merged_gradients, merged_metrics
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.logged_results import merged_results
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders
from lightning_faulttolerant.trainer.position import (
    BATCH_END,
    EPOCH_END,
    IN_VALIDATION,
    VALIDATION,
    VALIDATION_END,
    TrainerPosition,
)
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT
from lightning_faulttolerant.trainer.run.fingerprint import tensor_parallel_size
from lightning_faulttolerant.trainer.save.part import Part, for_other_ranks


def generators_of_rank(states: Sequence[State], rank: int) -> dict[str, Any]:
    """Return the parts ``rng`` and ``held`` of one rank's state.

    Args:
        states: The states of all ranks that saved.
        rank: The number of the rank.
    """
    held = [{f"{kind}/{p}": s for kind, p, s in _flat(state["held"])} for state in states]
    return {
        "rng": _own_or_fresh([of_devices_here(s["rng"]) for s in states], rank, fresh_rng_state),
        "held": _nested(_own_or_fresh(held, rank, fresh_held_state)),
    }


def other_draws(function: str) -> str:
    """Return the line of a report with seeded samples. `function` is what draws besides them."""
    return (
        f"random draws of {function} itself, such as dropout, differ from the uninterrupted run: a new rank draws "
        "from its own states"
    )


LOST_GENERATORS = (
    "random generators of the ranks and of their workers, which determine augmentations and dropout: new ranks draw "
    'from their own states. With worker_rng="per_sample", the augmentation of a sample is the same for any number of '
    "ranks"
)
"""The line of a report without seeded samples."""


def ranks_in_words(number: int) -> str:
    """Return a number of ranks in words."""
    return "one rank" if number == 1 else f"{number} ranks"


def _own_or_fresh(
    states: Sequence[Mapping[str, bytes]], rank: int, fresh: Callable[..., dict[str, bytes]]
) -> dict[str, bytes]:
    """Return the saved state of this rank number, or one that no rank had, unless all ranks had the same."""
    if rank < len(states):
        return dict(states[rank])
    if len(states) > 1 and all(state == states[0] for state in states):
        return dict(states[0])
    return fresh(states[0], "rank", rank)


def _flat(held: State) -> Iterator[tuple[str, str, bytes]]:
    yield from (("objects", path, state) for path, state in held["objects"].items())
    for place, states in held["loaders"].items():
        yield from ((f"loaders/{place}", path, state) for path, state in states.items())


def _nested(flat: Mapping[str, bytes]) -> dict[str, Any]:
    held: dict[str, Any] = {"objects": {}, "loaders": {}}
    for name, state in flat.items():
        kind, _, rest = name.partition("/")
        if kind == "objects":
            held["objects"][rest] = state
        else:
            stage, index, path = rest.split("/", 2)
            held["loaders"].setdefault(f"{stage}/{index}", {})[path] = state
    return held


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The samples of the gradients that were carried over.

    Args:
        num_samples: The number of samples of all ranks together; ``None`` if unknown.
        num_in_window: The number of samples in a whole window.
    """

    num_samples: int | None
    num_in_window: int

    @classmethod
    def of(cls, share: Mapping[str, Any] | None, *, num_batches: int, accumulated: int) -> Window:
        """Return the window that is open after `num_batches` of an epoch, with `accumulated` batches per window."""
        if share is None:
            return cls(num_samples=None, num_in_window=1)
        at_once = RankShare(**share).samples_at_once
        return cls(num_samples=num_batches % accumulated * at_once, num_in_window=accumulated * at_once)

    def scale(self, *, share: RankShare | None, num_batches: int, accumulated: int) -> tuple[float, str]:
        """Return the factor for the mean of the ranks' gradients, and a note on what is inexact then, if anything.

        Each sample keeps its share in the mean of its window.

        Args:
            share: How samples are dealt to the ranks now.
            num_batches: The number of finished batches of the epoch, as if these ranks had run all of it.
            accumulated: The number of batches in a window.
        """
        if share is None or self.num_samples is None:
            return 1.0, "gradients of an open accumulation window: the number of their samples is not known"
        num_in_window = accumulated * share.samples_at_once
        if self.num_samples == 0 and num_in_window != self.num_in_window:
            return 1.0, (
                "gradients that are kept without an open accumulation window, as in manual optimization: the number "
                "of their batches is not known, and the global batch has other samples now"
            )
        expected = num_batches % accumulated * share.samples_at_once
        scale = self.num_in_window / num_in_window
        if expected == self.num_samples:
            return scale, ""
        total = self.num_samples + num_in_window - expected
        return scale, (
            f"gradients of an open accumulation window: they cover {self.num_samples} samples, but with these ranks "
            f"they would cover {expected}, so the next optimizer step covers {total} samples with the weights of a "
            f"step over {num_in_window}"
        )


State = Mapping[str, Any]


class Resized:
    """The state of one rank of a run that was saved by a different number of ranks.

    Args:
        trainer: The trainer of the run that continues.
        parts: The parts of a state.
        states: The states of all ranks that saved.
        position: Where these ranks were.
        fingerprint: The saved run's fingerprint.
        rank: The number of this rank.
        apart: The names of state that differed between the ranks that saved, and that is not merged.
        is_per_sample: Whether samples are seeded one by one.

    Raises:
        NotExactError: If the remaining samples can't be determined, whatever is allowed.
    """

    def __init__(
        self,
        trainer: Trainer,
        parts: Sequence[Part],
        states: Sequence[State],
        position: TrainerPosition,
        fingerprint: State,
        *,
        rank: int,
        apart: Sequence[str],
        is_per_sample: bool,
    ) -> None:
        self._trainer = trainer
        self._states = states
        self._position = position
        self._accumulated: int = states[0]["trainer"]["accumulate_grad_batches"]
        self._num_batches: float = states[0]["trainer"].get("num_training_batches", float("inf"))
        self.ranks = f"{ranks_in_words(len(states))} when it was saved, {ranks_in_words(trainer.world_size)} now"
        self.lost: list[str] = []
        """State that can't be carried over."""
        differed = f"these differed between the ranks, and now come from rank 0: {', '.join(apart)}"
        self.notes = [differed] if apart else []
        """Differences from the uninterrupted run in which nothing is lost."""
        self._window: Window | None = None
        self.state = self._redistributed(parts, fingerprint, rank, is_per_sample=is_per_sample)

    def _redistributed(
        self, parts: Sequence[Part], fingerprint: State, rank: int, *, is_per_sample: bool
    ) -> dict[str, Any]:
        first, states, num_ranks = self._states[0], self._states, self._trainer.world_size
        if tensor_parallel_size(self._trainer) > 1:
            raise NotExactError(
                f"The checkpoint can't continue with a different number of ranks ({self.ranks}) under tensor"
                " parallelism: several ranks see the same batches, and the sums of each would be counted as if it had"
                " separate batches. Start with as many ranks as before."
            )
        if self._position.where == IN_VALIDATION:
            raise NotExactError(
                f"The checkpoint was saved {self._position}. A different number of ranks can't continue there "
                f"({self.ranks}). Start with as many ranks as before, at least until the validation run ends. With "
                'elastic=True, or with worker_rng="per_sample", its start is saved instead, for any number of ranks.'
            )
        module: LightningModule = self._trainer.lightning_module
        loaders = self._loaders(fingerprint["loaders"])
        metrics, lost = merged_metrics([s["metrics"] for s in states], module, rank=rank)
        self.lost += lost
        self._tell_rng(is_per_sample=is_per_sample)
        results = merged_results([s["results"] for s in states], rank=rank, num_ranks=num_ranks)
        saved_accumulation = fingerprint["trainer"]["accumulate_grad_batches"]
        accumulation = self._trainer.accumulate_grad_batches
        if saved_accumulation != accumulation:
            first = {**first, "trainer": {**first["trainer"], "accumulate_grad_batches": accumulation}}
        merged = {
            **generators_of_rank(states, rank),
            "loaders": loaders,
            "gradients": self._gradients(),
            "metrics": metrics,
            "results": results,
        }
        return for_other_ranks(parts, first, merged)

    def _tell_rng(self, *, is_per_sample: bool) -> None:
        reason = "sums over ranks have a different order, so their last bits differ"
        self.notes.append(f"{self.ranks}: {reason}")
        if is_per_sample:
            self.notes.append(other_draws("the training"))
        else:
            self.lost.append(LOST_GENERATORS)

    def _loaders(self, fingerprints: State) -> dict[str, Any]:
        first = self._states[0]["loaders"]
        reasons = [f"{place} was saved without a position" for place in first["left"]]
        reasons += [f"{place} keeps its own state" for place in first["own"]]
        training = [place for place in first["places"] if place.startswith(TRAIN)]
        is_begun = any(first["places"][place].get("consumed") or DEAL in first["places"][place] for place in training)
        if is_begun and len(training) > 1:
            reasons.append(f"the fit has {len(training)} training loaders, each with its own order")
        if first["ahead"] is not None:
            reasons.append(f"{training[0]} has no length, and one of its batches was fetched ahead")
        own = [(rank, state[FINGERPRINT]) for rank, state in enumerate(self._states) if FINGERPRINT in state]
        for place in training:
            ranks = [r for r, of in own if of.get(place, {}).get("dataset") != fingerprints[place].get("dataset")]
            reasons += [f"{place} had another data set on rank {r} than on rank 0" for r in ranks]
        places = {}
        num_left = self._num_batches - self._position.batch
        for place, state in first["places"].items():
            states = [other["loaders"]["places"][place] for other in self._states]
            try:
                if place in training:
                    places[place] = state_for_others(states, num_left=num_left)
                elif "record" not in state or ("iterable" in state and not is_dealt_stream(state)):
                    reasons.append(f"{place} is iterable or keeps its own position")
                else:
                    places[place] = between(state)
            except NotExactError as error:
                reasons.append(f"{place}: {error}")
        if reasons:
            raise NotExactError(
                f"The checkpoint can't continue with a different number of ranks ({self.ranks}): {'; '.join(reasons)}."
                " Some samples would come twice, others never. Start with as many ranks as before."
            )
        return {**first, "places": places}

    def _gradients(self) -> dict[str, Any]:
        merged = merged_gradients([state["gradients"] for state in self._states])
        if not merged:
            return {}
        if has_shards(self._trainer.strategy) or not all(isinstance(g, Tensor) for g in merged.values()):
            raise NotExactError(
                f"The checkpoint can't continue with a different number of ranks ({self.ranks}): it was saved inside an"
                " open accumulation window, whose gradients are in shards, and shards of gradients can't be split "
                "again. Continue with as many ranks as before, or from a checkpoint after an optimizer step."
            )
        places = self._states[0]["loaders"]["places"]
        records = [state["record"] for place, state in places.items() if place.startswith(TRAIN)]
        share = records[0].get("share") if records and records[0] is not None else None
        self._window = Window.of(share, num_batches=self._position.batch, accumulated=self._accumulated)
        return merged

    @property
    def was_inside_an_epoch(self) -> bool:
        """Whether the saved run was inside an epoch, with batches done and batches left."""
        return 0 < self._position.batch < self._num_batches

    def fit_in(self, loaders: Loaders) -> TrainerPosition:
        """Set Lightning's counters to the next batch, as if these ranks had run the whole epoch.

        Call it when the loaders are set up and nothing is fetched yet.

        Returns:
            The position of that batch.

        Raises:
            NotExactError: If the rest of the epoch yields no batch, or more batches than an epoch may have.
        """
        trainer, position = self._trainer, self._position
        now = trainer.num_training_batches
        deal = loaders.deal()
        if deal is not None and deal.num_batches == 0 and deal.begin < deal.end:
            raise NotExactError(
                f"{deal.end - deal.begin} samples of the epoch are left, too few for a batch on each rank, and "
                "drop_last drops them. The epoch would end without the work that is due after its last batch. "
                "Continue with as many ranks as before."
            )
        if compat.step_fetches(trainer) and position.batch:
            raise NotExactError(
                "training_step takes the dataloader_iter and fetches by itself, so the batches of the epoch can't be "
                "counted for a different number of ranks. Continue with as many ranks as before."
            )
        num_left = 0 if position.where == EPOCH_END else now if deal is None else deal.num_batches
        if num_left > now:
            raise NotExactError(
                f"{num_left} batches of the epoch are left, and limit_train_batches={trainer.limit_train_batches!r}"
                f" ends an epoch after {now}: it counts the batches of one rank. Continue with as many ranks as before,"
                " or pass a share of the epoch, such as 0.5."
            )
        done = int(now - num_left)
        compat.set_num_batches_done(trainer, done)
        combined = self.state["loaders"]["combined"]
        if combined is not None:
            own = {"index": done, "fetched": done, "batch_index": done}
            self.state["loaders"] = {**self.state["loaders"], "combined": {**combined, **own}}
        self._fit_gradients(loaders, done)
        self._fit_step(done, now)
        return replace(position, batch=done)

    def _fit_step(self, done: int, now: float) -> None:
        """Report if a batch that is still to be closed ended a window for the ranks that saved, or only for us."""
        batch = self._position.batch
        had_stepped = batch % self._accumulated == 0 or batch == self._num_batches
        steps = done % self._state_accumulation() == 0 or done == now
        if self._position.where in (BATCH_END, VALIDATION, VALIDATION_END) and had_stepped != steps:
            self.lost.append(
                "the loggers' step, and schedulers that wait for a value: the last batch before the checkpoint"
                f" {'ended' if had_stepped else 'did not end'} an accumulation window of the ranks that saved, and"
                f" {'ends' if steps else 'does not end'} one of these ranks"
            )

    def _fit_gradients(self, loaders: Loaders, done: int) -> None:
        if self._window is None:
            return
        scale, line = self._window.scale(
            share=loaders.share(), num_batches=done, accumulated=self._state_accumulation()
        )
        self.state["gradients"] = {name: gradient * scale for name, gradient in self.state["gradients"].items()}
        if line:
            self.lost.append(line)

    def _state_accumulation(self) -> int:
        number: int = self.state["trainer"]["accumulate_grad_batches"]
        return number

    @contextmanager
    def as_due(self, where: str) -> Iterator[None]:
        """Let the loop do what was due after the checkpoint's batch, by the count of the ranks that saved."""
        trainer = self._trainer
        kept = trainer.val_check_batch
        saved = self._states[0]["trainer"].get("val_check_batch")
        if where in (BATCH_END, VALIDATION) and kept is not None and saved not in (None, float("inf")):
            is_total = trainer.check_val_every_n_epoch is None
            batch = compat.num_begun_in_all(trainer) if is_total else self._position.batch
            trainer.val_check_batch = 1 if where == VALIDATION or batch % int(saved) == 0 else maxsize
        try:
            yield
        finally:
            trainer.val_check_batch = kept

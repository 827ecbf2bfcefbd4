"""The random generators of a rank when another number of ranks continues, and what the report says about them.

A rank that existed before continues with its own. The others begin with states that follow from rank 0's.

An open accumulation window is continued with gradients that are scaled for the new number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.loader.remaining_batches import RankShare
from lightning_faulttolerant.state.fresh import fresh_held_state, fresh_rng_state, of_devices_here

State = Mapping[str, Any]


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
        f"random draws of {function} itself, such as dropout, are those of other ranks than in the uninterrupted run: a"
        " rank that was not there draws from states of its own"
    )


LOST_GENERATORS = (
    "random generators of the ranks and of their workers, which give the augmentation of samples and dropout: ranks"
    ' that were not there draw from states of their own. With worker_rng="per_sample" the augmentation of a sample is'
    " the same for any number of ranks"
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
            return 1.0, "gradients of an open accumulation window: how many samples they are of is not known"
        num_in_window = accumulated * share.samples_at_once
        if self.num_samples == 0 and num_in_window != self.num_in_window:
            return 1.0, (
                "gradients that are kept where no accumulation window is open, as manual optimization does: how many"
                " batches they are of is not known, and a batch of all ranks has other samples now"
            )
        expected = num_batches % accumulated * share.samples_at_once
        scale = self.num_in_window / num_in_window
        if expected == self.num_samples:
            return scale, ""
        total = self.num_samples + num_in_window - expected
        return scale, (
            f"gradients of an open accumulation window: they are of {self.num_samples} samples, where the windows of"
            f" these ranks would have {expected}, so that the next optimizer step is one over {total} samples with the"
            f" weights of a step over {num_in_window}"
        )

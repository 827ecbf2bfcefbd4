"""The open accumulation window of a run that continues with another number of ranks: what its gradients weigh then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.loader.dealt import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What the gradients that were carried over are made of.

    Args:
        num_samples: How many samples of all ranks together; ``None`` where that is not known.
        num_in_window: How many a whole window has.
    """

    num_samples: int | None
    num_in_window: int

    @classmethod
    def of(cls, share: Mapping[str, Any] | None, *, num_batches: int, accumulated: int) -> Window:
        """Return the window that is open after `num_batches` of an epoch, of `accumulated` each."""
        if share is None:
            return cls(num_samples=None, num_in_window=1)
        at_once = Share(**share).samples_at_once
        return cls(num_samples=num_batches % accumulated * at_once, num_in_window=accumulated * at_once)

    def scale(self, *, share: Share | None, num_batches: int, accumulated: int) -> tuple[float, str]:
        """Return by what the mean of the ranks' gradients is to be multiplied, and what is not right then, if anything.

        Each sample has its share of the mean of the window that it is in.

        Args:
            share: How samples come to the ranks now.
            num_batches: How many batches of the epoch are done, had these ranks run all of it.
            accumulated: How many a window has.
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

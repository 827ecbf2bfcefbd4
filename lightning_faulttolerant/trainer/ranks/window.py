"""The open accumulation window of a run that continues with another number of ranks: how its gradients are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.loader.dealt import RankShare


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

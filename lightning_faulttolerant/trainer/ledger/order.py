"""The samples in a training batch, as the index samplers of its loaders have yielded them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.loader.index_record import IndexRecord
from lightning_faulttolerant.trainer.compat import fetches_ahead
from lightning_faulttolerant.trainer.ledger.digests import digest
from lightning_faulttolerant.trainer.loaders.fetched_ahead import PrefetchState
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders

Places = Mapping[str, tuple[Any, int]]
"""Each loader's iteration, and how many of its batches have come out."""


class LastBatchIndices:
    """Finds the indices of the batch that was fetched last.

    Args:
        trainer: The trainer of the fit.
        loaders: The loaders of the fit.
    """

    def __init__(self, trainer: Trainer, loaders: Loaders) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._before: Places = {}

    def before_fetch(self) -> None:
        """Note the positions of the loaders: a batch has samples only from the loaders that move."""
        self._before = self._places()

    def _places(self) -> Places:
        trackers = self._loaders.trackers.items()
        training = {p: t.iteration for p, t in trackers if p.startswith(TRAIN) and not t.is_gone}
        return {place: (iteration, iteration.num_out) for place, iteration in training.items() if iteration is not None}

    def of_batch(self) -> str | None:
        """Return the digest of the indices of the current batch; ``None`` if they are not known."""
        if fetches_ahead(self._trainer):
            before, after = _marked(self._loaders.mark_before), _marked(self._loaders.last_mark)
        else:
            before, after = self._before, self._places()
        indices = {}
        for place, (iteration, num_out) in after.items():
            if _same(before.get(place), iteration, num_out):
                continue
            found = _indices(getattr(iteration, "record", None), num_out - 1)
            if found is None:
                return None
            indices[place] = found[0]
        return digest(indices) if indices else None


def _marked(mark: PrefetchState | None) -> Places:
    return {} if mark is None else mark.iterations


def _same(before: tuple[Any, int] | None, iteration: Any, num_out: int) -> bool:
    if before is None or before[0] is not iteration:
        return num_out == 0
    return before[1] == num_out


def _indices(record: IndexRecord | None, number: int) -> tuple[Any] | None:
    """Return the index batch of that number in an iteration, alone in a tuple, if it is still known."""
    if record is None:
        return None
    begin = record.handed_out - len(record.recent)
    return (record.recent[number - begin],) if begin <= number < record.handed_out else None

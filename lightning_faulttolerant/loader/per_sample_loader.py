"""A loader that seeds each sample: its state, and how its iterations are created and resumed.

The state holds no worker's state and no worker's turn. A resumed iteration begins with the next batch directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.index_record import IndexPlan, IndexRecord, plan_from_state, record_state
from lightning_faulttolerant.loader.index_side import IndexSide
from lightning_faulttolerant.loader.per_sample import PerSampleDataset, SampleSeeds


class SeededSamples:
    """Seeds the samples of one loader through its iterations.

    Args:
        loader: The user's loader.
        seeds: The source of the seeds.
    """

    def __init__(self, loader: DataLoader[Any], seeds: SampleSeeds) -> None:
        self._seeds = seeds
        self._is_batched = loader.batch_sampler is not None
        self._num_workers = loader.num_workers
        self._had_workers = [loader.num_workers]  # of this process and the earlier ones, each number once
        self.dataset = PerSampleDataset(loader.dataset, loader.collate_fn, is_batched=self._is_batched)

    @property
    def has_other_workers(self) -> bool:
        """Whether the run had another number of workers before a resume."""
        return len(self._had_workers) > 1

    def begin(self, *, is_resumed: bool) -> int:
        """Note that an iteration begins; return the number of earlier ones.

        Args:
            is_resumed: Whether it is the rest of an iteration, or not one of those that are counted.
        """
        return self._seeds.begin(is_resumed=is_resumed)

    def make(
        self, loader: DataLoader[Any], index_side: IndexSide, make_iterator: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        """Create torch's iterator over a data set that seeds before each sample. The loader's attributes stay."""
        stand_in = self.dataset.stand_in(loader, collates=not self._num_workers)
        with index_side.opened_before(), stand_in:
            self._seeds.seed_workers(loader.generator)
            return make_iterator()

    def state_dict(self, record: IndexRecord | None = None, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of the loader: in the iteration of `record`, or between iterations."""
        num_begun = self._seeds.num_begun if record is None else record.epoch + 1
        return {
            "consumed": consumed,
            "drop": 0,
            "record": None if record is None else record_state(record),
            "workers": None,
            "per_sample": {**self._seeds.state_dict(num_begun=num_begun), "had_workers": list(self._had_workers)},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the seeds in `state_dict`. A state of a loader without seeded samples has none."""
        state = state_dict.get("per_sample")
        if state is not None:
            self._seeds.load_state_dict(state)
            self._had_workers = [self._num_workers, *(n for n in state["had_workers"] if n != self._num_workers)]

    def plan(self, record: Mapping[str, object], consumed: int) -> IndexPlan:
        """Return the plan to continue after `consumed` batches of `record`.

        If the run never had workers, the sampler draws a batch again that was fetched ahead.
        """
        return plan_from_state(record, consumed, draws_again=not any(self._had_workers), is_batched=self._is_batched)

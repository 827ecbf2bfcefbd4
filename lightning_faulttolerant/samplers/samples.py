"""A position in an order of samples: the base of the samplers that yield one index after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from lightning_faulttolerant.samplers.deal import indices_of
from lightning_faulttolerant.samplers.order import SampleOrder, check_order, checked_seed, order_of
from lightning_faulttolerant.samplers.progress import Interruptible
from lightning_faulttolerant.samplers.state import (
    VERSION,
    SamplerPosition,
    check_not_too_far,
    check_same,
    read_position,
)


class InterruptibleSamples(Interruptible):
    """An interruptible sampler of samples.

    Args:
        dataset: The data set, or its length.
        shuffle: Whether each epoch has its own random order.
        seed: The seed of the orders.
        order: The name of an order.
        more: Arguments of `Interruptible`.
    """

    kind: str

    def __init__(self, dataset: Sized | int, *, shuffle: bool, seed: int, order: str, **more: Any) -> None:
        check_order(order)
        self.dataset = range(dataset) if isinstance(dataset, int) else dataset
        self.shuffle, self.seed = shuffle, checked_seed(seed, order=order)
        self.order_name = order
        self._order: tuple[tuple[Any, ...], SampleOrder] | None = None
        super().__init__(unit="samples", **more)

    def _length(self) -> int:
        return len(self.dataset)

    def order(self, epoch: int | None = None) -> SampleOrder:
        """Return the order of an epoch, for all ranks together; by default of the current epoch."""
        epoch = self.epoch if epoch is None else epoch
        key = (self._length(), self.seed, epoch, self.shuffle, self.order_name)
        if self._order is None or self._order[0] != key:
            self._order = None  # one permutation at a time
            length, seed, shuffle = self._length(), self.seed, self.shuffle
            self._order = key, order_of(self.order_name, length=length, seed=seed, epoch=epoch, shuffle=shuffle)
        return self._order[1]

    def _iterate(self, skip: int) -> Iterator[int]:
        return indices_of(self.order(), self.deal(), skip=skip, at_end=self._note_end)

    def _order_arguments(self) -> dict[str, Any]:
        return {
            "dataset_len": self._length(),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order": self.order_name,
            "drop_last": self.drop_last,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position. The end of an epoch is the beginning of the next one.

        The state counts what all ranks have consumed, and is the same on each. ``progress`` has the meaning of the
        original's state: this rank's part, in samples.
        """
        epoch, consumed = self._position()
        return {
            "version": VERSION,
            "kind": self.kind,
            "epoch": epoch,
            "global_consumed": consumed,
            "progress": self.progress if consumed else 0,
            "num_replicas": self.place().num_replicas,
            **self._order_arguments(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a state of `state_dict`, of this package or of the original library.

        Args:
            state_dict: A state of this kind of sampler, or the original's ``{"progress", "epoch"}``. The latter's count
                is assumed to be of the current number of ranks.
            strict: Whether other data, seed, shuffle, order, or drop_last are an error. Otherwise they are logged, and
                only the position is kept.

        Raises:
            FingerprintMismatchError: If one of these differs, and `strict`. Both values are shown.
            AdvancedTooFarError: If the position is after the epoch's end.
            ValueError: If it is not a state of this kind of sampler.
        """
        position = read_position(state_dict, kind=self.kind)
        if position.is_original:
            consumed = position.consumed * self.place().num_replicas
            check_not_too_far(position.consumed, self.deal(0).num_own, "samples of each rank")
        else:
            check_same(state_dict, self._order_arguments(), strict=strict)
            consumed = position.consumed
            check_not_too_far(consumed, -(-self._length() // position.num_replicas) * position.num_replicas, "samples")
        self._check_loadable(position)
        self._go_to(position.epoch, consumed)

    def _check_loadable(self, position: SamplerPosition) -> None:
        """Raise or warn about any other obstacle to continuing from there."""

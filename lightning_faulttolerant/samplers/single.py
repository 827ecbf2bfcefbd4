"""A sampler for a data set that is this rank's own, with a position that can be saved and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Sized

from torch.utils.data import Sampler

from lightning_faulttolerant.samplers.order import OrderName
from lightning_faulttolerant.samplers.progress import LenMode
from lightning_faulttolerant.samplers.samples import InterruptibleSamples


class InterruptibleSampler(InterruptibleSamples, Sampler[int]):
    """Give all samples of a data set, in an order that can be continued with from any position.

    It deals nothing to ranks: it is for a data set that holds this rank's own samples, as `DistributedShardedDataset`
    does, or for one rank. In a loop of one's own, call `advance` for what was consumed; under ``FaultTolerance`` it is
    not called. Lightning would put a distributed sampler around it where there are several ranks: build the Trainer
    with ``use_distributed_sampler=False``.

    Args:
        dataset: The data set, of which only the length is asked for, or that length itself.
        num_replicas: Without effect, as in the original library, and announced.
        rank: Without effect, as in the original library, and announced.
        shuffle: Whether each epoch comes in a random order of its own.
        seed: Of the orders.
        drop_last: Without effect, as in the original library, and announced: nothing is dealt, so nothing is left over.
        order: ``"torch"``: a permutation of torch's, 8 bytes a sample; ``"feistel"``: computed where it is needed, in
            constant memory and with a constant time to seek.
        len_mode: What ``len`` is after a resume: ``"full"``: that of the whole epoch; ``"remaining"``.

    Raises:
        ValueError: If an argument has no such value.

    Example:
        >>> sampler = InterruptibleSampler(range(5), shuffle=False)
        >>> sampler.advance(2)
        >>> again = InterruptibleSampler(range(5), shuffle=False)
        >>> again.load_state_dict(sampler.state_dict())
        >>> list(again)
        [2, 3, 4]
    """

    kind = "single"

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        order: OrderName = "torch",
        len_mode: LenMode = "full",
    ) -> None:
        given = {"num_replicas": num_replicas is not None, "rank": rank is not None, "drop_last": drop_last}
        without_effect = [name for name, is_given in given.items() if is_given]
        if without_effect:
            warnings.warn(
                f"InterruptibleSampler gives all samples of its data set: {', '.join(without_effect)} has no effect. To"
                " deal one data set to several ranks, use InterruptibleDistributedSampler.",
                stacklevel=2,
            )
        InterruptibleSamples.__init__(
            self,
            dataset,
            shuffle=shuffle,
            seed=seed,
            order=order,
            num_replicas=1,
            rank=0,
            drop_last=False,
            len_mode=len_mode,
        )

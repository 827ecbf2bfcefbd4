"""A sampler for a rank's own data set, with a position that can be saved and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Sized

from torch.utils.data import Sampler

from lightning_faulttolerant.samplers.order import OrderName
from lightning_faulttolerant.samplers.progress import LenMode
from lightning_faulttolerant.samplers.samples import InterruptibleSamples


class InterruptibleSampler(InterruptibleSamples, Sampler[int]):
    """Yield all samples of a data set, in an order that can be continued from any position.

    It deals nothing to ranks. Use it with one rank, or with a data set that holds only this rank's samples, as
    `DistributedShardedDataset` does. In your own loop, call `advance` with the number of samples consumed; with
    ``FaultTolerance``, don't call it. With several ranks, Lightning would wrap it in a distributed sampler: create the
    Trainer with ``use_distributed_sampler=False``.

    Args:
        dataset: The data set, of which only the length is read, or that length itself.
        num_replicas: No effect, as in the original library; a warning says so.
        rank: No effect, as in the original library; a warning says so.
        shuffle: Whether each epoch has its own random order.
        seed: The seed of the orders.
        drop_last: No effect, as in the original library; a warning says so. Nothing is dealt, so nothing is left over.
        order: ``"torch"``: a permutation of torch's, 8 bytes a sample. ``"feistel"``: computed on demand, in constant
            memory and with a constant time to seek.
        len_mode: The value of ``len`` after a resume. ``"full"``: the length of the whole epoch; or ``"remaining"``.

    Raises:
        ValueError: If an argument has an invalid value.

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

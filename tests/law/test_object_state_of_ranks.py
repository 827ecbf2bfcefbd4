"""The law for attributes of user objects that training changes on two ranks: each rank has its own."""

from __future__ import annotations

import signal

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.object_states import EDGE, FIRST_EPOCH, LATER_EPOCH, slowly
from tests.rank_runs import RankNet, Slowly, assert_ranks_resume, for_ranks, rank_fit, shuffled
from tests.runs import each_num_workers
from tests.stateful_objects import AveragedWeights, CountingDataset, Curriculum, Outputs, SetsEpoch, Together

pytestmark = for_ranks

Fault = Callback | list[Callback]

# Early in a slow run: the ranks agree on a batch for the stop while they keep training.
STOPPED = pytest.param([Slowly(), KillAt(3, signum=signal.SIGTERM)], id="stopped")


class RankOutputs(Outputs):
    """Each rank keeps the losses of its batches, and rank 0 counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1 if self.global_rank else 2
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.num_steps)


def five_batches() -> DataLoader[Tensor]:
    """Return a loader of 5 batches a rank."""
    return shuffled(num_batches=5)


each_rank_fault = pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE), slowly(STOPPED)])


@each_rank_fault
def test_each_rank_has_its_outputs(fault: Fault) -> None:
    """A list and a counter that differ between ranks are restored on the same rank."""
    assert_ranks_resume(rank_fit(2, module=RankOutputs, train=five_batches), [fault])


def test_each_rank_needs_its_outputs() -> None:
    """Without the object state the ranks differ from the uninterrupted run, and the attributes are named."""
    fit = rank_fit(2, module=RankOutputs, train=five_batches)
    with pytest.raises(NotTheSame, match=r"Left out: .*module\.num_steps"):
        assert_ranks_resume(fit, [KillAt(8)], without="objects")


@each_rank_fault
def test_all_at_once(fault: Fault) -> None:
    """The state of all these modules continues on both ranks."""
    strategy = "ddp_find_unused_parameters_true"
    assert_ranks_resume(rank_fit(2, module=Together, train=five_batches, strategy=strategy), [fault])


@pytest.mark.parametrize("fault", [slowly(LATER_EPOCH), slowly(EDGE), STOPPED])
def test_averaged_weights(fault: Fault) -> None:
    """A callback's average of the weights continues on both ranks."""
    assert_ranks_resume(rank_fit(2, module=RankNet, train=five_batches, users=lambda: [AveragedWeights()]), [fault])


@each_num_workers
@pytest.mark.parametrize("fault", [LATER_EPOCH, EDGE])
def test_data_sets(fault: Fault, num_workers: int) -> None:
    """Values that hooks set on a data set, and its workers' counts, are restored on both ranks."""

    class Counted(Curriculum, CountingDataset):
        """Has a level, and counts in each process."""

        def __init__(self) -> None:
            CountingDataset.__init__(self)
            self.level = 0

    fit = rank_fit(
        2,
        module=SetsEpoch,
        train=lambda: DataLoader(Counted(), batch_size=2, shuffle=True, num_workers=num_workers),
    )
    assert_ranks_resume(fit, [fault])

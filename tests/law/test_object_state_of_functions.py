"""The law for state of the user in functions, classes, hooks, and Lightning's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.object_states import Own, assert_carried

items: list[float] = []
names = 0
"""Names that the package uses in its own code, too."""


class Grows(Own):
    """Creates a teacher after some training, or first of all."""

    def __init__(self, *, follows_advice: bool) -> None:
        super().__init__()
        if follows_advice:
            self.teacher = nn.Linear(4, 1)

    def factor(self, loss: Tensor) -> Any:
        if self.trainer.global_step == 3 and not hasattr(self, "teacher"):
            self.teacher = nn.Linear(4, 1)
        return 1.0 if self.trainer.global_step < 4 else 1 + self.teacher(torch.ones(4)).sum()


class Swaps(Own):
    """Swaps two layers, or calls them in another order."""

    def __init__(self, *, follows_advice: bool) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.follows_advice = follows_advice
        self.first = 0

    def factor(self, loss: Tensor) -> Any:
        if self.trainer.global_step == 3 and self.follows_advice:
            self.first = 1
        elif self.trainer.global_step == 3:
            self.twins[0], self.twins[1] = self.twins[1], self.twins[0]
        return 1 + self.twins[self.first](torch.ones(4)).sum() + 2 * self.twins[1 - self.first](torch.ones(4)).sum()


class Opens(Own):
    """Opens a file in a hook that a resume in the middle of an epoch does not call."""

    def on_train_epoch_start(self) -> None:
        self.handle = open(__file__)  # noqa: SIM115 - closed at the end of the epoch

    def on_train_epoch_end(self) -> None:
        self.handle.close()


class OpensAtTheStart(Own):
    """Opens it in a hook that each start calls."""

    def on_train_start(self) -> None:
        self.handle = open(__file__)  # noqa: SIM115 - closed at the end of the fit

    def factor(self, loss: Tensor) -> float:
        return float(self.handle.readable())

    def on_train_end(self) -> None:
        self.handle.close()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Grows, "module.teacher: a module that training has assigned; create it in __init__"),
        (Swaps, "layers that have changed places: .*let forward choose"),
        (
            lambda follows_advice: (OpensAtTheStart if follows_advice else Opens)(),
            "module.handle: .*a resume in the middle of an epoch .*; create it in on_train_start",
        ),
    ],
    ids=["grows", "swaps", "opens"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_no_process_makes_again_is_named(module: Any, reason: str) -> None:
    """What training created, moved, or opened is refused by name, with advice; who follows it continues exactly."""
    with pytest.raises(NotTheSame, match=rf"(?s)can't be resumed exactly.*{reason}"):
        assert_carried(KillAt(8), module=lambda: module(follows_advice=False))
    assert_carried(KillAt(8), KillAt(1), module=lambda: module(follows_advice=True))


class KeepsGraph(Own):
    """Lets the gradient of a batch flow back into the previous batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        before, self.last = self.last, self.layers[0](batch).mean()
        return loss if before is None else loss + before

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_gradient_into_the_batch_before_is_an_error() -> None:
    """A kept tensor has no graph after a resume: going back through it is an error, not a silent loss."""
    with pytest.raises(NotTheSame, match="from before the interruption"):
        assert_carried(KillAt(8), module=KeepsGraph)

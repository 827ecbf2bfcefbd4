"""Each strategy is supported or refused with the reason, and the documentation agrees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.trainer.ranks.strategies import REFUSED, SUPPORTED, check_strategy
from tests.runs import fit_net

TABLE = Path(__file__).parents[3] / "docs" / "strategies.md"


def made(kind: type[Strategy]) -> Strategy:
    """Return a strategy that was not set up: the packages that some strategies need are not installed."""
    return object.__new__(kind)


class Renamed(DDPStrategy):
    """A user's subclass that saves as its base does."""

    strategy_name = "renamed"


class SavesElsewhere(SingleDeviceStrategy):
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        raise AssertionError("nobody may save with it")


@pytest.mark.parametrize("kind", [*SUPPORTED, Renamed])
def test_known_strategies_are_served(kind: type[Strategy]) -> None:
    """Strategies that save in a known way must be accepted, and so must classes that derive from them."""
    check_strategy(made(kind))


class Unknown(Strategy):
    """Derives from none of the known strategies."""


Unknown.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("kind", [*REFUSED, Unknown])
def test_what_saves_by_itself_is_refused(kind: type[Strategy]) -> None:
    """XLA and DeepSpeed must be refused with the reason and the remedy, although they derive from DDPStrategy."""
    with pytest.raises(UnsupportedTrainerError, match=rf"does not support .*{kind.__name__}.*docs/strategies.md"):
        check_strategy(made(kind))


def test_strategy_with_its_own_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A subclass that saves in its own way must be refused when the fit begins, and leave no file."""
    with pytest.raises(
        UnsupportedTrainerError, match="derives from SingleDeviceStrategy and has its own save_checkpoint"
    ):
        fit_net([FaultTolerance()], tmp_path, strategy=SavesElsewhere(device="cpu"))
    assert list(tmp_path.iterdir()) == []


def test_table_has_each_strategy() -> None:
    """Each supported class has a row that says exact, each refused one its error, and so each name of the Trainer."""
    rows = [line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    text = {name: cells[1].strip() for cells in rows for name in re.findall(r"`(\w+Strategy)", cells[0])}
    assert set(text) == {kind.__name__ for kind in (*SUPPORTED, *REFUSED)}
    assert all(text[kind.__name__].startswith("exact") for kind in SUPPORTED)
    assert all("`UnsupportedTrainerError`" in text[kind.__name__] for kind in REFUSED)
    found = (StrategyRegistry[name]["strategy"] for name in StrategyRegistry.available_strategies())
    kinds = {kind for kind in found if "_graveyard" not in kind.__module__}  # those that Lightning has dropped
    assert {DDPStrategy, FSDPStrategy, DeepSpeedStrategy, XLAStrategy} <= kinds <= {*SUPPORTED, *REFUSED}
    assert ModelParallelStrategy in SUPPORTED

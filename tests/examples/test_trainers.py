"""The examples with a Trainer on one rank do what their first lines say: killed and run again, they end the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.example_runs import assert_ends_the_same, example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
]


@pytest.mark.parametrize("name", ["minimal.py", "iterable/train.py"])
def test_an_example_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    """Killed, continued, interrupted as by Ctrl-C, and continued again, the weights are the uninterrupted run's."""
    assert_ends_the_same(lambda directory: example(name, directory), tmp_path, line="digest ", signum=signal.SIGINT)


def test_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example with a configuration is killed, stopped, and ends with the uninterrupted run's weights."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    config = Path(__file__).parents[2] / "examples" / "lightning_cli" / "config.yaml"
    # As the last of its kind, the callback of the configuration gets the argument.
    interval = "--trainer.callbacks.train_time_interval=0:00:00.1"
    more = ("--trainer.max_epochs=12", "--trainer.enable_progress_bar=false", interval)
    assert_ends_the_same(
        lambda directory: example(
            "lightning_cli/train.py", directory, "fit", f"--config={config}", *more, num_epochs=None
        ),
        tmp_path,
        line="weights ",
        signum=signal.SIGTERM,
    )


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
def test_streaming_from_s3(s3: str, tmp_path: Path) -> None:
    """The example that streams from a bucket writes it once, and continues in the middle of an epoch."""
    assert_ends_the_same(
        lambda directory: example("streaming/train.py", directory, f"{s3}/{directory.name}", num_epochs=3),
        tmp_path,
        line="weights ",
    )

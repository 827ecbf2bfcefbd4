"""A training that LightningCLI builds from a configuration resumes like any other, with the same command line."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import FaultTolerance
from tests.laws.cuts import Cut, Cuts, ends_in
from tests.laws.events import Events
from tests.laws.rows import Net, Rows
from tests.laws.runs import QUIET
from tests.laws.starts import Script, Start, slow_half, told
from tests.messages import plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
    pytest.mark.filterwarnings("ignore:No seed found:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log"),
]
CLASS_PATH = "lightning_faulttolerant.FaultTolerance"
OURS = [{"class_path": CLASS_PATH, "init_args": {"every_n_train_steps": 1}}]
LOGGER = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}


@pytest.fixture(autouse=True)
def _lightnings_own_affairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning (2.5.6 and 2.6.6) calls jsonargparse by names about which newer versions warn."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


class WideNet(Net):
    """Has a hyperparameter, which its checkpoints contain."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()


def train(path: Path, cut: Callback, **config: Any) -> None:
    """Act as a script with a configuration."""
    trainer = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "callbacks": OURS, "logger": LOGGER, **config}
    Path("run.yaml").write_text(yaml.safe_dump({"seed_everything": trainer.pop("seed", 7), "trainer": trainer}))
    LightningCLI(WideNet, Rows, trainer_defaults={"callbacks": [Events(path), cut]})


def start(*more: str, cut: Cut | Callback | None = None, command: str = "fit", env: Any = None, **config: Any) -> Start:
    """Return a start of the script."""
    own = cut if isinstance(cut, Callback) else Cuts(cut)

    def main(script: Script) -> None:
        if script.is_plain:
            os.environ["PL_FAULT_TOLERANT_TRAINING"] = "0"
        train(script.root / f"{script.name}-fit.jsonl", Cuts(None) if script.is_plain else own, **config)

    return Start(fits=main, argv=(command, "--config=run.yaml", *more), environment=env or {})


def kill(epoch: int, batch: int, by: int = signal.SIGKILL) -> Cut:
    """Return a kill at a batch."""
    return Cut(at=(epoch, batch), by=by)


HERE = "--trainer.default_root_dir=here"
ADDED = ("--trainer.callbacks+=FaultTolerance", "--trainer.callbacks.every_n_train_steps=1",
         "--trainer.callbacks+=FlightRecorder", "--trainer.callbacks.keep_every=2")  # fmt: skip
ON = {"PL_FAULT_TOLERANT_TRAINING": "1", "PL_FAULT_TOLERANT_OPTIONS": "every_n_train_steps=1"}
NOTHING: dict[str, Any] = {"callbacks": None}
SCENARIOS: dict[str, list[Start]] = {
    "from YAML": [start(cut=kill(0, 3)), start(cut=kill(1, 2)), start()],
    "from the environment": [start(cut=kill(0, 3), env=ON, **NOTHING), start(env=ON, **NOTHING)],
    "from the command line": [start(*ADDED, cut=kill(0, 3, signal.SIGTERM), **NOTHING), start(*ADDED, **NOTHING)],
    "changed configuration": [start(cut=kill(0, 3)), start(max_epochs=3)],
    "killed before anything was saved": [
        start(HERE, cut=ends_in("on_fit_start"), logger=False), start(HERE, logger=False),
        start(HERE, logger=False), start(HERE, logger=False),
    ],
    "stopped before anything was saved": [
        start(HERE, cut=ends_in("on_sanity_check_start", signal.SIGTERM), logger=False), start(HERE, logger=False),
    ],
}  # fmt: skip


def configurations(root: Path) -> list[str]:
    """Return the saved configurations, each with a value that changes."""
    found = sorted(path for path in root.rglob("config*.yaml") if path.name != "run.yaml")
    return [f"{path.relative_to(root)}: {yaml.safe_load(path.read_text())['trainer']['max_epochs']}" for path in found]


@pytest.mark.parametrize("name", slow_half(SCENARIOS))
def test_lightning_cli(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A start continues, in its log directory, and the configurations of all starts are kept."""
    text = told(tmp_path, SCENARIOS[name])
    assert "\n".join([text, *configurations(tmp_path)]) == snapshot


@pytest.mark.slow
def test_autosave_as_ckpt_path(tmp_path: Path) -> None:
    """`validate` and `fit` accept an autosave of a model with hyperparameters; validation saves none."""
    script = Script(tmp_path)
    script.start(start(cut=kill(0, 3), logger=False))
    found = script.autosaves()
    path = f"--ckpt_path={found[-1]}"
    assert script.start(start(path, "--trainer.default_root_dir=a", command="validate", logger=False)) == 0
    assert script.autosaves() == found
    assert script.start(start(path, "--trainer.default_root_dir=b", logger=False)) == 0
    assert "Resumed exactly" in script.said()


# Each argument, as written in YAML.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "dirpath": ("/here", "s3://bucket/folder", "null"), "run_id": ("mine", "null"), "keep_last": ("3",),
    "every_n_train_steps": ("50",), "train_time_interval": ("'0:30:00'", "'1 day, 0:00:00'"),
    "overhead_budget": ("0.05", "1"), "async_save": ("true",), "incremental": ("true",),
    "stop_signals": ("[SIGTERM, SIGUSR1]", "[]"), "grace_seconds": ("20",),
    "deadline": ("2040-01-02T03:04:05+00:00", "2040-01-02 03:04", "null"), "auto_resume": ("false",),
    "strict": ("false",), "elastic": ("true",), "worker_rng": ("per_sample",),
    "trust_autosaves": ("true", "false", "null"),
}  # fmt: skip
COMPANIONS = [("FlightRecorder", "rule: spike, stop: true, keep_every: 100"), ("FlightRecorder", "rule: null"),
              ("HangWatch", "action: report, timeout: 600")]  # fmt: skip


def test_arguments_from_yaml(snapshot: SnapshotAssertion) -> None:
    """Each argument can be written in YAML with its meaning in Python, and stays the same when saved and read."""
    assert list(ARGUMENTS) == list(inspect.signature(FaultTolerance).parameters)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    lines = []
    given = [("FaultTolerance", f"{name}: {text}") for name, texts in ARGUMENTS.items() for text in texts]
    for name, arguments in [*given, *COMPANIONS]:
        path = f"lightning_faulttolerant.{name}"
        config = parser.parse_string(f"callback: {{class_path: {path}, init_args: {{{arguments}}}}}")
        found = {
            repr(parser.instantiate_classes(parsed).callback)
            for parsed in (config, parser.parse_string(parser.dump(config, skip_none=False)))
        }
        lines.append(f"{arguments} -> {' != '.join(sorted(found))}")
    assert plain("\n".join(lines)) == snapshot

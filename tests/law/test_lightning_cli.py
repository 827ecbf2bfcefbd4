"""A training that LightningCLI builds from a configuration resumes like any other, with the same command line."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.groups import run_group
from tests.kills import files_below
from tests.processes import Ended, run
from tests.rank_runs import for_ranks
from tests.runs import Net

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
    pytest.mark.filterwarnings("ignore:No seed found:UserWarning"),
]

CLASS_PATH = "lightning_faulttolerant.FaultTolerance"
TRAINER = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
CSV_LOGGER = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}


@pytest.fixture(autouse=True)
def _lightnings_own_affairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning (2.5.6 and 2.6.6) calls jsonargparse by names about which newer versions warn."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


class NoisyData(LightningDataModule):
    """Shuffled noisy data; the configuration has the arguments of its loader."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(20), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(8), batch_size=self.batch_size)


class WideNet(Net):
    """Has a hyperparameter, which its checkpoints contain."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()


def write_config(directory: Path, callbacks: Any, seed: Any = True, **trainer: Any) -> None:
    """Write the configuration that the command line names."""
    config = {"seed_everything": seed, "trainer": {**TRAINER, **trainer, "callbacks": callbacks}}
    (directory / "run.yaml").write_text(yaml.safe_dump(config))


def train(
    directory: Path, *more: str, callbacks: Sequence[Callback] = (), command: str = "fit", **arguments: Any
) -> LightningCLI:
    """Act as a script that runs in `directory` with a configuration, always by the same command."""
    os.chdir(directory)
    sys.argv = ["train.py", *filter(None, [command]), "--config=run.yaml", *more]
    defaults = {"callbacks": list(callbacks)} if callbacks else None
    return LightningCLI(WideNet, NoisyData, trainer_defaults=defaults, **arguments)


def from_config(callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Fit with our callback from the configuration instead of the one in `callbacks`."""
    others = [callback for callback in callbacks if not isinstance(callback, FaultTolerance)]
    ours = [{"class_path": CLASS_PATH, "init_args": {"every_n_train_steps": 1}}] if others != callbacks else None
    write_config(directory, ours, **arguments)
    return train(directory, callbacks=others).trainer


def test_killed_and_resumed_equals_uninterrupted() -> None:
    """Killed in the first epoch and in a later one, a run with the callback from YAML equals the uninterrupted one."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return from_config(callbacks, directory, logger=CSV_LOGGER)

    first, second = assert_resumes_exactly(fit, [KillAt(3), KillAt(5)], options={"every_n_train_steps": 1})
    assert (first.exit_code, first.epoch, first.batch) == (-signal.SIGKILL, 0, 3)
    assert (second.exit_code, second.epoch, second.batch) == (-signal.SIGKILL, 1, 3)


def weights(directory: Path) -> list[Any]:
    """Return the trained weights that a process saved."""
    return [value.tolist() for value in torch.load(directory / "weights.pt", weights_only=True).values()]


def script(directory: Path, fault: Callback | None = None, *more: str, seed: int = 1, **arguments: Any) -> Ended:
    """Run the script in a separate process, which saves its weights."""

    def main() -> None:
        cli = train(directory, *more, callbacks=[fault] if fault is not None else [], **arguments)
        torch.save(cli.model.state_dict(), directory / "weights.pt")

    return run(main, seed=seed)


def directories(tmp_path: Path, callbacks: Any, **arguments: Any) -> tuple[Path, Path]:
    """Create the directories of an uninterrupted run without the callback and of an interrupted one."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    write_config(whole, None, **arguments)
    write_config(cut, callbacks, **arguments)
    return whole, cut


def test_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable and `callbacks: null` a run resumes, even if the configuration is saved before our setup."""
    whole, cut = directories(tmp_path, None, seed=7, logger=CSV_LOGGER)
    assert script(whole).exit_code == 0
    monkeypatch.setenv("PL_FAULT_TOLERANT_TRAINING", "1")
    assert script(cut, KillAt(3), "--trainer.log_every_n_steps=1").exit_code == -signal.SIGKILL
    resumed = script(cut, None, "--trainer.log_every_n_steps=1", seed=2)
    assert resumed.exit_code == 0, resumed.output
    assert "Resumed exactly before batch" in resumed.output
    assert weights(cut) == weights(whole)


@pytest.mark.slow
def test_added_on_the_command_line(tmp_path: Path) -> None:
    """`--trainer.callbacks+=` with short names and arguments works, and a stopped run continues in its files."""
    whole, cut = directories(tmp_path, None, seed=7, logger=CSV_LOGGER)
    assert script(whole).exit_code == 0
    more = ["--trainer.callbacks+=FaultTolerance", "--trainer.callbacks.every_n_train_steps=1"]
    more += ["--trainer.callbacks+=FlightRecorder", "--trainer.callbacks.keep_every=2"]
    stopped = script(cut, KillAt(3, signum=signal.SIGTERM), *more)
    assert stopped.exit_code == 143, stopped.output
    assert script(cut, None, *more, seed=2).exit_code == 0
    assert weights(cut) == weights(whole)
    assert list(cut.rglob("autosave-*-kept*"))
    assert files_below(cut / "logs") == files_below(whole / "logs")


@pytest.mark.slow
def test_another_command_is_another_run(tmp_path: Path) -> None:
    """The arguments identify the run: with others it starts from the beginning, in its own version."""
    _, cut = directories(tmp_path, [CLASS_PATH], logger=CSV_LOGGER)
    assert script(cut, KillAt(3)).exit_code == -signal.SIGKILL
    other = script(cut, None, "--model.width=8")
    assert other.exit_code == 0, other.output
    assert "Resumed" not in other.output
    saved = sorted(str(path.relative_to(cut)) for path in cut.glob("logs/**/config*.yaml"))
    assert saved == [f"logs/lightning_logs/version_{number}/config.yaml" for number in (0, 1)]


def test_a_changed_configuration_is_saved_beside_the_one_before(tmp_path: Path) -> None:
    """After a longer max_epochs, the log directory has both the first configuration and the current one."""
    _, cut = directories(tmp_path, [CLASS_PATH], logger=CSV_LOGGER)
    assert script(cut, KillAt(3)).exit_code == -signal.SIGKILL
    [saved] = cut.glob("logs/**/config.yaml")
    before = saved.read_bytes()
    write_config(cut, [CLASS_PATH], logger=CSV_LOGGER, max_epochs=3)
    resumed = script(cut)
    assert resumed.exit_code == 0, resumed.output
    assert saved.with_name("config-1.yaml").read_bytes() == before
    assert yaml.safe_load(saved.read_text())["trainer"]["max_epochs"] == 3
    assert "The configuration has changed" in resumed.output


class KillOnFitStart(Callback):
    def on_fit_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_before_anything_was_saved(tmp_path: Path) -> None:
    """A run that was killed before any save starts again in the same directory; a finished one is protected."""
    _, cut = directories(tmp_path, [CLASS_PATH], logger=False)
    assert script(cut, KillOnFitStart(), "--trainer.default_root_dir=here").exit_code == -signal.SIGKILL
    assert (cut / "here" / "config.yaml").is_file()
    again = script(cut, None, "--trainer.default_root_dir=here")
    assert again.exit_code == 0, again.output
    refused = script(cut, None, "--trainer.default_root_dir=here")
    assert refused.exit_code == 1
    assert "to NOT exist. Aborting to avoid overwriting" in refused.output
    # A refused start does not count as one: the next is refused as well.
    assert script(cut, None, "--trainer.default_root_dir=here").exit_code == 1


class StopInSanityCheck(Callback):
    def on_sanity_check_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_stopped_before_anything_was_saved(tmp_path: Path) -> None:
    """A run that was stopped in the sanity check, where there is nothing to save, also starts again."""
    _, cut = directories(tmp_path, [CLASS_PATH], logger=False)
    stopped = script(cut, StopInSanityCheck(), "--trainer.default_root_dir=here")
    assert stopped.exit_code == 143, stopped.output
    assert (cut / "here" / "config.yaml").is_file()
    again = script(cut, None, "--trainer.default_root_dir=here")
    assert again.exit_code == 0, again.output
    assert script(cut, None, "--trainer.default_root_dir=here").exit_code == 1


def test_nothing_stays_on_the_callback_of_the_cli(tmp_path: Path) -> None:
    """After a resumed fit that the script calls itself, LightningCLI's callback and parser are unchanged."""
    _, cut = directories(tmp_path, [CLASS_PATH], logger=CSV_LOGGER)

    def main(fault: Callback | None = None) -> None:
        cli = train(cut, command="", callbacks=[fault] if fault is not None else [], run=False)
        [callback] = [each for each in cli.trainer.callbacks if isinstance(each, SaveConfigCallback)]
        cli.trainer.fit(cli.model, cli.datamodule)
        assert callback.already_saved
        assert not callback.overwrite
        assert not {"setup", "save_config"} & set(vars(callback))
        assert "save" not in vars(callback.parser)

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output


@pytest.mark.slow
def test_other_subcommands_and_an_autosave_as_ckpt_path(tmp_path: Path) -> None:
    """`validate` and `fit` accept an autosave of a model with hyperparameters; validation saves none."""
    _, cut = directories(tmp_path, [CLASS_PATH], logger=False)
    assert script(cut, KillAt(3)).exit_code == -signal.SIGKILL
    [newest] = sorted(cut.glob("fault_tolerance/*/fit-1/autosave-*.ckpt"))[-1:]
    found = files_below(cut / "fault_tolerance")
    validated = script(cut, None, f"--ckpt_path={newest}", "--trainer.default_root_dir=a", command="validate")
    assert validated.exit_code == 0, validated.output
    assert files_below(cut / "fault_tolerance") == found
    resumed = script(cut, None, f"--ckpt_path={newest}", "--trainer.default_root_dir=b")
    assert resumed.exit_code == 0, resumed.output
    assert "Resumed exactly" in resumed.output


@pytest.mark.slow
@for_ranks[0]
@for_ranks[1]
def test_two_ranks(tmp_path: Path) -> None:
    """All ranks get past the existing configuration, however many of them check for it."""
    _, cut = directories(tmp_path, [CLASS_PATH], seed=7, logger=CSV_LOGGER, strategy="ddp", devices=2)

    def start(fault: Callback | None = None) -> tuple[list[int], str]:
        callbacks = [fault] if fault is not None else []
        return run_group(lambda _: train(cut, callbacks=callbacks), num_ranks=2, directory=tmp_path)

    for fault in (KillOnFitStart(), KillAt(4)):
        codes, output = start(fault)
        assert codes == [-signal.SIGKILL] * 2, output
    codes, output = start()
    assert codes == [0, 0], output
    assert "Resumed exactly before batch" in output
    # The first start has its own version, the others continued in one.
    saved = sorted(f"{path.parent.name}/{path.name}" for path in cut.glob("logs/**/config*.yaml"))
    assert saved == ["version_0/config.yaml", "version_1/config.yaml"]


# Each argument, as written in YAML, and its value.
ARGUMENTS: dict[str, Sequence[tuple[str, Any]]] = {
    "dirpath": [("/here", "/here"), ("s3://bucket/folder", "s3://bucket/folder"), ("null", None)],
    "run_id": [("mine", "mine"), ("null", None)],
    "keep_last": [("3", 3)],
    "every_n_train_steps": [("50", 50)],
    "train_time_interval": [("'0:30:00'", timedelta(minutes=30)), ("'1 day, 0:00:00'", timedelta(days=1))],
    "overhead_budget": [("0.05", 0.05), ("1", 1.0)],
    "async_save": [("true", True)],
    "incremental": [("true", True)],
    "stop_signals": [("[SIGTERM, SIGUSR1]", ("SIGTERM", "SIGUSR1")), ("[]", ())],
    "grace_seconds": [("20", 20.0)],
    "deadline": [
        ("2040-01-02T03:04:05+00:00", datetime.fromisoformat("2040-01-02T03:04:05+00:00").timestamp()),
        ("2040-01-02 03:04", datetime(2040, 1, 2, 3, 4).timestamp()),
        ("null", None),
    ],
    "auto_resume": [("false", False)],
    "strict": [("false", False)],
    "elastic": [("true", True)],
    "worker_rng": [("per_sample", "per_sample")],
    "trust_autosaves": [("true", True), ("false", False), ("null", None)],
}


def test_every_argument_has_a_case() -> None:
    """The next test has a case for every argument."""
    assert list(ARGUMENTS) == list(inspect.signature(FaultTolerance).parameters)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_from_yaml(name: str) -> None:
    """Each argument can be written in YAML with its meaning in Python, and stays the same when saved and read."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    for text, value in ARGUMENTS[name]:
        given = f"callback: {{class_path: {CLASS_PATH}, init_args: {{{name}: {text}}}}}"
        config = parser.parse_string(given)
        for parsed in (config, parser.parse_string(parser.dump(config))):
            found = getattr(parser.instantiate_classes(parsed).callback._options, name)
            assert (found, type(found)) == (value, type(value)), text


def test_the_companions_from_yaml() -> None:
    """Each can be written in YAML."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    found = []
    for name, arguments in (
        ("FlightRecorder", "rule: spike, stop: true, keep_every: 100"),
        ("FlightRecorder", "rule: null"),
        ("HangWatch", "action: report, timeout: 600"),
    ):
        given = f"callback: {{class_path: lightning_faulttolerant.{name}, init_args: {{{arguments}}}}}"
        found.append(repr(parser.instantiate_classes(parser.parse_string(given)).callback))
    assert found == [
        "FlightRecorder(rule='spike', stop=True, keep_every=100)",
        "FlightRecorder(rule=None)",
        "HangWatch(action='report', timeout=600.0)",
    ]

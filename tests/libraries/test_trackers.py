"""The real wandb and mlflow: a script as in their documentation is killed, stopped, and started again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.libraries.started import PROTECTED, PYTHON, Script, script
from tests.libraries.wandb_server import wandb_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import os, signal, sys, time
import mlflow, torch, wandb
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from torch.utils.data import DataLoader

class Net(LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Fault(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        signum, step, seconds = os.environ.get("FAULT", "0 -1 0").split()
        if trainer.global_step == int(step):
            time.sleep(float(seconds))
            os.kill(os.getpid(), int(signum))

seed_everything(1)
logger = {
    "wandb": lambda: WandbLogger(project="p"),
    "offline": lambda: WandbLogger(project="p", offline=True),
    "file": lambda: MLFlowLogger(experiment_name="e", save_dir="mlruns"),
    "sqlite": lambda: MLFlowLogger(experiment_name="e", tracking_uri="sqlite:///mlflow.db"),
}[os.environ["LOGGER"]]()
trainer = Trainer(max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[Fault()], enable_progress_bar=False)
data = torch.randn(10, 4)
trainer.fit(Net(), DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=5))
"""
LOOK = """
import json, sys
from mlflow.tracking import MlflowClient

client = MlflowClient(sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
histories = {key: client.get_metric_history(run.info.run_id, key) for key in sorted(run.data.metrics)}
points = {key: sorted((point.step, point.value) for point in history) for key, history in histories.items()}
print(json.dumps([run.info.status, run.data.params, points]))
"""
# A kill before W&B has sent anything, one after it has, a stop.
FAULTS = ["9 3 0", "9 6 16", "15 8 0"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """Yield the process that has imported the script's imports."""
    root = tmp_path_factory.mktemp("trackers")
    source = root / "train.py"
    source.write_text(SCRIPT)
    with script(source, root) as found:
        yield found


def train(started: Script, logger: str, directory: Path, faults: list[str], **environment: str) -> None:
    """Run the script in a directory once for each fault, and once more."""
    started.directory = directory
    directory.mkdir(exist_ok=True)
    variables = {**PROTECTED, "MLFLOW_ALLOW_FILE_STORE": "true", **environment, "LOGGER": logger}
    outputs = []
    for fault in [*faults, "0 -1 0"]:
        ended = started.start(**variables, FAULT=fault)
        code = {"9": -9, "15": 143, "0": 0}[fault.split()[0]]
        assert ended.exit_code == code, ended.output
        outputs.append(ended.output)
    assert all("Resumed exactly" in output for output in outputs[1:]), outputs
    assert logger != "offline" or "W&B is offline" in outputs[-1]


def without_times(rows: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows of W&B without their times."""
    return [{name: row[name] for name in row if name not in ("_timestamp", "_runtime")} for row in rows]


def test_wandb_online(tmp_path: Path, started: Script) -> None:
    """The server has one run, and each of its rows is the uninterrupted run's."""
    found = []
    for name, faults in (("whole", []), ("killed", FAULTS)):
        with wandb_server() as server:
            train(started, "wandb", tmp_path / name, faults, **server.environment)
            [run] = server.runs.values()
        found.append((run["state"], without_times(run["rows"])))
    assert found[1] == found[0]
    assert len(found[0][1]) >= 12


def test_wandb_offline(tmp_path: Path, started: Script) -> None:
    """Each start has its own directory with the same id, and `wandb sync` merges them into one run."""
    train(started, "offline", tmp_path, ["15 3 0", "15 8 0"])
    directories = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({path.name.rpartition("-")[2] for path in directories}) == 1
    assert len(directories) == 3
    with wandb_server() as server:
        command = [str(PYTHON.with_name("wandb")), "sync", "--yes", *map(str, directories)]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **server.environment}, check=True, capture_output=True)
        [run] = server.runs.values()
    steps = [row["trainer/global_step"] for row in run["rows"] if "loss" in row]
    assert steps == list(range(10))  # stops are saved in time


@pytest.mark.parametrize("uri", ["file:mlruns", "sqlite:///mlflow.db"])
def test_mlflow(uri: str, tmp_path: Path, started: Script) -> None:
    """The store has one finished run, with the points of the uninterrupted one."""
    found = []
    for name, faults in (("whole", []), ("killed", ["9 3 0", "9 6 0", "15 8 0"])):
        train(started, uri.partition(":")[0], tmp_path / name, faults)
        command = [str(PYTHON), "-c", LOOK, uri]
        variables = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
        looked = subprocess.run(command, cwd=tmp_path / name, env=variables, check=True, capture_output=True, text=True)
        found.append(json.loads(looked.stdout))
    assert found[1] == found[0]
    status, _, points = found[0]
    assert status == "FINISHED"
    assert len(points["loss"]) == 10

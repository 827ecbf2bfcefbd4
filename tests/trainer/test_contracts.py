"""The contract with Lightning, torch, and Optuna: the installed versions have each private name that we use."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle, _MinSize, _Sequential
from tensorboard.summary.writer import event_file_writer
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters import compat as adapters
from lightning_faulttolerant.trainer.evaluation import compat as evaluation
from lightning_faulttolerant.trainer.files import compat as files
from lightning_faulttolerant.trainer.identity import compat as identity
from lightning_faulttolerant.trainer.ranks import compat as ranks
from lightning_faulttolerant.trainer.steps import compat as steps
from tests.laws.rows import Net
from tests.ranks import on_ranks
from tests.runs import fit_net

# Names inside a validation run are gone after it.
IN_A_RUN = {"_data_fetcher", "_combined_loader", "_iterator", "_iterator_idx", "_idx", "_load_current_iterator"}


def missing(owner: Any, path: str) -> str | None:
    """Return the first name of a path below an object that does not exist."""
    for name in path.split(".")[1:]:
        if not hasattr(owner, name):
            return name
        owner = getattr(owner, name)
    return None


class Inside(Callback):
    """Notes which names are missing in a validation run."""

    missing: set[str] | None = None

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        owners = [loop, loop._combined_loader, loop._combined_loader._iterator]
        self.missing = {name for name in IN_A_RUN if not any(hasattr(owner, name) for owner in owners)}


class Plain(Net):
    """One optimizer without a scheduler."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def inside() -> Inside:
    """Return a callback of the fit."""
    return Inside()


@pytest.fixture(scope="module")
def averaged() -> StochasticWeightAveraging:
    """Return another callback of the fit."""
    return StochasticWeightAveraging(0.1, swa_epoch_start=1)


@pytest.fixture(scope="module")
def trainer(inside: Inside, averaged: Callback, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a real trainer after a short fit with validation."""
    directory = tmp_path_factory.mktemp("compat")
    return fit_net(
        [inside, averaged], directory, module=Plain(), max_epochs=1, limit_train_batches=2, limit_val_batches=1
    )


# The first name of a path, unless it is the trainer: what makes its object.
MADE: dict[str, Callable[[], Any]] = {
    "ModelPruning": lambda: ModelPruning("l1_unstructured"),
    "ThroughputMonitor": lambda: ThroughputMonitor(len),
    "Throughput": Throughput,
    "Timer": Timer,
    "ModelParallelStrategy": ModelParallelStrategy,
    "FSDPStrategy": FSDPStrategy,
    **{kind.__name__: kind for kind in adapters.WEIGHT_AVERAGING},
}
TABLES = [
    *(compat.SEAMS, adapters.SEAMS, adapters.RESULT_SEAMS, evaluation.SEAMS, identity.SEAMS),
    *(ranks.SEAMS, ranks.STRATEGY_SEAMS, steps.SEAMS),
]


@pytest.mark.parametrize("table", TABLES)
def test_each_path_exists(table: Mapping[str, str], trainer: Trainer, averaged: StochasticWeightAveraging) -> None:
    """The names exist after a fit; if a new Lightning drops one, the failure names the feature that breaks."""
    made: dict[str, Any] = {"trainer": trainer, "StochasticWeightAveraging": averaged}
    gone = {}
    for path, feature in table.items():
        first = path.partition(".")[0]
        if first == "WeightAveraging" and not adapters.WEIGHT_AVERAGING:
            continue
        if missing(made[first] if first in made else MADE[first](), path) is not None:
            gone[path] = feature
    assert not gone, f"gone, and what breaks: {gone}"


def no_logger() -> Trainer:
    """Return a trainer that was not used."""
    return Trainer(logger=False)


NAMES: list[tuple[Mapping[str, str], Callable[[], Any]]] = [
    (files.TRAINER_SEAMS, lambda: Trainer),
    (files.TRAINER_OBJECT_SEAMS, no_logger),
    (files.EPOCH_LOOP_SEAMS, lambda: no_logger().fit_loop.epoch_loop),
    (files.MODEL_CHECKPOINT_SEAMS, ModelCheckpoint),
    (files.LOGGER_SEAMS, lambda: CSVLogger(".")),
    (files.LOGGER_SEAMS, lambda: TensorBoardLogger(".")),
    (files.CSV_SEAMS, lambda: CSVLogger(".")),
    (files.TENSORBOARD_SEAMS, lambda: TensorBoardLogger(".")),
    (files.EVENT_WRITER_SEAMS, lambda: event_file_writer),
    (files.CSV_WRITER_SEAMS, lambda: ExperimentWriter),
    (files.STRATEGY_SEAMS, lambda: no_logger().strategy),
    (steps.LOGGER_SEAMS, lambda: CSVLogger(".")),
    (steps.LOGGER_SEAMS, lambda: TensorBoardLogger(".")),
    (steps.MODEL_CHECKPOINT_SEAMS, lambda: ModelCheckpoint),
]


@pytest.mark.parametrize(("table", "make"), NAMES)
def test_each_name_exists(table: Mapping[str, str], make: Callable[[], Any]) -> None:
    """The name exists on the object that has it."""
    owner = make()
    gone = {name: feature for name, feature in table.items() if not hasattr(owner, name)}
    assert not gone, f"gone, and what breaks: {gone}"


# Read with a default, or only set: nothing breaks immediately without them.
OTHER_NAMES = {
    "_ckpt_path": "_checkpoint_connector",
    "_restarting": "fit_loop",
    "_loaded_from_state_dict": "fit_loop",
    "_should_accumulate": "fit_loop.epoch_loop",
    "_iterator": "fit_loop._combined_loader",
    "_resuming_from_checkpoint": "fit_loop",
    "_skip_next_val": "fit_loop.epoch_loop",
    "_module_mode": "fit_loop.epoch_loop.val_loop",
    "_on_evaluation_end": "fit_loop.epoch_loop.val_loop",
    "_on_evaluation_model_train": "fit_loop.epoch_loop.val_loop",
    "_first_loop_iter": "_logger_connector",
    "_on_after_fetch": "fit_loop.epoch_loop",
    "_current_fx_name": "lightning_module",
}
ON_VALUES = ("_forward_cache", "_update_count", "_computed", "_defaults")


def test_further_names_exist(trainer: Trainer, inside: Inside) -> None:
    """Names besides the tables exist too: on loops, logged values, finders, iterators, bars, and in a run."""
    gone = {name for name, path in OTHER_NAMES.items() if missing(trainer, f"trainer.{path}.{name}") is not None}
    assert gone == inside.missing == set()
    [value, *_] = [item for found in adapters.result_collections(trainer).values() for item in found.values()]
    assert all(hasattr(value, name) for name in (*ON_VALUES, "has_reset", "update_count", "is_tensor"))
    others: list[tuple[Any, tuple[str, ...]]] = [
        (value.meta, ("_sync",)),
        (compat.connectors, ("_OMEGACONF_AVAILABLE",)),
        (ModelCheckpoint, ("_find_last_checkpoints",)),
        (BatchSizeFinder(), ("_early_exit",)),
        (LearningRateFinder(), ("_early_exit",)),
        (_MaxSizeCycle([]), ("_idx", "_consumed")),
        (_MinSize([]), ("_idx",)),
        (_Sequential([]), ("_idx",)),
        (_DataLoaderIterDataFetcher(), ("_batch_idx",)),
        (TQDMProgressBar(), ("_current_eval_dataloader_idx",)),
        (RichProgressBar(), ("_current_eval_dataloader_idx",)),
    ]
    assert [(owner, name) for owner, names in others for name in names if not hasattr(owner, name)] == []
    for name in ("_call_callback_hooks", "_call_lightning_module_hook"):
        assert "hook_name" in getattr(call, name).__code__.co_varnames
    sampler = UnrepeatedDistributedSamplerWrapper(SequentialSampler(range(7)), num_replicas=2, rank=1, shuffle=False)
    batches = _IndexBatchSamplerWrapper(BatchSampler(sampler, 2, drop_last=False))  # type: ignore[arg-type]
    assert {*vars(batches), *vars(sampler.dataset)} >= {"_batch_sampler", "_sampler"}


def test_names_of_ddp_exist(tmp_path: Path) -> None:
    """The installed torch has all names of a DDP wrapper."""

    def main(rank: int) -> list[Any]:
        wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        return [path for path in ranks.DDP_SEAMS if missing(wrapper, f"ddp.{path.partition('.')[2]}") is not None]

    assert on_ranks(main, tmp_path, num_ranks=1) == [[]]


def test_names_of_libraries_exist() -> None:
    """A study of Optuna gives its storage, and the loggers of experiments set and read their ids as we rely on it."""
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    assert all(missing(study, path) is None for path in identity.STUDY_SEAMS)
    assert isinstance(identity.storage_of(study), optuna.storages.InMemoryStorage)
    for logger, table in ((WandbLogger, files.WANDB_SEAMS), (MLFlowLogger, files.MLFLOW_SEAMS)):
        made = inspect.getsource(logger.__init__)
        assert [name for name in table if f"self.{name}" not in made] == []
    assert "**self._wandb_init" in inspect.getsource(WandbLogger.experiment.fget)
    assert "self._run_id is not None" in inspect.getsource(MLFlowLogger.experiment.fget)


def test_file_beside_the_shards() -> None:
    """Autosaves are verified and loaded by the file name that Lightning uses."""
    assert ranks.METADATA_NAME == METADATA_NAME


# What the tests above check besides the tables, what an import checks, and the modules' own names.
BESIDE: dict[ModuleType, set[str]] = {
    compat: {
        *OTHER_NAMES,
        *("_find_last_checkpoints", "_early_exit", "_idx", "_consumed", "_batch_idx"),
        *("_call_callback_hooks", "_call_lightning_module_hook", "_OMEGACONF_AVAILABLE", "_getframe"),
    },
    adapters: {*ON_VALUES, "_sync", "_should"},
    evaluation: {
        *IN_A_RUN,
        *("_current_eval_dataloader_idx", "_batch_sampler", "_sampler"),
        *("_PrefetchDataFetcher", "_PredictionLoop", "_Sequential"),
    },
    files: {"_experiment_of"},
    identity: {"_loaders"},
    ranks: {"_register_comm_hook", "_METADATA_FILENAME", "_child_processes"},
    steps: {"_fetched", "_seen", "_DataLoaderIterDataFetcher", "_iterator", "_idx"},
}


@pytest.mark.parametrize("module", BESIDE, ids=lambda module: module.__name__)
def test_no_name_escapes_the_contract(module: ModuleType) -> None:
    """Some test of this file checks each private name that the source of a compat module uses."""
    tree = list(ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))))
    touched = {node.attr for node in tree if isinstance(node, ast.Attribute)}
    methods = {
        node.name
        for each in tree
        if isinstance(each, ast.ClassDef)
        for node in each.body
        if isinstance(node, ast.FunctionDef)
    }
    texts = {node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = touched | methods | {text for text in texts if text.isidentifier()}
    tables = [value for name, value in vars(module).items() if name.endswith("SEAMS")]
    checked = {part for table in tables for path in table for part in path.split(".")} | BESIDE[module]
    assert {name for name in used if name.startswith("_") and not name.startswith("__")} - checked == set()


def test_observer_that_is_called_off_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it is called off, a launcher's process that has ended with an error no longer kills this one."""
    killed: list[bool] = []
    kind = subprocess_script._ChildProcessObserver
    looks = threading.Event()
    monkeypatch.setattr(subprocess_script, "time", SimpleNamespace(sleep=lambda seconds: looks.wait(20)))
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(143)"])
    process.wait()
    for is_called_off in (True, False):
        monkeypatch.setattr(kind, "_terminate_all", lambda self, number=is_called_off: killed.append(number))
        looks.clear()
        subprocess_script._launch_process_observer([process])
        if is_called_off:
            ranks.call_off_observers()
        [observer] = [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]
        looks.set()
        observer.join()
    assert killed == [False]

"""The contract with Lightning's loggers and ModelCheckpoint: each private name that we use exists."""

from __future__ import annotations

import ast
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from tensorboard.summary.writer import event_file_writer

from lightning_faulttolerant.trainer.files import compat
from tests.loggers import scalars

OWNERS: dict[str, Any] = {
    "TRAINER_SEAMS": lambda: Trainer,
    "TRAINER_OBJECT_SEAMS": lambda: Trainer(logger=False),
    "EPOCH_LOOP_SEAMS": lambda: Trainer(logger=False).fit_loop.epoch_loop,
    "MODEL_CHECKPOINT_SEAMS": ModelCheckpoint,
    "LOGGER_SEAMS": lambda: CSVLogger("."),
    "CSV_SEAMS": lambda: CSVLogger("."),
    "TENSORBOARD_SEAMS": lambda: TensorBoardLogger("."),
    "EVENT_WRITER_SEAMS": lambda: event_file_writer,
    "CSV_WRITER_SEAMS": lambda: ExperimentWriter,
    "STRATEGY_SEAMS": lambda: Trainer(logger=False).strategy,
}
SEAMS = [(table, name) for table in OWNERS for name in getattr(compat, table)]


@pytest.mark.parametrize(("table", "name"), SEAMS)
def test_each_seam_exists(table: str, name: str) -> None:
    """The name exists; if a new Lightning drops it, the failure names the feature that breaks."""
    feature = getattr(compat, table)[name]
    assert hasattr(OWNERS[table](), name), f"{name} is gone; what breaks: {feature}"


@pytest.mark.parametrize("name", compat.LOGGER_SEAMS)
def test_both_loggers_have_the_same_names(name: str) -> None:
    """Both loggers have the same names, so the same code handles both."""
    assert hasattr(TensorBoardLogger("."), name)


def test_no_name_escapes_the_contract() -> None:
    """Each private name that the source uses is in one of the tables, whose other tests are in this folder."""
    tree = ast.parse(Path(compat.__file__).read_text(encoding="utf-8"))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    touched |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    private = {name for name in touched | strings if name.startswith("_") and not name.startswith("__")}
    of_experiments = {*compat.WANDB_SEAMS, *compat.MLFLOW_SEAMS, *compat.WANDB_RUN_SEAMS}
    assert private - {name for _, name in SEAMS} - of_experiments == {"_experiment_of"}  # the file's own


def test_version_that_somebody_named_is_reported(tmp_path: Path) -> None:
    """Only a version that Lightning has chosen, or will choose, counts as the next one."""
    for version in (0, 1):
        (tmp_path / f"lightning_logs/version_{version}").mkdir(parents=True)
    for kind in (CSVLogger, TensorBoardLogger):
        logger = kind(tmp_path)
        assert compat.takes_next_version(logger)
        assert logger.version == 2
        assert compat.takes_next_version(logger)
        assert not compat.takes_next_version(kind(tmp_path, version=1))
        assert not compat.takes_next_version(kind(tmp_path, version="2"))
    begun = CSVLogger(tmp_path)
    _ = begun.experiment
    assert compat.has_begun(begun)
    assert compat.takes_next_version(begun)


@pytest.mark.parametrize("rest", ["{host}.9{process_id}.0", "zz.1.10"])
def test_tensorboard_reads_the_file_of_a_resumed_run_last(rest: str, tmp_path: Path) -> None:
    """Whatever the process ids, the hosts, and their clocks, the resumed run replaces the steps after its autosave."""
    logger = TensorBoardLogger(tmp_path, version=0)
    for step in range(6):
        logger.log_metrics({"a": float(step)}, step)
    logger.finalize("success")
    (first,) = Path(logger.log_dir).glob("*tfevents*")
    last = int(time.time()) + 600  # as of a clock that is ahead; a later process id of the same second is like it
    name = rest.format(host=socket.gethostname(), process_id=os.getpid())
    first.rename(first.with_name(f"events.out.tfevents.{last}.{name}"))

    for start in (1, 2):  # the third start comes after the second, too
        logger = TensorBoardLogger(tmp_path, version=0)
        compat.go_on_in_tensorboard(logger, 4)
        logger.log_metrics({"a": 10.0 * start}, 4)
        logger.finalize("success")
    assert scalars(Path(logger.log_dir))["a"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 20.0)]
    names = sorted(path.name for path in Path(logger.log_dir).glob("*tfevents*"))
    assert [int(name.split(".")[3]) - last for name in names] == [0, 1, 2]
    assert event_file_writer.time is time


def test_clock_of_other_threads_stays(tmp_path: Path) -> None:
    """The thread that writes events, and other writers, don't see the later clock. After an error, nobody does."""
    (tmp_path / f"events.out.tfevents.{int(time.time()) + 3600}.a.1.0").touch()
    seen: list[float] = []

    def fail() -> None:
        with compat.begins_last(str(tmp_path)):
            seen.append(event_file_writer.time.time())
            thread = threading.Thread(target=lambda: seen.append(event_file_writer.time.time()))
            thread.start()
            thread.join()
            assert event_file_writer.time.monotonic is time.monotonic
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert 3000 < seen[0] - seen[1] <= 3601
    assert event_file_writer.time is time


@pytest.mark.parametrize("name", ["events.out.tfevents.1000000000.a.1.0", "notes.9999999999.txt", None])
def test_clock_stays_if_no_file_is_ahead(name: str | None, tmp_path: Path) -> None:
    """Nothing is replaced without need: earlier files, other files, and a directory that does not exist."""
    if name is not None:
        (tmp_path / name).touch()
    with compat.begins_last(str(tmp_path if name is not None else tmp_path / "missing")):
        assert event_file_writer.time is time

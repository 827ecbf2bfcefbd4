"""The order in which TensorBoard reads the files of a resumed run."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lightning_faulttolerant.trainer.files import compat


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
    shown = EventAccumulator(logger.log_dir).Reload().Scalars("a")
    assert [(event.step, event.value) for event in shown] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 20.0)]
    names = sorted(path.name for path in Path(logger.log_dir).glob("*tfevents*"))
    assert [int(name.split(".")[3]) - last for name in names] == [0, 1, 2]
    assert event_file_writer.time is time

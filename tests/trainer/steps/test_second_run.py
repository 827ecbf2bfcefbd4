"""What a second run of a step shows, and what is said if it can't be done."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.records.incidents import Incident, read_incident
from lightning_faulttolerant.records.runs import Command
from lightning_faulttolerant.trainer.steps.incident_writer import compared, second_run_of

SUMS = {"input 0": "a", "buffer mean": "b", "loss": "c", "gradient of weight": "d"}
INCIDENT = Incident(
    step=3, epoch=0, batch=3, rank=0, what="the loss is nan", time=0.0, checkpoint="incident-00000003.ckpt", sums=SUMS
)


def test_an_equal_run_points_to_data_or_model() -> None:
    """All sums are equal."""
    assert compared(INCIDENT, loss="nan", sums=SUMS) == (
        "equals it, bit for bit: the cause is in the data or the model"
    )


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ({**SUMS, "loss": "x", "gradient of weight": "y"}, "differs, first in: loss and 1 more; its loss is 0.5: "),
        ({**SUMS, "gradient of weight": "y"}, "differs, first in: gradient of weight; its loss is 0.5: "),
        ({name: SUMS[name] for name in SUMS if name != "buffer mean"}, "differs, first in: buffer mean; "),
        ({**SUMS, "gradient of bias": "y"}, "differs, first in: gradient of bias; "),
    ],
)
def test_the_first_tensor_that_differs_is_named(sums: dict[str, str], text: str) -> None:
    """A tensor that only one of the runs has differs, too."""
    found = compared(INCIDENT, loss="0.5", sums=sums)
    assert found.startswith(text)
    assert found.endswith("the cause is the hardware, or a kernel that is not deterministic")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit('out of memory')", "could not be done: exit code 1: out of memory"),
        ("pass", "could not be done: it did not find the checkpoint"),
        ("import time; time.sleep(60)", "could not be done: it took more than 1 seconds"),
    ],
)
def test_a_run_that_can_not_be_done_says_why(code: str, text: str) -> None:
    """A script that fails, that has no such fit, or that takes too long shows nothing."""
    command = Command(words=(sys.executable, "-S", "-c", code), directory=os.getcwd())
    began = time.monotonic()
    found = second_run_of(INCIDENT, command, fit=1, after_backward=1, is_stopping=lambda: False, longest_seconds=1.0)
    assert found == text
    assert time.monotonic() - began < 20


def test_a_stop_does_not_wait() -> None:
    """A run that has to stop ends the second run at once."""
    command = Command(words=(sys.executable, "-S", "-c", "import time; time.sleep(60)"))
    found = second_run_of(INCIDENT, command, fit=1, after_backward=1, is_stopping=lambda: True)
    assert found == "could not be done: this run stops"


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    """The error of the system is the reason."""
    command = Command(words=(str(tmp_path / "none"),))
    found = second_run_of(INCIDENT, command, fit=1, after_backward=None, is_stopping=lambda: False)
    assert "No such file" in found


def test_a_report_can_be_read_again() -> None:
    """What is written is read; what is damaged, or of a later version, is not."""
    assert read_incident(INCIDENT.to_json()) == INCIDENT
    assert read_incident(INCIDENT.to_json()[:-9]) is None
    assert read_incident(INCIDENT.to_json().replace('"version": 1', '"version": 2')) is None
    assert read_incident("[]") is None

"""A second run of the step of an incident: in its own process, from the checkpoint of the incident.

It is a replay: it gets the state that the step began with, and nothing of this process can be changed by it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lightning_faulttolerant.records.incidents import Incident
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, HOLD_VARIABLE, SAVE_VARIABLE
from lightning_faulttolerant.records.replay import (
    RAISED,
    REPLAY_VARIABLE,
    ReplayRequest,
    StepPlace,
    read_outcomes,
    read_start,
    read_sums,
)
from lightning_faulttolerant.records.runs import Command
from lightning_faulttolerant.supervision.marks import DIRECTORY_VARIABLE
from lightning_faulttolerant.trainer.settings.environment import VARIABLE

LONGEST_SECONDS = 600.0
_OURS_ALONE = (FAULT_VARIABLE, HOLD_VARIABLE, SAVE_VARIABLE, DIRECTORY_VARIABLE)
_DATA = "the cause is in the data or the model"
_HARDWARE = "the cause is the hardware, or a kernel that is not deterministic"


def second_run_of(
    incident: Incident,
    command: Command,
    *,
    fit: int,
    after_backward: int | None,
    is_stopping: Callable[[], bool],
    longest_seconds: float = LONGEST_SECONDS,
) -> str:
    """Run the step of an incident again, and return in words what that shows. Nothing is raised.

    Args:
        incident: The incident, with a checkpoint.
        command: The command of the run.
        fit: The number of the fit in its script.
        after_backward: After how many backward passes of the step the sums were taken; ``None`` for an exception.
        is_stopping: Returns whether this process has to stop, and can't wait.
        longest_seconds: How long the second run may take.
    """
    place = StepPlace(number=incident.step)
    with tempfile.TemporaryDirectory(prefix="incident-") as directory:
        request = ReplayRequest(directory=directory, fit=fit, since=place, until=place, sums_after=after_backward)
        failure = _run(command, request, is_stopping, longest_seconds)
        start, outcomes, found = read_start(request), read_outcomes(request), read_sums(request)
    if start is None or start.autosave is None or os.path.basename(start.autosave) != incident.checkpoint:
        return f"could not be done: {failure or 'it did not find the checkpoint'}"
    if after_backward is None:
        own = incident.what.split(":")[0]
        raised = next((each.text for each in outcomes.values() if each.word == RAISED), "")
        return f"raises it, too: {_DATA}" if raised.split(":")[0] == own else f"does not raise it: {_HARDWARE}"
    if found is None:
        return f"could not be done: {failure or 'it did not get to the same place'}"
    return compared(incident, loss=found[0], sums=found[1])


def compared(incident: Incident, *, loss: str, sums: Mapping[str, str]) -> str:
    """Return in words what a second run shows that had this loss, and these sums.

    Args:
        incident: The first run of the step.
        loss: The loss of the second run, as text.
        sums: The sums of its tensors.
    """
    names = [*incident.sums, *(name for name in sums if name not in incident.sums)]
    different = [name for name in names if incident.sums.get(name) != sums.get(name)]
    if not different:
        return f"equals it, bit for bit: {_DATA}"
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    return f"differs, first in: {different[0]}{more}; its loss is {loss or 'not known'}: {_HARDWARE}"


def _run(command: Command, request: ReplayRequest, is_stopping: Callable[[], bool], longest_seconds: float) -> str:
    """Run the command as a replay, and return why it failed; an empty text if it did not."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # the other process needs memory on the same device
    variables = {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}
    variables |= {REPLAY_VARIABLE: request.to_json(), VARIABLE: variables.get(VARIABLE) or "1"}
    printed = Path(request.path("output"))
    deadline = time.monotonic() + longest_seconds
    try:
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command.words, cwd=command.directory or None, env=variables, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                while process.poll() is None and time.monotonic() < deadline and not is_stopping():
                    time.sleep(0.05)
                if process.poll() is None:
                    return "this run stops" if is_stopping() else f"it took more than {longest_seconds:.0f} seconds"
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
    except OSError as error:
        return str(error)
    if process.returncode == 0:
        return ""
    lines = printed.read_text(errors="replace").strip().splitlines()
    return f"exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"

"""Writes incidents: the state before the step, and the report with the line to type.

Each rank writes its own report. With several ranks, the state is written if all of them must have noticed the incident:
it is in gradients that DDP has averaged. Otherwise, the report names the last autosave instead: another rank may never
come to the same place.

No rank knows whether the others have noticed the incident, so nothing here is a collective: each rank leaves its state
as a file next to the incident, and rank 0 takes what comes within a time limit. If one does not come, no state is
written, and training continues.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, final

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks, StateBytes
from lightning_faulttolerant.errors import CheckpointError, RanksLostError
from lightning_faulttolerant.records.history import FIT
from lightning_faulttolerant.records.incidents import (
    INCIDENT_NAME,
    INCIDENTS_FOLDER,
    MAX_INCIDENTS,
    Incident,
    incident_name,
    read_incident,
)
from lightning_faulttolerant.records.lines import parse_json
from lightning_faulttolerant.storage.store import Store, open_file, open_store
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.compat import num_completed, num_completed_in_all
from lightning_faulttolerant.trainer.identity.starts import start_of_process
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.run.beginning import Beginning
from lightning_faulttolerant.trainer.save.pace import Pace

_log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long rank 0 waits for the states of the others, and they for its report."""
_POLL_SECONDS = 0.02


def all_notice(trainer: Trainer) -> bool:
    """Return whether a gradient that is not finite on this rank is so on each rank: DDP has averaged it.

    Not if gradients are accumulated without being exchanged, nor if an optimizer exchanges its own state to save it.
    """
    model = trainer.strategy.model
    exchanges = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)
    return (
        isinstance(model, torch.nn.parallel.DistributedDataParallel)
        and model.require_backward_grad_sync
        and not exchanges
    )


@final
class StatesOnDisk:
    """The ranks of one incident, for code that gathers their states.

    Args:
        store: The directory of the incidents of the fit.
        step: The step of the incident.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        token: What only the ranks of this start know: a file of an earlier start counts for nothing.
    """

    def __init__(self, store: Store, step: int, *, rank: int, num_ranks: int, token: str) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._step = step
        self._token = token

    def label(self, rank: int) -> str:
        """Return a rank's name for messages."""
        return f"rank {rank}"

    def to_all(self, step: str, value: object) -> list[object]:
        """Not possible: files only go to rank 0.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(step)

    def from_first(self, step: str, value: object) -> object:
        """Return nothing on each rank: rank 0 sends no digests, so the others leave their whole states."""
        return {}

    def to_first(self, step: str, value: Any) -> list[object] | None:
        """Leave this rank's state; on rank 0, return those of all ranks in order.

        Args:
            step: What is gathered.
            value: The position, the state, times that only an autosave needs, and what this rank says of the run.

        Raises:
            RanksLostError: On rank 0, if one does not come in time.
            CheckpointError: If the state holds an object that ``weights_only=True`` would refuse.
        """
        position, state, _, said = value
        if self.rank == 0:
            deadline = time.monotonic() + WAIT_SECONDS
            others = [self._state_of(rank, deadline) for rank in range(1, self.num_ranks)]
            return [(position, state, None, said), *others]
        if not isinstance(state, StateBytes):
            raise CheckpointError("the state of this rank holds an object that torch.load refuses")
        header = {"token": self._token, "crc32": state.crc32, "position": asdict(position), "said": said}
        with self._store.writer(self._file_of(self.rank)) as file:
            file.write(json.dumps(header).encode() + b"\n" + state.data)
        return None

    def _state_of(self, rank: int, deadline: float) -> tuple[TrainerPosition, StateBytes, None, object]:
        path = self._store.path(self._file_of(rank))
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError, ValueError, KeyError), open_file(path) as file:
                header, data = parse_json(file.readline()), file.read()
                if header["token"] == self._token:
                    state = StateBytes(data, header["crc32"])
                    return TrainerPosition(**header["position"]), state, None, header["said"]
            time.sleep(_POLL_SECONDS)
        raise RanksLostError(f"the state of rank {rank} did not come within {WAIT_SECONDS:g} seconds")

    def _file_of(self, rank: int) -> str:
        return incident_name(self._step, rank=rank, kind="state")

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within the block, this rank's file may exist; afterwards it doesn't."""
        try:
            yield
        finally:
            if self.rank:
                with suppress(OSError):
                    self._store.delete(self._file_of(self.rank))

    def wait_for(self, name: str) -> bytes | None:
        """Return the content of a file that rank 0 writes; ``None`` if it does not come in time.

        Args:
            name: The name of the file.
        """
        deadline = time.monotonic() + 2 * WAIT_SECONDS
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError), open_file(self._store.path(name)) as file:
                return file.read()
            time.sleep(_POLL_SECONDS)
        return None

    def close(self) -> None:
        """Do nothing."""


class IncidentWriter:
    """Writes the incidents of one fit, and never disturbs it.

    Args:
        trainer: The trainer that runs the fit.
        beginning: Knows the ranks, the directory, and the history.
        pace: Knows the last autosave.
        boundary: Returns what has the last capture; ``None`` before the first batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        beginning: Beginning,
        pace: Pace,
        *,
        boundary: Callable[[], Boundary | None],
    ) -> None:
        self._trainer = trainer
        self._beginning = beginning
        self._pace = pace
        self._boundary = boundary
        self._store = open_store(f"{beginning.place.directory.rstrip('/')}/{FIT}-{beginning.place.number}")
        self._command = start_of_process(sys.argv, os.environ).command

    @property
    def _ranks(self) -> Ranks:
        return self._beginning.ranks

    def make(self, what: str, *, is_exception: bool = False) -> Incident:
        """Return the report of an incident in the step in progress, with nothing written yet.

        Args:
            what: What happened.
            is_exception: Whether it is an exception.
        """
        step = num_completed_in_all(self._trainer)
        return Incident(
            step=step,
            epoch=self._trainer.current_epoch,
            batch=num_completed(self._trainer),
            rank=self._ranks.rank,
            what=what,
            time=round(time.time(), 3),
            autosave=str(self._pace.saved),
            num_batches=self._pace.num_after_saved,
            replay=self._line("--at-exception" if is_exception else f"--until {step}"),
        )

    def write(self, incident: Incident, *, is_exception: bool = False) -> Incident | None:
        """Write an incident, tell of it, and return it; ``None`` if it was not written.

        Args:
            incident: The report.
            is_exception: Whether it is an exception.
        """
        if not self._has_room(incident, is_exception=is_exception):
            return None
        try:
            incident = self._with_state(incident)
            self._write_report(incident)
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            _log.warning("The incident in %s could not be written: %r", incident.place, error)
            return None
        self._beginning.history.incident(incident.step, incident.what, incident.checkpoint)
        self._tell("\n".join([*incident.lines(), f"To see it, type: {incident.replay}"]))
        return incident

    def _has_room(self, incident: Incident, *, is_exception: bool) -> bool:
        """Return whether this incident may be written: it is new, and there are not too many."""
        if self._pace.saved is None:
            if not is_exception:
                self._tell(f"Incident in {incident.place}: {incident.what}. It is not recorded: nothing is saved yet.")
            return False
        names = self._store.folder(INCIDENTS_FOLDER).names()
        found = (INCIDENT_NAME.fullmatch(name) for name in names)
        own = {int(match["step"]) for match in found if match is not None and int(match["rank"] or 0) == incident.rank}
        if incident.step in own:
            return is_exception
        if len(own) >= MAX_INCIDENTS:
            self._tell(
                f"Incident in {incident.place}: {incident.what}. It is not recorded: there are {len(own)} in"
                f" {self._store.path(INCIDENTS_FOLDER)} already. Delete them to record more."
            )
            return False
        return True

    def _with_state(self, incident: Incident) -> Incident:
        """Write the state before the step, if that is possible, and return the report with its name."""
        boundary, name = self._boundary(), incident_name(incident.step, rank=0, kind="ckpt")
        try:
            why = "no batch had begun" if boundary is None else self._saved(boundary, incident, name)
        except Exception as error:  # noqa: BLE001 - the last autosave is there
            why = repr(error)
        return replace(incident, without=why) if why else replace(incident, checkpoint=name)

    def _saved(self, boundary: Boundary, incident: Incident, name: str) -> str:
        """Write the last capture, on rank 0 with the states of all ranks, and return why that is not possible."""
        if self._ranks.num_ranks == 1:
            return boundary.write_incident(name, self._ranks)
        if not incident.gradients or not all_notice(self._trainer):
            return "several ranks train together, and the others may not have noticed it"
        ranks = StatesOnDisk(
            self._store.folder(INCIDENTS_FOLDER),
            incident.step,
            rank=self._ranks.rank,
            num_ranks=self._ranks.num_ranks,
            token=self._beginning.place.token,
        )
        with ranks.removed():
            why = boundary.write_incident(name, ranks)
            if why or ranks.rank == 0:
                return why
            report = read_incident(ranks.wait_for(incident_name(incident.step, rank=0, kind="json")) or b"")
        return "" if report is not None and report.checkpoint else "rank 0 has not written it"

    def _write_report(self, incident: Incident) -> None:
        name = incident_name(incident.step, rank=incident.rank, kind="json")
        with self._store.writer(f"{INCIDENTS_FOLDER}/{name}") as file:
            file.write(incident.to_json().encode())

    def _line(self, which: str) -> str:
        """Return the line to type, in the directory that the run was started in."""
        number, words = self._beginning.place.number, self._command.words
        fit = f" --fit {number}" if number > 1 else ""
        return f"lightning-faulttolerant replay {which}{fit} -- {shlex.join(words) if words else 'COMMAND'}"

    def _tell(self, text: str) -> None:
        if self._ranks.rank == 0:
            tell(text)
        else:
            _log.warning("%s", text)

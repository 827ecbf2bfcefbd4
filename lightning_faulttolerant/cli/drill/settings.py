"""The settings of a drill, and the commands and environments that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_faulttolerant.records import ledger

KILL = "KILL"
TERM = "TERM"
EXCEPTION = "exception"
KINDS = (KILL, TERM, EXCEPTION)

_SWITCH_VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
_RUN_ID_VARIABLE = "PL_FAULT_TOLERANT_RUN_ID"
_RUN = "{run}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrikePlan:
    """What a process has to do for its coming strikes.

    Args:
        faults: The places where it raises an exception: the first one, then one more each time that a launcher in it
            restarts its ranks.
        saves: The batches before which it saves.
        hold: The batch before which it waits for its strike, if any.
    """

    faults: tuple[ledger.FaultPlace, ...] = ()
    saves: tuple[ledger.BatchPlace, ...] = ()
    hold: ledger.BatchPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillSettings:
    """The settings of a drill.

    Args:
        command: The user's own command, in words.
        num_strikes: Number of strikes.
        kind: ``KILL``, ``TERM`` or ``exception``.
        stages: What is struck, of `STAGES`: all that the script reaches if empty.
        at: Batches of these stages, or of training if there are none, to strike; counted over the whole run, from 0.
            Random ones if empty.
        is_checked: Whether the script runs uninterrupted twice.
        ignored: Patterns of names of logged values that are not compared.
        seed: Seed of the moments of the strikes.
        timeout_seconds: Time limit of each run; None for no limit.
        directory: Directory for ledgers and outputs.
        token: A name that is unique to this drill.
    """

    command: tuple[str, ...]
    num_strikes: int = 5
    kind: str = KILL
    stages: tuple[str, ...] = ()
    at: tuple[int, ...] = ()
    is_checked: bool = False
    ignored: tuple[str, ...] = ()
    seed: int = 0
    timeout_seconds: float | None = None
    directory: Path
    token: str

    def run_id(self, run: str) -> str:
        """Return the prefix of the run ids of one of the drill's runs. It keeps the user's existing runs untouched."""
        return f"drill-{self.token}-{run}"

    def words(self, run: str) -> tuple[str, ...]:
        """Return the command of one of the drill's runs."""
        return tuple(word.replace(_RUN, run) for word in self.command)

    def environment(self, run: str, given: Mapping[str, str], *, ledger_path: Path, plan: StrikePlan) -> dict[str, str]:
        """Return the environment variables of a process.

        Args:
            run: Name of the run that the process belongs to.
            given: Environment variables of the drill.
            ledger_path: Path of the process's ledger.
            plan: What the process has to do for its strikes.
        """
        asked = {
            ledger.FAULT_VARIABLE: ",".join(map(str, plan.faults)),
            ledger.SAVE_VARIABLE: ledger.places_text(plan.saves),
            ledger.HOLD_VARIABLE: ledger.places_text([plan.hold] if plan.hold is not None else []),
        }
        variables = {name: value for name, value in given.items() if name not in asked}
        variables.update({name: text for name, text in asked.items() if text})
        if not variables.get(_SWITCH_VARIABLE):  # the variable adds nothing if the script has the callback
            variables[_SWITCH_VARIABLE] = "1"
        variables[_RUN_ID_VARIABLE] = self.run_id(run)
        variables[ledger.LEDGER_VARIABLE] = str(ledger_path)
        return variables

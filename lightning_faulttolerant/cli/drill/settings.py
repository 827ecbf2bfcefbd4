"""What a drill is asked to do, and the commands and environments that follow from it."""

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
    """What a process is asked to do for the strikes that are to come.

    Args:
        faults: Where it is to raise an exception: the first, and one of the next each time that a launcher in it starts
            its ranks again.
        saves: Before which batches it is to save.
        hold: Before which batch it is to wait for its strike, if it is to.
    """

    faults: tuple[ledger.FaultPlace, ...] = ()
    saves: tuple[ledger.BatchPlace, ...] = ()
    hold: ledger.BatchPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillSettings:
    """How a drill is to be done.

    Args:
        command: The user's own, in words.
        num_strikes: How often the run is to be struck.
        kind: ``KILL``, ``TERM`` or ``exception``.
        at: Training batches of the whole run, from 0, that are to be struck; random ones if there are none.
        is_checked: Whether it is to run uninterrupted twice.
        ignored: Patterns of names of logged values that are not compared.
        seed: Of the moments of the strikes.
        timeout_seconds: Of each run; None for no limit.
        directory: For ledgers and outputs.
        token: Names this drill, and no other.
    """

    command: tuple[str, ...]
    num_strikes: int = 5
    kind: str = KILL
    at: tuple[int, ...] = ()
    is_checked: bool = False
    ignored: tuple[str, ...] = ()
    seed: int = 0
    timeout_seconds: float | None = None
    directory: Path
    token: str

    def run_id(self, run: str) -> str:
        """Return what the run ids of a run of the drill begin with: an existing run of the user's is not touched."""
        return f"drill-{self.token}-{run}"

    def words(self, run: str) -> tuple[str, ...]:
        """Return the command of one of the drill's runs."""
        return tuple(word.replace(_RUN, run) for word in self.command)

    def environment(self, run: str, given: Mapping[str, str], *, ledger_path: Path, plan: StrikePlan) -> dict[str, str]:
        """Return the variables of a process.

        Args:
            run: Whose process it is.
            given: The variables of the drill.
            ledger_path: Of the process.
            plan: What it is asked to do.
        """
        asked = {
            ledger.FAULT_VARIABLE: ",".join(map(str, plan.faults)),
            ledger.SAVE_VARIABLE: ledger.places_text(plan.saves),
            ledger.HOLD_VARIABLE: ledger.places_text([plan.hold] if plan.hold is not None else []),
        }
        variables = {name: value for name, value in given.items() if name not in asked}
        variables.update({name: text for name, text in asked.items() if text})
        if not variables.get(_SWITCH_VARIABLE):  # it adds nothing where the script has the callback
            variables[_SWITCH_VARIABLE] = "1"
        variables[_RUN_ID_VARIABLE] = self.run_id(run)
        variables[ledger.LEDGER_VARIABLE] = str(ledger_path)
        return variables

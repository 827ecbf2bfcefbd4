"""Ledgers as processes write them, changed where a test needs it, and processes, strikes, and runs made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_faulttolerant.cli.drill.ledgers import RankOfRun, join
from lightning_faulttolerant.cli.drill.process import ProcessProgress, StrikePlan
from lightning_faulttolerant.cli.drill.result import Strike
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.ledger import FaultPlace
from lightning_faulttolerant.records.lines import Line

Change = Callable[[Line], Line | None]

SURROUNDINGS = {"torch": "2.13.0", "device": "cpu x86_64", "threads": 2}
NUM_EPOCHS = 2
NUM_BATCHES = 4


def line(event: str, *, fit: int = 1, **values: Any) -> Line:
    """Return one line."""
    return {"event": event, "fit": fit, "time": 0.0, **values}


def begun(*, fit: int = 1, pid: int = 1, function: str = "fit", **surroundings: Any) -> Line:
    """Return the line of a fit or an evaluation that begins."""
    return line(
        ledger.FIT,
        fit=fit,
        function=function,
        pid=pid,
        rank=0,
        num_ranks=1,
        num_batches=NUM_BATCHES,
        max_epochs=NUM_EPOCHS,
        surroundings={**SURROUNDINGS, **surroundings},
    )


def resumed(epoch: int, batch: int, *, fit: int = 1, text: str | None = None, **values: Any) -> Line:
    """Return the line of a fit that resumes."""
    words = f"before batch {batch} of epoch {epoch}" if text is None else text
    return line(ledger.RESUMED, fit=fit, epoch=epoch, batch=batch, text=words, exact=True, path="a.ckpt", **values)


def autosave_line(epoch: int, batch: int, **values: Any) -> Line:
    """Return the line of an autosave."""
    return line(ledger.AUTOSAVE, epoch=epoch, batch=batch, path="a.ckpt", **values)


def batch_line(epoch: int, batch: int, *, fit: int = 1, **values: Any) -> Line:
    """Return the line of a batch."""
    name = f"{fit}-{epoch}-{batch}"
    own = {
        "order": f"order {name}",
        "content": f"content {name}",
        "rng": f"rng {name}",
        "loss": (1 / (1 + epoch * NUM_BATCHES + batch)).hex(),
        "learning_rates": [[(0.1).hex()]],
    }
    return line(ledger.BATCH, fit=fit, epoch=epoch, batch=batch, **{**own, **values})


def evaluated_line(number: int, *, epoch: int = 0, batch: int = 0, fit: int = 1, **values: Any) -> Line:
    """Return the line of a batch of an evaluation: `number` batches of it have begun."""
    name = f"{fit}-{epoch}-{batch}-{number}"
    own = {"content": f"content {name}", "rng": f"rng {name}", "output": (1 / number).hex()}
    place = {"epoch": epoch, "batch": batch, "validation_batch": number}
    return line(ledger.EVALUATED, fit=fit, **place, **{**own, **values})


def evaluation_lines(*, fit: int = 2, start: int = 0, **returned: Any) -> list[Line]:
    """Return the lines of an evaluation of 4 batches from a batch to its end."""
    lines = [evaluated_line(number, fit=fit) for number in range(start + 1, NUM_BATCHES + 1)]
    values = {"returned": {"accuracy": (0.5).hex(), **returned}, "metrics": {}, "rng": "rng"}
    return [*lines, line(ledger.END, fit=fit, **values)]


def log_line(epoch: int, begun: int, *, fit: int = 1, validating: bool = False, **values: Any) -> Line:
    """Return the line of logged values."""
    metrics = {"loss": f"logged at {epoch} {begun} {validating}"}
    step = epoch * NUM_BATCHES + begun
    own = {"step": step, "metrics": metrics, "epoch_end": False, "logger": None}
    return line(ledger.LOG, fit=fit, epoch=epoch, batch=begun, validating=validating, **{**own, **values})


def fit_lines(*, fit: int = 1, start: tuple[int, int] = (0, 0)) -> list[Line]:
    """Return the lines of a fit from a place to its end."""
    lines = []
    for epoch in range(NUM_EPOCHS):
        for batch in range(NUM_BATCHES):
            if (epoch, batch) >= start:
                lines += [batch_line(epoch, batch, fit=fit), log_line(epoch, batch + 1, fit=fit)]
        if (epoch, NUM_BATCHES) >= start:
            place: dict[str, Any] = {"fit": fit, "epoch": epoch, "batch": NUM_BATCHES}
            metrics = {"accuracy": (0.5).hex()}
            lines += [
                line(ledger.VALIDATED, **place, content=f"validation {epoch}", metrics=metrics),
                log_line(epoch, NUM_BATCHES, fit=fit, validating=True),
                log_line(epoch, NUM_BATCHES, fit=fit, epoch_end=True, metrics={"at the end": epoch}),
            ]
    metrics = {"accuracy": (0.5).hex()}
    return [*lines, line(ledger.END, fit=fit, weights="weights", optimizers="optimizers", metrics=metrics, rng="rng")]


def changed(lines: list[Line], change: Change) -> list[Line]:
    """Return the lines as `change` returns them; None leaves a line out."""
    return [new for old in lines if (new := change(dict(old))) is not None]


def at(epoch: int, batch: int, event: str = ledger.BATCH, **values: Any) -> Change:
    """Change the values of one line."""

    def change(found: Line) -> Line:
        here = (found["event"], found.get("epoch"), found.get("batch")) == (event, epoch, batch)
        return {**found, **values} if here else found

    return change


def since(epoch: int, batch: int, **values: Any) -> Change:
    """Change the values of each batch from one on."""

    def change(found: Line) -> Line:
        is_in_background = found["event"] == ledger.BATCH and (found["epoch"], found["batch"]) >= (epoch, batch)
        return {**found, **values} if is_in_background else found

    return change


class MadeProcess:
    """A process that has ended, with the lines that its ranks have written."""

    def __init__(
        self,
        *ranks: list[Line],
        exit_code: int = -9,
        num_restarts: int = 0,
        fault: str = "",
        printed: Sequence[str] = (),
    ) -> None:
        self._ranks = ranks
        self._printed = list(printed)
        self.exit_code = exit_code
        self.progress = ProcessProgress(number=0, num_restarts=num_restarts)
        self.plan = StrikePlan(faults=(FaultPlace.parse(fault),) if fault else ())
        self.output = Path("the output")

    def lines(self) -> dict[int, list[Line]]:
        """Return the lines of each rank."""
        return dict(enumerate(self._ranks))

    def tail(self, num_lines: int) -> list[str]:
        """Return the end of its output."""
        return self._printed[-num_lines:]


class StruckProcess(MadeProcess):
    """A process with the lines that identify a strike."""

    def __init__(self, lines: list[Line], *, exit_code: int = 1, hooks: tuple[str, ...] = ()) -> None:
        super().__init__(lines, exit_code=exit_code)
        self.number = 0
        self.began = 0.0
        self.seconds = 5.0
        self.plan = StrikePlan(faults=tuple(FaultPlace(batch=(1, 0, 0), hook=hook) for hook in hooks))


def strike(resumed_at: int, *, exit_code: int = -9) -> Strike:
    """Return a strike that counts."""
    return Strike(
        number=1,
        kind="KILL",
        stage="train",
        place="batch 3 of epoch 0",
        fit=1,
        epoch=0,
        batch=3,
        at=3,
        resumed_at=resumed_at,
        resumed_batch=None,
        resumed_text="",
        num_twice=1,
        seconds_in_process=1.0,
        seconds_to_first_batch=1.0,
        exit_code=exit_code,
    )


def whole() -> list[RankOfRun]:
    """Return an uninterrupted run."""
    return [join(0, [[begun(), *fit_lines()]])]


def validated_lines() -> list[Line]:
    """Return the lines of a fit of two batches, a validation run of three, and one more batch."""
    run = [evaluated_line(number, batch=2) for number in (1, 2, 3)]
    logged = [log_line(0, 2, validating=True, validation_batch=number) for number in (1, 2, 3)]
    result = line(ledger.VALIDATED, epoch=0, batch=2, metrics={"accuracy": (0.3).hex()})
    validation = [event for pair in zip(run, logged, strict=True) for event in pair]
    return [batch_line(0, 0), batch_line(0, 1), *validation, result, batch_line(0, 2)]


def whole_lines() -> list[Line]:
    """Return the lines of a script that fits, validating in the middle, and tests."""
    end = line(ledger.END, weights="weights", optimizers="optimizers", metrics={}, rng="rng")
    return [begun(), *validated_lines(), end, begun(fit=2, function="test"), *evaluation_lines()]

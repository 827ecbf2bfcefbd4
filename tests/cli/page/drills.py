"""Possible drills, for pages: invented, but consistent."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.cli.drill.result import Cause, Difference, DrillResult, DrillVerdict, Point, RunOfDrill

BATCHES_PER_EPOCH = 100


def run(name: str, losses: Sequence[float | None], *, begins: Sequence[int] = (0,)) -> RunOfDrill:
    """Return a run with these losses, whose processes begin at these batches."""
    points = tuple(
        Point(
            number=number,
            fit=1,
            epoch=number // BATCHES_PER_EPOCH,
            batch=number % BATCHES_PER_EPOCH,
            loss=loss,
            process=max(process for process, begin in enumerate(begins) if begin <= number),
        )
        for number, loss in enumerate(losses)
    )
    return RunOfDrill(
        name=name,
        curve=points,
        num_processes=len(begins),
        num_ranks=1,
        num_fits=1,
        num_validations=len(points) // 100,
        num_evaluated=0,
        num_logs=len(points) // 50,
        num_autosaves=3 * len(begins),
        seconds=61.3 * len(begins),
        is_complete=True,
    )


def strike(number: int, *, at: int, num_twice: int) -> result.Strike:
    """Return a strike at a batch, and the batches that are repeated after it."""
    epoch, batch = divmod(at, BATCHES_PER_EPOCH)
    to_epoch, to_batch = divmod(at - num_twice, BATCHES_PER_EPOCH)
    return result.Strike(
        number=number,
        kind="KILL",
        stage="train",
        place=f"batch {batch} of epoch {epoch}",
        resumed_batch=None,
        fit=1,
        epoch=epoch,
        batch=batch,
        at=at,
        resumed_at=at - num_twice,
        resumed_text=f"batch {to_batch} of epoch {to_epoch}",
        num_twice=num_twice,
        seconds_in_process=14.2 + number,
        seconds_to_first_batch=5.31 + number / 7,
        exit_code=-9,
    )


def losses_of(num_batches: int) -> list[float]:
    """Return losses that fall, as in a training."""
    noise = random.Random(0)
    return [0.12 + 2.2 * math.exp(-5 * n / num_batches) * (1 + 0.18 * noise.gauss(0, 1)) for n in range(num_batches)]


def exact_drill(num_batches: int = 600, *, num_strikes: int = 3, losses: Sequence[float | None] = ()) -> DrillResult:
    """Return a drill with two equal runs."""
    losses = losses or losses_of(num_batches)
    places = [len(losses) * number // (num_strikes + 1) for number in range(1, num_strikes + 1)]
    strikes = tuple(strike(number, at=at, num_twice=min(23, at)) for number, at in enumerate(places, 1))
    begins = [0, *(each.resumed_at for each in strikes)]
    text = f"Struck {num_strikes} times, the run is, bit for bit, the run that was left alone."
    return DrillResult(
        command=("python", "train.py", "--data", "/mnt/data/my digits", "--epochs", "12"),
        verdict=DrillVerdict(word=result.EXACT, text=text),
        strikes=strikes,
        num_wanted=num_strikes,
        kind="KILL",
        seed=20261122,
        began=1795327200.0,
        seconds=412.7,
        directory="/home/ada/drills/2026-11-22",
        versions={"lightning_faulttolerant": "0.1.0", "torch": "2.13.0", "device": "cpu", "threads": "2"},
        uninterrupted=run(result.UNINTERRUPTED, losses),
        interrupted=run(result.INTERRUPTED, losses, begins=begins),
    )


def differing_drill(*, at: int = 340) -> DrillResult:
    """Return a drill with runs that differ from one batch on."""
    drill = exact_drill()
    losses = [loss + (0.2 if number >= at else 0) for number, loss in enumerate(losses_of(600))]
    difference = Difference(
        place=f"batch {at % 100} of epoch {at // 100}",
        number=at,
        rank=0,
        values=(
            result.Value(name="contents of the batch", expected="9f1c 03ab 77e0", found="41d2 9c07 b5fa"),
            result.Value(name="loss", expected="0.31415927410125732", found="0.31398606300354004"),
        ),
        equal=("order of the samples", "main RNG", "learning rates"),
        num_equal=at,
        process=2,
    )
    cause = Cause(
        part="augmentation",
        text="The same samples were drawn, but what was made of them differs, from the first batch after a restart.",
        advice=("Keep the generator as an attribute of the data set.", "Or draw from torch, numpy or random."),
    )
    verdict = DrillVerdict(
        word=result.DIFFERS,
        text=f"The two runs are equal up to batch {at % 100} of epoch {at // 100}, and differ from there on.",
        cause=cause,
        difference=difference,
        notes=("Two strikes before this batch left no trace.",),
    )
    assert drill.interrupted is not None
    begins = [0, *(each.resumed_at for each in drill.strikes)]
    return replace(drill, verdict=verdict, interrupted=run(result.INTERRUPTED, losses, begins=begins))

"""Possible drills, for pages: invented, but consistent."""

import math
import random
from dataclasses import replace

from lightning_faulttolerant.cli.drill.result import (
    DIFFERS,
    EXACT,
    INTERRUPTED,
    UNINTERRUPTED,
    Cause,
    Difference,
    DrillResult,
    DrillVerdict,
    Point,
    RunOfDrill,
    Strike,
    Value,
)


def curve(num_batches, *, num_batches_of_epoch=100, seed=0):
    """Return a loss that falls, as in a training."""
    drawn = random.Random(seed)
    return tuple(
        Point(
            number=number,
            fit=1,
            epoch=number // num_batches_of_epoch,
            batch=number % num_batches_of_epoch,
            loss=0.12
            + 2.2 * math.exp(-5 * number / num_batches) * (1 + 0.18 * drawn.gauss(0, 1))
            + 0.03 * drawn.random(),
        )
        for number in range(num_batches)
    )


def strikes_at(places, *, lost=23, num_batches_of_epoch=100, kind="KILL"):
    """Return a strike at each place, with a few repeated batches each."""
    strikes = []
    for number, at in enumerate(places, 1):
        resumed_at = max(at - lost * (1 + number % 3), 0)
        epoch, batch = divmod(resumed_at, num_batches_of_epoch)
        strikes.append(
            Strike(
                number=number,
                kind=kind,
                stage="train",
                place=f"batch {at % num_batches_of_epoch} of epoch {at // num_batches_of_epoch}",
                resumed_batch=None,
                fit=1,
                epoch=at // num_batches_of_epoch,
                batch=at % num_batches_of_epoch,
                at=at,
                resumed_at=resumed_at,
                resumed_text=f"batch {batch} of epoch {epoch}",
                num_twice=at - resumed_at,
                seconds_in_process=14.2 + number,
                seconds_to_first_batch=5.31 + number / 7,
                exit_code=-9,
            )
        )
    return tuple(strikes)


def run(name, points, *, num_processes=1):
    """Return a run with a curve."""
    return RunOfDrill(
        name=name,
        curve=points,
        num_processes=num_processes,
        num_ranks=1,
        num_fits=1,
        num_validations=len(points) // 100,
        num_evaluated=0,
        num_logs=len(points) // 50,
        num_autosaves=3 * num_processes,
        seconds=61.3 * num_processes,
        is_complete=True,
    )


def exact_drill(num_batches=1200, *, num_strikes=5, seed=3):
    """Return a drill with two equal runs."""
    points = curve(num_batches)
    places = sorted(random.Random(seed).sample(range(80, num_batches - 20), num_strikes))
    strikes = strikes_at(places)
    begins = [(strike.resumed_at, strike.number) for strike in strikes]
    done = tuple(
        replace(point, process=max((number for at, number in begins if at <= point.number), default=0))
        for point in points
    )
    return DrillResult(
        command=("python", "train.py", "--data", "/mnt/data/my digits", "--epochs", "12"),
        verdict=DrillVerdict(
            word=EXACT,
            text=f"Struck {num_strikes} times, the run is, bit for bit, the run that was left alone.",
        ),
        strikes=strikes,
        num_wanted=num_strikes,
        kind="KILL",
        seed=20261122,
        began=1795327200.0,
        seconds=412.7,
        directory="/home/ada/drills/2026-11-22",
        versions={
            "lightning_faulttolerant": "0.1.0",
            "torch": "2.13.0",
            "lightning": "2.6.6",
            "device": "cpu",
            "threads": "2",
        },
        uninterrupted=run(UNINTERRUPTED, points),
        interrupted=run(INTERRUPTED, done, num_processes=num_strikes + 1),
    )


def differing_drill(num_batches=1200, *, at=640):
    """Return a drill with runs that differ from one batch on."""
    drill = exact_drill(num_batches, num_strikes=3)
    drawn = random.Random(8)
    drift, points = 0.0, []
    for point in drill.interrupted.curve:
        if point.number >= at:
            drift += drawn.gauss(0.0006, 0.004)
        points.append(replace(point, loss=point.loss + abs(drift)))
    difference = Difference(
        place=f"batch {at % 100} of epoch {at // 100}",
        number=at,
        rank=0,
        values=(
            Value(name="contents of the batch", expected="9f1c 03ab 77e0", found="41d2 9c07 b5fa"),
            Value(name="loss", expected="0.31415927410125732", found="0.31398606300354004"),
        ),
        equal=("order of the samples", "main RNG", "learning rates"),
        num_equal=at,
        process=2,
    )
    cause = Cause(
        part="augmentation",
        text="The same samples were drawn, but what was made of them differs, from the first batch after a restart: "
        "the augmentation draws from a generator whose state is not restored.",
        advice=(
            "Keep the generator as an attribute of the data set or the transform, not in a global of a module.",
            "Or draw from torch, numpy or random, whose global generators are restored in each worker.",
        ),
    )
    verdict = DrillVerdict(
        word=DIFFERS,
        text=f"The two runs are equal up to batch {at % 100} of epoch {at // 100}, and differ from there on.",
        cause=cause,
        difference=difference,
        notes=("Two strikes before this batch left no trace.",),
    )
    return replace(drill, verdict=verdict, interrupted=replace(drill.interrupted, curve=tuple(points)))

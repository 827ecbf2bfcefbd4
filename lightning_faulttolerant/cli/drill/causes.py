"""The likely cause of a difference and the advice for it, from the first part of a step that differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_faulttolerant.cli.drill.comparison import Mismatch, different_fields
from lightning_faulttolerant.cli.drill.ledgers import STEPS
from lightning_faulttolerant.cli.drill.result import Cause, Value
from lightning_faulttolerant.records import ledger

DATA_ORDER = "data order"
AUGMENTATION = "augmentation"
MAIN_RNG = "main RNG"
WEIGHTS = "weights"
OPTIMIZERS = "optimizers"
LEARNING_RATES = "learning rates"
METRICS = "metrics"
RETURNED = "returned results"
LOGGED_VALUES = "logged values"
SURROUNDINGS = "surroundings"
_MAX_NAMES = 5
_MONITORED = re.compile(r"(\w+)\.on_\w+[./]")
"""A column of DeviceStatsMonitor: its class, the hook that measures, and the measured quantity."""

COURSE = "course of the run"
NOT_RESUMED = "not resumed"
NOT_EXACT = "not restored exactly"

_SAVE = (
    "give that object state_dict and load_state_dict, or pass two functions that save and restore it to"
    " FaultTolerance.register"
)
_FOUND_AGAIN = (
    "The second run finds what the first has left: weights or a cache that the script loads where they are there."
    " {run} in the command keeps the two apart."
)
_ORDER = Cause(
    part=DATA_ORDER,
    text="The batch was made of other samples.",
    advice=(
        "A generator that a sampler draws from must be one of torch's, NumPy's or Python's, which the sampler, the data"
        " set, or one of your modules holds: one of another library is not restored.",
        f"What the order depends on and Python does not hold (a counter in a library of C, a file): {_SAVE}.",
        "A list of files: sort it. os.listdir, glob and sets may give another order in each process.",
    ),
)
_AUGMENTATION = Cause(
    part=AUGMENTATION,
    text="The batch was made of the same samples, but other things were made of them: an augmentation differs, or what"
    " the data set keeps between samples.",
    advice=(
        "What a data set or a transform keeps outside of Python (in a library of C, in a file) begins again in each"
        " process: make it a function of the sample's index and of the epoch.",
        "A generator that an augmentation draws from must be one of torch's, NumPy's or Python's, which the data set,"
        " the transform, or one of your modules holds: one of another library is not restored.",
        'FaultTolerance(worker_rng="per_sample") seeds each sample by itself, so that only what the data set counts'
        " or caches can still differ.",
    ),
)
_DATA = Cause(
    part=AUGMENTATION,
    text="The batch has another content. It was not made of indices that could be compared, so either other samples"
    " were read, or other things were made of them.",
    advice=(
        "An iterable data set continues exactly where it has state_dict and load_state_dict, or where reading it again"
        " gives the same samples: look for files in another order, and for a shared source that moves on.",
        *_AUGMENTATION.advice[:2],
    ),
)
_EVALUATION_DATA = Cause(
    part=AUGMENTATION,
    text="The data of the evaluation differ: in their order, or in what was made of them.",
    advice=(*_ORDER.advice[:1], *_AUGMENTATION.advice[:2]),
)
_MAIN_RNG = Cause(
    part=MAIN_RNG,
    text="Samples and batch are equal, but before the step the random generators of the main process stood elsewhere:"
    " something drew from them in one run and not in the other.",
    advice=(
        "Look for draws that depend on a file, or on the process: a cache that is filled once, a condition on the first"
        " batch of a process. Give them their own generator.",
        "Hooks of the start of an epoch are not called again for an epoch that is resumed in its middle.",
    ),
)
_WEIGHTS = Cause(
    part=WEIGHTS,
    text="The batch and the random generators are equal, but not what the step made of them: the module computed with"
    " other weights, or with other values beside them, or a kernel is not deterministic.",
    advice=(
        f"What the module keeps where Python does not see it (a library of C, an iterator, a file): {_SAVE}.",
        "Kernels that are not deterministic differ in two uninterrupted runs too: --check tells.",
    ),
)
_OPTIMIZERS = Cause(
    part=OPTIMIZERS,
    text="The weights are equal, but not the state of the optimizers.",
    advice=(
        "An optimizer that is not returned by configure_optimizers is not saved: return it, or save its state_dict in"
        " on_save_checkpoint.",
    ),
)
_LEARNING_RATES = Cause(
    part=LEARNING_RATES,
    text="All that a step depends on is equal but the learning rate: its scheduler stands elsewhere.",
    advice=(
        "A scheduler that is stepped by hand and not returned by configure_optimizers is not saved: return it, or save"
        " its state_dict in on_save_checkpoint.",
        f"A schedule that counts where Python does not see it: {_SAVE}.",
    ),
)
_METRICS = Cause(
    part=METRICS,
    text="Training continues equal, but a metric does not: its sum was not the same.",
    advice=(
        "A torchmetrics.Metric continues if it is held by the module, in a list or a dict too: one in a callback needs"
        " a state_dict of that callback.",
        f"A sum that Python does not hold: {_SAVE}.",
    ),
)
_RETURNED = Cause(
    part=RETURNED,
    text="Every batch of the evaluation is equal, but not what the evaluation returned of them.",
    advice=_METRICS.advice,
)
_LOGGED = Cause(
    part=LOGGED_VALUES,
    text="Training is equal, but not what was logged.",
    advice=(
        "What is measured by the clock or on the device (times, rates, memory) is never equal: --ignore NAME passes"
        " over it.",
        f"What is logged from a file, or from a library of C: {_SAVE}.",
    ),
)
_COURSE = Cause(
    part=COURSE,
    text="The two runs did not do the same things one after the other.",
    advice=(
        "What decides when to stop, to validate or to log must be saved: a condition on the clock (max_time) or on"
        " files of an earlier process is not.",
        "A script that writes its outputs in one place finds those of its earlier processes: see that it does not take"
        " them for a reason to do something else. {run} in the command keeps the drill's two runs apart.",
    ),
)


def cause_of(mismatch: Mismatch) -> Cause:
    """Return the likely cause of a mismatch, judged by the events alone.

    Args:
        mismatch: The first event that differs.
    """
    if not mismatch.fields:
        return _COURSE
    if mismatch.kind == ledger.BATCH:
        return _of_batch(mismatch)
    if mismatch.kind == ledger.EVALUATED:
        return {"content": _EVALUATION_DATA, "rng": _MAIN_RNG}.get(mismatch.fields[0], _WEIGHTS)
    if mismatch.kind == ledger.VALIDATED:
        return _METRICS if _continues_equal(mismatch) else _WEIGHTS
    if mismatch.kind == ledger.LOG:
        source = _source_of(mismatch)
        if source is not None:
            return cause_of(source)
        return _LOGGED if _continues_equal(mismatch) else _WEIGHTS
    return _of_end(mismatch)


def _of_batch(mismatch: Mismatch) -> Cause:
    assert mismatch.expected is not None
    first = mismatch.fields[0]
    if first == "content":
        cause = _DATA if mismatch.expected.values.get("order") is None else _AUGMENTATION
        if "rng" not in mismatch.fields:
            return cause
        both = (
            " The random generators of the main process stood elsewhere too: with num_workers=0 the data draws from"
            " them, so one of the two made the other differ."
        )
        return Cause(part=cause.part, text=cause.text + both, advice=(*cause.advice, *_MAIN_RNG.advice))
    causes = {"order": _ORDER, "rng": _MAIN_RNG, "learning_rates": _LEARNING_RATES}
    return causes.get(first, _WEIGHTS)


def _of_end(mismatch: Mismatch) -> Cause:
    if "weights" in mismatch.fields:
        return Cause(
            part=WEIGHTS,
            text="All batches and losses are equal, but not the final weights: some that no loss depends on differ.",
            advice=_WEIGHTS.advice[:2],
        )
    causes = {"optimizers": _OPTIMIZERS, "returned": _RETURNED, "metrics": _METRICS, "rng": _MAIN_RNG}
    return causes.get(mismatch.fields[0], _COURSE)


def _continues_equal(mismatch: Mismatch) -> bool:
    """Return whether the weights are the same in everything that follows the mismatch."""
    if any(event.kind in STEPS for event in mismatch.expected_next):
        return mismatch.num_batches_equal_behind > 0
    ends = [
        next((event for event in events if event.kind == ledger.END), None)
        for events in (mismatch.expected_next, mismatch.found_next)
    ]
    weights = [end.values.get("weights", "not of an evaluation") if end is not None else None for end in ends]
    return weights[0] is not None and weights[0] == weights[1]


def _source_of(log: Mismatch) -> Mismatch | None:
    """Return the mismatch of the batch, validation run, or evaluation that logged the values, if it differs too.

    The values that a step, or the end of an evaluation, logs are written before its own line.
    """
    rests = (list(log.expected_next), list(log.found_next))
    places = [next((i for i, event in enumerate(rest) if event.kind != ledger.LOG), None) for rest in rests]
    if None in places:
        return None
    (one, one_next), (other, other_next) = (
        (rest[place], rest[place + 1 :]) for rest, place in zip(rests, places, strict=True) if place is not None
    )
    fields = different_fields(one, other)
    if not fields or (one.kind == ledger.END and "returned" not in fields):
        return None
    return Mismatch(
        rank=log.rank,
        expected=one,
        found=other,
        fields=fields,
        number=log.number,
        num_evaluated=log.num_evaluated,
        expected_next=one_next,
        found_next=other_next,
    )


def not_exact(reasons: Sequence[str], output: str) -> Cause:
    """Return the cause of a difference in a run that reported itself that it does not continue exactly.

    Args:
        reasons: The reasons that the run reported.
        output: The file with the rest of its report.
    """
    said = "; ".join(reasons) or f"its output says more: {output}"
    return Cause(
        part=NOT_EXACT,
        text=f"A restart said itself that it could not restore everything: {said}.",
        advice=("strict=False lets a run continue like that. Do what the message says, or do without strict=False.",),
    )


def surroundings_differ(values: Sequence[Value]) -> Cause:
    """Return the cause of a difference between runs that computed in different surroundings.

    Args:
        values: The surroundings that differ.
    """
    told = ", ".join(f"{value.name} {value.expected} and then {value.found}" for value in values)
    return Cause(
        part=SURROUNDINGS,
        text=f"The processes did not compute in the same surroundings: {told}. The last bits of sums depend on that.",
        advice=(
            "Fix it for the drill, and for the runs that are to be exact: OMP_NUM_THREADS or torch.set_num_threads for"
            " threads, one kind of machine, one environment of packages.",
        ),
    )


def different_surroundings(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[Value]:
    """Return the differences between the surroundings of two processes.

    Args:
        expected: Surroundings of the uninterrupted run, as in the ledger.
        found: Surroundings of a process of the other run.
    """
    return [
        Value(name=name.replace("_", " "), expected=str(expected.get(name)), found=str(found.get(name)))
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]


def not_deterministic(mismatch: Mismatch, difference_place: str) -> Cause:
    """Return the reason why a script differs from run to run without any interruption.

    Args:
        mismatch: The first event that differs.
        difference_place: The place of that event, in words.
    """
    first = mismatch.fields[0] if mismatch.fields else ""
    if mismatch.kind == ledger.BATCH and mismatch.number == 0 and {"rng", "order"} & set(mismatch.fields):
        return Cause(
            part="no seed",
            text="The runs begin with different random numbers: nothing seeds the generators, or another number each"
            " time, or one run has drawn from them where the other found its work done.",
            advice=("Call seed_everything(1, workers=True) before model and data are built.", _FOUND_AGAIN),
        )
    if mismatch.kind == ledger.BATCH and first in ("order", "content"):
        return Cause(
            part=DATA_ORDER if first == "order" else AUGMENTATION,
            text="The data differ from run to run.",
            advice=(
                "Seed every generator that the data come from: seed_everything(1, workers=True) seeds those of Python,"
                " NumPy and torch, in the workers too, but no np.random.default_rng() and no library with its own.",
                "Take nothing from the clock, from os.listdir, glob or a set without sorting it (sets of texts change"
                " with PYTHONHASHSEED). DataLoader(in_order=False) gives the batches as they come.",
                _FOUND_AGAIN,
            ),
        )
    if mismatch.kind == ledger.BATCH and first == "loss":
        return Cause(
            part=WEIGHTS if mismatch.number == 0 else "kernels",
            text="Equal batches give different losses: the weights are not initialised alike, or a kernel is not"
            " deterministic.",
            advice=(
                "Call seed_everything(1, workers=True) before the model is built.",
                _FOUND_AGAIN,
                "On a GPU: Trainer(deterministic=True, benchmark=False). On a CPU: a fixed number of threads.",
            ),
        )
    if mismatch.kind == ledger.LOG:
        return Cause(
            part=LOGGED_VALUES,
            text="What is logged differs from run to run, as times and rates do.",
            advice=tuple(f"--ignore {name!r} passes over it." for name in _patterns(_logged_names(mismatch))),
        )
    cause = cause_of(mismatch)
    return Cause(part=cause.part, text=f"The runs differ at {difference_place}.", advice=cause.advice)


def _patterns(names: Sequence[str]) -> list[str]:
    """Return patterns that match `names`: a single one for all columns that a monitor prefixes with its own name."""
    monitors = (_MONITORED.match(name) for name in names)
    found = [name if monitor is None else f"{monitor[1]}.*" for name, monitor in zip(names, monitors, strict=True)]
    return list(dict.fromkeys(found))[:_MAX_NAMES]


def _logged_names(mismatch: Mismatch) -> list[str]:
    if mismatch.expected is None or mismatch.found is None:
        return []
    one, other = (event.values.get("metrics") or {} for event in (mismatch.expected, mismatch.found))
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]

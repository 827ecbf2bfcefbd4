"""The table of causes: why two runs of a drill differ, or can't be judged, each cause with its advice.

The first event that differs decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from lightning_faulttolerant.cli.drill.comparison import Mismatch, different_fields
from lightning_faulttolerant.cli.drill.ledgers import STAGES, STEPS
from lightning_faulttolerant.cli.drill.result import Cause
from lightning_faulttolerant.cli.drill.running import NOT_STOPPED, RESUMED, TIMED_OUT
from lightning_faulttolerant.records import ledger

_MAX_NAMES = 5
_MONITORED = re.compile(r"(\w+)\.on_\w+[./]")
"""A column of DeviceStatsMonitor: its class, the hook that measures, and the measured quantity."""


_SAVE = (
    "give its object state_dict and load_state_dict, or pass two functions that save and restore it to"
    " FaultTolerance.register"
)
_GENERATOR = (
    "A generator must be one of torch's, NumPy's, or Python's, and the sampler, the data set, the transform, or one of"
    " your modules must hold it. Those of other libraries are not restored."
)
_RUN = "Separate the outputs of the runs, as in --output out/{run}: {run} becomes uninterrupted or interrupted."
_FIRST_RUN_LEFT = (
    "The second run may find files of the first one, such as weights or a cache that the script loads. Put {run} into "
    "the command to separate the two."
)

# What differs after a restart.

DATA_ORDER = Cause(
    part="data order",
    text="The batch has different samples.",
    advice=(
        _GENERATOR,
        f"If the order depends on state outside Python (a counter in a C library, a file), {_SAVE}.",
        "Sort lists of files: os.listdir, glob, and sets may give a different order in each process.",
    ),
)
AUGMENTATION = Cause(
    part="augmentation",
    text="The batch has the same samples, but different contents: an augmentation or the data set's state differs.",
    advice=(
        "State of a data set or a transform outside Python (a C library, a file) starts again in each process. Make it"
        " a function of the sample's index and the epoch.",
        _GENERATOR,
        'FaultTolerance(worker_rng="per_sample") seeds each sample by itself. Then only what the data set counts or'
        " caches can differ.",
    ),
)
ITERABLE_DATA = Cause(
    part="augmentation",
    text="The batch has different contents. Its samples differ, or their contents: it has no indices to compare.",
    advice=(
        "An iterable data set continues exactly if it has state_dict and load_state_dict, or if reading it again "
        "yields the same samples. Look for files in a different order, and for a source that other readers advance.",
        *AUGMENTATION.advice[:2],
    ),
)
EVALUATION_DATA = Cause(
    part="augmentation",
    text="The data of the evaluation differ, in their order or in their contents.",
    advice=AUGMENTATION.advice[:2],
)
MAIN_RNG = Cause(
    part="main RNG",
    text="Samples and batch are equal, but before the step the main process's random generators were in another state:"
    " something drew from them in only one run.",
    advice=(
        "Look for draws that depend on a file or on the process: a cache that is filled once, a condition on the first"
        " batch of a process. Give them their own generator.",
        "Epoch-start hooks are not called again for an epoch that resumes in the middle.",
    ),
)
WEIGHTS = Cause(
    part="weights",
    text="The batch and the random generators are equal, but the result of the step is not: the module has other"
    " weights or other state, or a kernel is not deterministic.",
    advice=(
        f"If the module has state that Python can't read (a C library, an iterator, a file), {_SAVE}.",
        "Nondeterministic kernels make two uninterrupted runs differ, too: --check shows it.",
    ),
)
FINAL_WEIGHTS = replace(
    WEIGHTS, text="All batches and losses are equal, but final weights that no loss depends on differ."
)
OPTIMIZERS = Cause(
    part="optimizers",
    text="The weights are equal, but the optimizers' states differ.",
    advice=(
        "An optimizer that configure_optimizers does not return is not saved. Return it, or save its state_dict in"
        " on_save_checkpoint.",
    ),
)
LEARNING_RATES = Cause(
    part="learning rates",
    text="Only the learning rate of the step differs: its scheduler is in another state.",
    advice=(
        "A scheduler that you step by hand and configure_optimizers does not return is not saved. Return it, or save"
        " its state_dict in on_save_checkpoint.",
        f"If a schedule counts outside Python, {_SAVE}.",
    ),
)
METRICS = Cause(
    part="metrics",
    text="Training is equal, but a metric differs.",
    advice=(
        "A torchmetrics.Metric continues if the module holds it, also in a list or a dict. One in a callback needs a"
        " state_dict of that callback.",
        f"If a sum is kept outside Python, {_SAVE}.",
    ),
)
RETURNED = Cause(
    part="returned results",
    text="All batches of the evaluation are equal, but its results differ.",
    advice=(
        "If a step returns nothing, only its batch and the random generators are compared: let it return what it logs.",
        "A step that depends on the time or on a file differs without an interruption, too: --check shows it.",
        *METRICS.advice,
    ),
)
LOGGED_VALUES = Cause(
    part="logged values",
    text="Training is equal; logged values differ.",
    advice=(
        "Values from the clock or the device (times, rates, memory) are never equal. --ignore NAME ignores them.",
        f"If a value comes from a file or a C library, {_SAVE}.",
    ),
)
COURSE = Cause(
    part="course of the run",
    text="The two runs did not do the same things in the same order.",
    advice=(
        "What decides when to stop, validate, or log must be saved. A condition on the clock (max_time) or on an"
        " earlier process's files can't be.",
        f"A script may find the outputs of its earlier processes. They must not change what it does. {_RUN}",
    ),
)


def and_main_rng(cause: Cause) -> Cause:
    """Add to a cause in the data that the main process's random generators differ, too."""
    both = (
        " The main process's random generators were in another state, too: with num_workers=0 the data draw from them,"
        " so one difference caused the other."
    )
    return replace(cause, text=cause.text + both, advice=(*cause.advice, *MAIN_RNG.advice))


def surroundings(values: str) -> Cause:
    """Return the cause for processes that ran with other threads, versions, or devices."""
    return Cause(
        part="surroundings",
        text=f"The processes ran in different environments: {values}. The last bits of sums depend on them.",
        advice=(
            "Fix them for the drill and for runs that must be exact: OMP_NUM_THREADS or torch.set_num_threads for"
            " threads, one kind of machine, one set of packages.",
        ),
    )


def not_exact(reasons: Sequence[str], output: str) -> Cause:
    """Return the cause for a run that reported that it does not continue exactly."""
    return Cause(
        part="not restored exactly",
        text=f"A restart reported that it could not restore everything: {'; '.join(reasons) or f'see {output}'}.",
        advice=("strict=False lets a run continue like that. Do what the message says, or leave strict=False out.",),
    )


# What differs without a restart.

NO_SEED = Cause(
    part="no seed",
    text="The runs start with different random numbers: nothing seeds the generators, the seed changes, or one run"
    " draws less because it finds results of the other.",
    advice=("Call seed_everything(1, workers=True) before you build model and data.", _FIRST_RUN_LEFT),
)
CHANGING_CONTENTS = Cause(
    part="augmentation",
    text="The data differ from run to run.",
    advice=(
        "Seed every generator that the data use. seed_everything(1, workers=True) seeds those of Python, NumPy, and"
        " torch, also in workers, but not np.random.default_rng() or libraries with their own.",
        "Let nothing depend on the clock. Sort what os.listdir, glob, and sets give (the order of a set of strings"
        " changes with PYTHONHASHSEED). DataLoader(in_order=False) yields batches as its workers finish them.",
        _FIRST_RUN_LEFT,
    ),
)
CHANGING_ORDER = replace(CHANGING_CONTENTS, part="data order")
KERNELS = Cause(
    part="kernels",
    text="Equal batches give different losses: the initial weights differ, or a kernel is not deterministic.",
    advice=(
        "Call seed_everything(1, workers=True) before you build the model.",
        _FIRST_RUN_LEFT,
        "On a GPU: Trainer(deterministic=True, benchmark=False). On a CPU: a fixed number of threads.",
    ),
)
INITIAL_WEIGHTS = replace(KERNELS, part="weights")


def changing_values(patterns: Sequence[str]) -> Cause:
    """Return the cause for logged values, matched by the patterns, that differ in each run."""
    return Cause(
        part="logged values",
        text="Logged values differ from run to run, as times and rates do.",
        advice=tuple(f"--ignore {pattern!r} ignores it." for pattern in patterns),
    )


# Why a drill can't be judged, or a restart fails.

NO_LEDGER = Cause(
    part="no ledger",
    text="The script finished, but no Lightning training or evaluation reported a batch.",
    advice=(
        "The drill follows fit, validate, test, and predict of lightning.pytorch's and pytorch_lightning's Trainer"
        " (>= 2.5.6). A script with its own loop can't be drilled.",
        "PL_FAULT_TOLERANT_TRAINING=0, fast_dev_run, and barebones turn the callback off.",
    ),
)
EXISTING_RUN = Cause(
    part="existing run",
    text="A run continued from a checkpoint instead of starting from the beginning. The drill ended it.",
    advice=(f'fit(ckpt_path="last"), or a ckpt_path that the script finds, continues an earlier run. {_RUN}',),
)
SEVERAL_TRAININGS = Cause(
    part="several trainings",
    text="Several processes of the script write one ledger, or its launcher restarted them without an interruption.",
    advice=(
        "Drill a command that does the work of one of these processes: one fold, one model.",
        "If a launcher restarts its ranks, the output of the script says why.",
    ),
)
NOT_RESUMED = Cause(
    part="not resumed",
    text="A restart of the same command started from the beginning, although an autosave existed.",
    advice=(
        "Autosaves are in default_root_dir, or where FaultTolerance(dirpath=...) says. It must be one place for all"
        " processes of a run, without the time or a process id in it (as in Hydra's output directories).",
        "FaultTolerance(run_id=...) must be the same in each process, and auto_resume must not be False.",
    ),
)
CAUGHT = Cause(
    part="caught exception",
    text="The script caught the exception and continued in the same process. It skipped a batch or started again,"
    " unlike the uninterrupted run. A run continues when the same command is run again.",
    advice=(
        "Let the exception end the script, and run the same command again, as the drill does.",
        "--signal KILL leaves the script nothing to catch.",
    ),
)
TOO_FEW_AUTOSAVES = Cause(
    part="too few autosaves",
    text="The drill strikes only after a verified autosave with progress. It asks each process to write one.",
    advice=(
        "A run of one batch can't be struck. Make it longer.",
        "An evaluation that can't continue at its batch is run from its start. The output of the script says why.",
    ),
)
TOO_FEW_BEFORE_EXCEPTION = replace(
    TOO_FEW_AUTOSAVES,
    text="An exception counts as a strike only if an autosave with progress came before it, and it ended the run.",
)
NO_AUTOSAVES = Cause(
    part="no autosaves",
    text="No autosave was written, so there was nothing to continue from.",
    advice=("PL_FAULT_TOLERANT_TRAINING=0, in the environment or set by the script, turns them off. Unset it.",),
)
SCRIPT = Cause(part="script", text="The script fails by itself.")
SECOND_RUN = Cause(
    part="second run",
    text="The same command finished before, but fails when it is run again from the beginning.",
    advice=(f"What the first run left (an output directory, a file) may be in its way. {_RUN}",),
)
RESTART = Cause(
    part="restart",
    text="The same command, run again after a strike, does not finish.",
    advice=("The script must be able to run again, also if its output exists, or a port or lock is still held.",),
)
TIMEOUT = Cause(part="timeout", text="The run took longer than --timeout allows.")
NO_STOP = Cause(
    part="stop",
    text="After SIGTERM, the run continues to its next boundary, saves, and ends.",
    advice=("A batch or a save that takes longer, or a launcher that does not pass the signal on, prevents that.",),
)


def refusal(message: str, *, is_restart: bool) -> Cause:
    """Return the cause for a process that an error of this package ended."""
    first, again = "There is no training to resume.", "Training did not differ: the restart trained no batch."
    return Cause(part="refusal", text=message, advice=(again if is_restart else first,))


def with_output(cause: Cause, output: Path) -> Cause:
    """Add the file with the output of the process."""
    return replace(cause, advice=(f"See its output: {output}", *cause.advice))


def stage_never_reached(stages: Sequence[str]) -> Cause:
    """Return the cause for an ``--in`` that names none of the script's stages."""
    return Cause(
        part="usage",
        text=f"--in names what to strike: {', '.join(STAGES)}. trainer.validate counts as validation. The sanity check"
        " can't be struck.",
        advice=(f"--in {','.join(stages)} strikes everything that the script does.",),
    )


def batch_never_reached(num_batches: int) -> Cause:
    """Return the cause for an ``--at`` after the last of the batches that it counts."""
    return Cause(
        part="usage",
        text="--at counts batches of the whole run, from 0: those of training, or of what --in names.",
        advice=(f"Give numbers from 1 to {num_batches - 1}." if num_batches > 1 else "Leave --at out.",),
    )


# The table of causes: for each kind of event, and each field in which the first event that differs may differ first.
# "" stands for all other fields.

AFTER_A_RESTART: Mapping[tuple[str, str], Cause] = MappingProxyType(
    {
        (ledger.BATCH, "order"): DATA_ORDER,
        (ledger.BATCH, "content"): AUGMENTATION,
        (ledger.BATCH, "rng"): MAIN_RNG,
        (ledger.BATCH, "learning_rates"): LEARNING_RATES,
        (ledger.BATCH, ""): WEIGHTS,
        (ledger.EVALUATED, "content"): EVALUATION_DATA,
        (ledger.EVALUATED, "rng"): MAIN_RNG,
        (ledger.EVALUATED, ""): WEIGHTS,
        (ledger.VALIDATED, ""): METRICS,
        (ledger.LOG, ""): LOGGED_VALUES,
        (ledger.END, "weights"): FINAL_WEIGHTS,
        (ledger.END, "optimizers"): OPTIMIZERS,
        (ledger.END, "returned"): RETURNED,
        (ledger.END, "metrics"): METRICS,
        (ledger.END, "rng"): MAIN_RNG,
        (ledger.END, ""): COURSE,
    }
)
WITHOUT_A_RESTART: Mapping[str, Cause] = MappingProxyType(
    {"order": CHANGING_ORDER, "content": CHANGING_CONTENTS, "loss": KERNELS}
)
"""The causes of two uninterrupted runs with different batches, by the first field that differs."""
FROM_THE_START: Mapping[str, Cause] = MappingProxyType(
    {"rng": NO_SEED, "order": NO_SEED, "content": CHANGING_CONTENTS, "loss": INITIAL_WEIGHTS}
)
"""The same if the first batch differs. The random generators and the order come first: the rest depends on them."""
OF_OUTCOMES: Mapping[str, tuple[str, Cause]] = MappingProxyType(
    {
        RESUMED: ("The {run} run did not start from the beginning.", EXISTING_RUN),
        TIMED_OUT: ("The {run} run did not finish in time.", TIMEOUT),
        NOT_STOPPED: ("The run did not end within 90 seconds of SIGTERM.", NO_STOP),
    }
)
"""Why a run that ended this way can't be judged: the verdict, and its cause."""


def cause_of(mismatch: Mismatch) -> Cause:
    """Return the likely cause of a difference after a restart, judged by the events alone.

    Args:
        mismatch: The first event that differs.
    """
    if not mismatch.fields:
        return COURSE
    source = _source_of(mismatch) if mismatch.kind == ledger.LOG else None
    if source is not None:
        return cause_of(source)
    if mismatch.kind in (ledger.VALIDATED, ledger.LOG) and not _continues_equal(mismatch):
        return WEIGHTS
    field = "weights" if mismatch.kind == ledger.END and "weights" in mismatch.fields else mismatch.fields[0]
    cause = AFTER_A_RESTART.get((mismatch.kind, field), AFTER_A_RESTART[mismatch.kind, ""])
    if cause is AUGMENTATION:
        has_order = mismatch.expected is not None and mismatch.expected.values.get("order") is not None
        cause = AUGMENTATION if has_order else ITERABLE_DATA
        return and_main_rng(cause) if "rng" in mismatch.fields else cause
    return cause


def not_deterministic(mismatch: Mismatch, difference_place: str) -> Cause:
    """Return the reason why a script differs from run to run without any interruption.

    Args:
        mismatch: The first event that differs.
        difference_place: The place of that event, in words.
    """
    if mismatch.kind == ledger.LOG:
        return changing_values(_patterns(_logged_names(mismatch)))
    if mismatch.kind == ledger.BATCH:
        is_first = mismatch.number == 0
        drawn = [name for name in ("rng", "order") if is_first and name in mismatch.fields]
        [field] = [*drawn, *mismatch.fields, ""][:1]
        cause = (FROM_THE_START if is_first else WITHOUT_A_RESTART).get(field)
        if cause is not None:
            return cause
    return replace(cause_of(mismatch), text=f"The runs differ at {difference_place}.")


def _continues_equal(mismatch: Mismatch) -> bool:
    """Return whether the weights are the same in everything that follows the mismatch."""
    if any(event.kind in STEPS for event in mismatch.expected_next):
        return mismatch.num_batches_equal_after > 0
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

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant.cli.drill import causes
from lightning_faulttolerant.cli.drill.comparison import Mismatch, difference_of, first_mismatch
from lightning_faulttolerant.cli.drill.ledgers import RankOfRun, join
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line
from tests.cli.drill.made import Change, at, begun, changed, fit_lines, line, resumed, since

OTHER = (0.3).hex()


def whole() -> RankOfRun:
    """Return an uninterrupted run."""
    return join(0, [[begun(), *fit_lines()]])


def mismatch_of(*changes: Change) -> Mismatch:
    """Return the first difference of a run that resumes at batch 2 of epoch 0 and is changed after it."""
    lines = fit_lines(start=(0, 2))
    for change in changes:
        lines = changed(lines, change)
    found = first_mismatch([whole()], [join(0, [[begun(), *fit_lines()[:6]], [begun(pid=2), resumed(0, 2), *lines]])])
    assert found is not None
    return found


def without(event: str, epoch: int) -> Change:
    """Leave out the lines of a kind and an epoch."""
    return lambda found: None if (found["event"], found.get("epoch")) == (event, epoch) else found


def end(**values: Any) -> Change:
    """Change the line of the end."""
    return lambda found: {**found, **values} if found["event"] == ledger.END else found


CAUSES: dict[str, tuple[str, list[Change]]] = {
    "other samples": ("data order", [since(0, 3, order="x", content="x", loss=OTHER)]),
    "other samples, and the generators are off": ("data order", [since(0, 3, order="x", content="x", rng="x")]),
    "another content of the same samples": ("augmentation", [since(0, 3, content="x", loss=OTHER)]),
    "the generators are off too": ("augmentation", [since(0, 3, content="x", rng="x")]),
    "generators": ("main RNG", [since(0, 3, rng="x", loss=OTHER)]),
    "loss": ("weights", [since(0, 3, loss=OTHER)]),
    "loss and learning rate": ("weights", [since(0, 3, loss=OTHER, learning_rates=[[OTHER]])]),
    "learning rate": ("learning rates", [since(0, 3, learning_rates=[[OTHER]])]),
    "validation result, then all is equal": ("metrics", [at(0, 4, ledger.VALIDATED, metrics={"accuracy": OTHER})]),
    "validation result at the end, weights equal": (
        "metrics",
        [at(1, 4, ledger.VALIDATED, metrics={"accuracy": OTHER})],
    ),
    "validation result, then losses differ": (
        "weights",
        [at(0, 4, ledger.VALIDATED, metrics={"accuracy": OTHER}), since(1, 0, loss=OTHER)],
    ),
    "logged": ("logged values", [at(0, 3, ledger.LOG, metrics={"seconds": OTHER})]),
    "logged in a step that differs itself": (
        "data order",
        [at(0, 3, ledger.LOG, metrics={"loss": OTHER}), since(0, 3, order="x")],
    ),
    "weights at the end": ("weights", [end(weights="x")]),
    "optimizers at the end": ("optimizers", [end(optimizers="x")]),
    "metrics at the end": ("metrics", [end(metrics={"accuracy": OTHER})]),
    "generators at the end": ("main RNG", [end(rng="x")]),
    "no validation run": ("course of the run", [without(ledger.VALIDATED, 0)]),
    "no second epoch": ("course of the run", [without(ledger.BATCH, 1)]),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_is_named(case: str) -> None:
    """The first difference in a step, or around it, names the part of the state that causes it."""
    part, changes = CAUSES[case]
    cause = causes.cause_of(mismatch_of(*changes))
    assert cause.part == part
    assert cause.text
    assert cause.advice


def test_batches_without_indices_may_differ_in_order_or_in_augmentation() -> None:
    """The order of an iterable data set is unknown, and the cause says so."""
    lines = changed(fit_lines(), lambda found: {**found, "order": None} if found["event"] == ledger.BATCH else found)
    found = changed(lines, since(0, 3, content="x"))
    mismatch = first_mismatch([join(0, [[begun(), *lines]])], [join(0, [[begun(), *found]])])
    assert mismatch is not None
    assert "indices" in causes.cause_of(mismatch).text


@pytest.mark.parametrize("rng", ["x", None])
def test_generators_that_differ_with_the_contents_are_named_too(rng: str | None) -> None:
    """With ``num_workers=0`` the data draw from the main process, so one of the two may have caused the other."""
    values = {"content": "x"} if rng is None else {"content": "x", "rng": rng}
    assert ("num_workers=0" in causes.cause_of(mismatch_of(since(0, 3, **values))).text) == (rng is not None)


def test_a_difference_names_values_and_what_is_equal() -> None:
    """The values are shown in decimals to their last digit, with the equal values beside and before them."""
    difference = difference_of(mismatch_of(since(0, 3, loss=(0.125).hex(), learning_rates=[[(0.2).hex()]])))
    assert difference.place == "batch 3 of epoch 0"
    assert (difference.number, difference.num_equal, difference.process) == (3, 3, 1)
    assert [(value.name, value.expected, value.found) for value in difference.values] == [
        ("loss", "0.25", "0.125"),
        ("learning rate 0 0", "0.1", "0.2"),
    ]
    assert "order of the samples" in difference.equal
    assert "random generators" in difference.equal


def test_an_event_that_is_not_there_is_shown_against_what_is() -> None:
    """If one run does something else, or nothing, both are named."""
    [value] = difference_of(mismatch_of(without(ledger.VALIDATED, 0))).values
    assert (value.expected, value.found) == (
        "the validation run after batch 3 of epoch 0",
        "values logged at step 4",
    )
    ended = first_mismatch([whole()], [join(0, [[begun(), *fit_lines()[:-1]]])])
    assert ended is not None
    [value] = difference_of(ended).values
    assert (value.expected, value.found) == ("the end of the fit", "nothing, the run had ended")


def test_the_earliest_difference_of_all_ranks_counts() -> None:
    """If several ranks differ, the one with the fewest batches before it counts; a missing rank differs."""
    expected = [join(rank, [[begun(), *fit_lines()]]) for rank in range(3)]
    found = [
        join(0, [[begun(), *changed(fit_lines(), since(1, 0, loss=OTHER))]]),
        join(1, [[begun(), *changed(fit_lines(), since(0, 1, content="x"))]]),
        join(2, [[begun(), *fit_lines()]]),
    ]
    mismatch = first_mismatch(expected, found)
    assert mismatch is not None
    assert (mismatch.rank, mismatch.number) == (1, 1)
    missing = first_mismatch(expected, expected[:2])
    assert missing is not None
    assert (missing.rank, missing.number) == (2, 0)


def test_logged_values_can_be_passed_over() -> None:
    """Values with given names, or names that match a pattern, are not compared; others in the same line are."""

    def timed(time: float, loss: float) -> list[Line]:
        log = line(ledger.LOG, epoch=0, batch=1, step=0, metrics={"time/step": time, "loss": loss})
        alone = line(ledger.LOG, epoch=0, batch=1, step=0, metrics={"time/step": time})
        return [begun(), log, alone] if time < 2 else [begun(), log]

    one, other = join(0, [timed(1.0, 3.0)]), join(0, [timed(2.0, 3.0)])
    assert first_mismatch([one], [other]) is not None
    assert first_mismatch([one], [other], ignored=["time/*"]) is None
    assert first_mismatch([one], [join(0, [timed(2.0, 4.0)])], ignored=["time/*"]) is not None
    assert first_mismatch([one], [other], ignored=["loss"]) is not None


NOT_DETERMINISTIC: dict[str, tuple[str, str, list[Change]]] = {
    "no seed": ("no seed", "seed_everything", [since(0, 0, rng="x", order="x", content="x", loss=OTHER)]),
    "order": ("data order", "os.listdir", [since(0, 1, order="x", content="x")]),
    "content": ("augmentation", "default_rng", [since(0, 0, content="x", loss=OTHER)]),
    "batches as they come": ("augmentation", "in_order=False", [since(0, 0, content="x", loss=OTHER)]),
    "initial weights": ("weights", "seed_everything", [since(0, 0, loss=OTHER)]),
    "weights that the first run has left": ("weights", "{run}", [since(0, 0, loss=OTHER)]),
    "a cache that the first run drew": ("no seed", "{run}", [since(0, 0, rng="x", order="x", content="x", loss=OTHER)]),
    "a cache that the first run has left": ("augmentation", "{run}", [since(0, 0, content="x")]),
    "kernels": ("kernels", "deterministic=True", [since(0, 2, loss=OTHER)]),
    "a clock that is logged": (
        "logged values",
        "--ignore 'seconds'",
        [at(0, 1, ledger.LOG, metrics={"seconds": OTHER})],
    ),
    "a monitor's columns": (
        "logged values",
        "--ignore 'DeviceStatsMonitor.*' ignores it. --ignore 'seconds' ignores it.",
        [
            at(
                0,
                1,
                ledger.LOG,
                metrics={
                    "DeviceStatsMonitor.on_train_batch_start/cpu_percent": OTHER,
                    "DeviceStatsMonitor.on_train_batch_start/cpu_vm_percent": OTHER,
                    "DeviceStatsMonitor.on_train_batch_end/cpu_percent": OTHER,
                    "seconds": OTHER,
                },
            )
        ],
    ),
    "something else": ("course of the run", "", [without(ledger.VALIDATED, 0)]),
}


@pytest.mark.parametrize("case", NOT_DETERMINISTIC)
def test_why_a_script_is_not_deterministic_is_named(case: str) -> None:
    """The first difference between two uninterrupted runs names the reason and the remedy."""
    part, advice, changes = NOT_DETERMINISTIC[case]
    lines = fit_lines()
    for change in changes:
        lines = changed(lines, change)
    mismatch = first_mismatch([whole()], [join(0, [[begun(), *lines]])])
    assert mismatch is not None
    cause = causes.not_deterministic(mismatch, "there")
    assert cause.part == part
    assert advice in " ".join(cause.advice)

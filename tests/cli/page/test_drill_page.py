import math
import re
from dataclasses import replace

import pytest

from lightning_faulttolerant.cli.drill.page import BatchStretch, page, stretches
from lightning_faulttolerant.cli.drill.result import NOT_JUDGED, NOT_RESUMED, Cause, DrillResult, DrillVerdict
from tests.cli.page.drills import curve, differing_drill, exact_drill, run, strikes_at
from tests.cli.page.parsed import Parsed

NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)></style>\x00"


def _with_losses(losses):
    drill = exact_drill(len(losses), num_strikes=1, seed=5)
    points = tuple(replace(point, loss=loss) for point, loss in zip(drill.uninterrupted.curve, losses, strict=True))
    return replace(
        drill,
        uninterrupted=replace(drill.uninterrupted, curve=points),
        interrupted=replace(drill.interrupted, curve=points),
    )


def _numbers(path):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]


def _points(path):
    numbers = _numbers(path)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _curves(parsed, class_):
    return [each["d"] for each in parsed.named("path") if each.get("class", "") == f"curve {class_}"]


def test_the_page_of_an_exact_drill_says_what_was_done():
    """The page shows the verdict, each strike, the counts of both runs, the command, and the versions."""
    drill = exact_drill()
    parsed = Parsed(page(drill))
    for text in (
        "Exact",
        drill.verdict.text,
        "5 of 5",
        "python train.py --data '/mnt/data/my digits' --epochs 12",
        "2.13.0",
        "20261122",
        "/home/ada/drills/2026-11-22",
        *(strike.resumed_text for strike in drill.strikes),
        *(f"batch {strike.batch} of epoch {strike.epoch}" for strike in drill.strikes),
        f"{sum(strike.num_twice for strike in drill.strikes):,}",
    ):
        assert text in parsed.text
    assert "first difference" not in parsed.text.lower()


@pytest.mark.parametrize(
    ("command", "name"),
    [("torchrun --nproc-per-node 2 /src/train.py --lr 0.1", "train.py"), ("/opt/bin/fit --epochs 2", "fit")],
)
def test_the_page_begins_with_the_name_of_the_script(command, name):
    """The name is that of the Python file in the command, or else that of the program."""
    parsed = Parsed(page(replace(exact_drill(), command=tuple(command.split()))))
    assert re.search(rf"Drill of\s+{name}\s*,", parsed.text)


def test_the_page_of_runs_that_differ_leads_with_the_difference():
    """Both values, the likely cause, and the advice come before the curves."""
    drill = differing_drill()
    text = Parsed(page(drill)).text
    values = drill.verdict.difference.values
    found = [text.index(value.expected) for value in values] + [text.index(value.found) for value in values]
    assert max(found) < text.index("Likely cause: augmentation") < text.index(drill.verdict.cause.advice[0])
    assert text.index(drill.verdict.cause.advice[1]) < text.index("Both runs, batch by batch")
    assert "Equal before it: 640 batches, " in text


def test_equal_curves_lie_over_each_other_and_others_part():
    """The wide curve and the thin one have the same path where the losses are equal, and only there."""
    exact, differs = Parsed(page(exact_drill())), Parsed(page(differing_drill()))
    assert _curves(exact, "wide pale") == _curves(exact, "fine ink")
    assert _curves(differs, "wide pale") != _curves(differs, "fine ink")


def test_a_process_counts_up_to_where_a_later_one_went_on():
    """The repeated batches are those between the place of a restart and the strike before it."""
    strikes = strikes_at([100, 300, 310])
    strikes = (strikes[0], strikes[1], replace(strikes[2], resumed_at=200))
    assert stretches(strikes, [0] * 54 + [1] * 146 + [3] * 200) == [
        BatchStretch(process=0, begin=0, counts_until=54, end=100),
        BatchStretch(process=1, begin=54, counts_until=200, end=300),
        BatchStretch(process=2, begin=231, counts_until=231, end=310),
        BatchStretch(process=3, begin=200, counts_until=400, end=400),
    ]
    assert stretches((), [0] * 7) == [BatchStretch(process=0, begin=0, counts_until=7, end=7)]


def test_a_process_that_trained_nothing_is_counted_and_not_drawn():
    """The processes in the picture have the numbers that the rest of the page uses for them."""
    found = stretches(strikes_at([100], lost=10), [1] * 80 + [3] * 50)
    assert [stretch.process for stretch in found] == [1, 3]
    assert stretches(strikes_at([100]), ()) != []


@pytest.mark.parametrize(
    "losses",
    [
        [1.0],
        [0.0] * 50,
        [math.nan] * 50,
        [None] * 50,
        [1.0, math.nan, math.inf, -math.inf, None, 2.0] * 10,
        [5e-324, 1.7e308] * 30,
        [-1.7e308, 1.7e308] * 30,
    ],
    ids=["one", "zero", "nan", "none", "mixed", "huge", "both"],
)
def test_any_losses_can_be_drawn(losses):
    """Losses that are missing, not finite, or as large as a float can be leave the page intact."""
    drill = _with_losses([1.0] * 110) if len(losses) == 1 else _with_losses((losses * 3)[:150])
    parsed = Parsed(page(replace(drill, strikes=()) if len(losses) == 1 else drill))
    for path in (each["d"] for each in parsed.named("path")):
        assert "nan" not in path
        assert all(-30 <= number <= 1000 for number in _numbers(path))


def test_a_loss_that_is_missing_leaves_a_gap():
    """A curve ends before a batch without a loss, or with one that is not finite, and begins again after it."""
    losses = [1.0] * 150
    losses[40], losses[90], losses[91] = None, math.nan, math.inf
    [path] = _curves(Parsed(page(_with_losses(losses))), "wide pale")
    assert path.count("M") == 3


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([1.0] * 140 + [math.nan, math.inf] * 5, "loss; not finite, and not drawn, at 10 batches"),
        ([math.nan] * 150, "loss; not finite, and not drawn, at 150 batches"),
        ([None] * 150, "the steps gave no losses"),
    ],
    ids=["some", "all", "none"],
)
def test_losses_that_are_not_finite_are_reported(losses, told):
    """A training that has diverged is not taken for one that stopped, or that gave no losses."""
    assert told in Parsed(page(_with_losses(losses))).text


def test_a_long_drill_makes_a_small_page_that_keeps_its_spike():
    """A hundred thousand batches and sixty strikes take less than 150 kB, and a single bad batch is visible."""
    drill = exact_drill(100_000, num_strikes=60)
    points = list(drill.uninterrupted.curve)
    points[77_777] = replace(points[77_777], loss=50.0)
    made = page(replace(drill, uninterrupted=replace(drill.uninterrupted, curve=tuple(points))))
    assert len(made) < 150_000
    wide, thin = (_points(*_curves(Parsed(made), class_)) for class_ in ("wide pale", "fine ink"))
    spike = min(wide, key=lambda point: point[1])
    assert spike[0] == pytest.approx(777.8, abs=0.2)
    assert spike[1] < min(y for _, y in thin) - 50


def test_a_drill_that_could_not_judge_has_a_page_too():
    """Without any run, or with only the two runs of a check, the page gives the reason and omits the missing parts."""
    cause = Cause(part="no seed", text="The script draws other numbers each time.", advice=("Call seed_everything.",))
    verdict = DrillVerdict(word=NOT_JUDGED, text="The script is not deterministic by itself.", cause=cause)
    bare = DrillResult(
        command=("train",),
        verdict=verdict,
        strikes=(),
        num_wanted=5,
        kind="TERM",
        seed=1,
        began=0.0,
        seconds=0.0,
        directory="",
    )
    text = Parsed(page(replace(bare, last_words=("Traceback:", "ValueError: <it fails>")))).text
    assert "ValueError: <it fails>" in text
    text = Parsed(page(bare)).text
    assert "end of its output" not in text
    assert "Not judged" in text
    assert "Call seed_everything." in text
    assert "batch by batch" not in text
    checked = replace(
        bare, uninterrupted=run("uninterrupted", curve(200)), repeated=run("repeated", curve(200, seed=1))
    )
    parsed = Parsed(page(checked))
    assert _curves(parsed, "dashed quiet")
    assert not _curves(parsed, "fine ink")
    assert (
        "strike" not in " ".join(parsed.texts[parsed.texts.index("Both runs, batch by batch") :]).split("What was")[0]
    )


def test_the_page_of_a_refused_restart_claims_no_comparison():
    """The page says what ran, and not that anything was compared bit for bit."""
    drill = differing_drill()
    verdict = DrillVerdict(word=NOT_RESUMED, text="lightning_faulttolerant refused to resume the run.")
    text = Parsed(page(replace(drill, verdict=verdict))).text
    assert "Not resumed" in text
    assert "What ran" in text
    assert "ompared" not in text
    assert "Compared bit for bit" in Parsed(page(drill)).text


def test_what_a_script_calls_itself_is_never_markup():
    """A command, a path, a metric, or a note that looks like HTML is shown as it is."""
    drill = differing_drill()
    value = replace(drill.verdict.difference.values[0], name=NASTY, expected=NASTY, found=NASTY)
    difference = replace(drill.verdict.difference, values=(value,), place=NASTY, equal=(NASTY,))
    verdict = DrillVerdict(
        word=NASTY,
        text=NASTY,
        notes=(NASTY,),
        difference=difference,
        cause=Cause(part=NASTY, text=NASTY, advice=(NASTY,)),
    )
    strikes = tuple(replace(strike, resumed_text=NASTY, kind=NASTY, hook=NASTY) for strike in drill.strikes)
    made = page(
        replace(
            drill,
            verdict=verdict,
            command=(NASTY,),
            directory=NASTY,
            strikes=strikes,
            kind=NASTY,
            versions={NASTY: NASTY},
        )
    )
    parsed = Parsed(made)
    assert len(parsed.named("script")) == len(parsed.named("style")) == 1
    assert not parsed.named("img")
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    assert "\x00" not in made

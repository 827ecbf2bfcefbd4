import json
import re
from itertools import pairwise

import pytest

from lightning_faulttolerant.cli.report_page import page
from lightning_faulttolerant.cli.report_pictures import legs, slices, without_narrow
from lightning_faulttolerant.records.goodput import EVALUATION, KINDS, SAVING, TRAINING, Segment
from tests.cli.page.histories import ImaginedRun, calm, evaluated, faulty, made_of, only_tested
from tests.cli.page.parsed import Parsed

NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)></style>\x00"


def _ends_of_bars(parsed, class_):
    bars = [each for each in parsed.named("rect") if each["class"] == class_]
    return [(float(bar["x"][:-1]), float(bar["x"][:-1]) + float(bar["width"][:-1])) for bar in bars]


def test_the_page_of_a_run_says_where_its_time_went():
    """Goodput is the headline, and the page shows the seconds of each kind, the processes, and how they ended."""
    report = faulty()
    account = report.chapters[0].account
    parsed = Parsed(page(report))
    assert (
        f"{100 * account.goodput:.1f} %" in parsed.text.replace(" ", " ")
        or f"{100 * account.goodput:.1f}" in parsed.text
    )
    for text in (
        "resnet-50-imagenet",
        "gpu-node-17",
        "stopped by SIGTERM",
        "killed",
        "finished",
        "the last bits of sums",
    ):
        assert text in parsed.text
    assert "processes 5" in parsed.text
    assert "Restored each time: order of the samples, augmentation" in parsed.text


def test_the_bar_of_the_time_is_as_long_as_the_time():
    """The parts of the bar are side by side and fill it, each as wide as its share."""
    report = faulty()
    account = report.chapters[0].account
    made = page(report)
    bar = Parsed(re.search(r'<svg[^>]*account".*?</svg>', made, re.DOTALL).group())
    rects = bar.named("rect")
    widths = [float(each["width"][:-1]) for each in rects]
    assert sum(widths) == pytest.approx(100, abs=0.2)
    assert widths[0] == pytest.approx(100 * account.training / account.total, abs=0.05)
    assert len(rects) == sum(getattr(account, kind) > 0 for kind in KINDS)


def test_steps_that_were_done_again_are_drawn_as_such():
    """A leg is cut where a later process resumed, and the next one begins at that step."""
    report = faulty(num_faults=3, save_every=600.0)
    found = legs(report.chapters[0])
    assert [leg.process for leg in found] == [1, 2, 3, 4]
    set_back = [(leg, after) for leg, after in pairwise(found) if leg.again]
    assert [leg.process for leg, _ in set_back] == [1, 2, 3]
    for leg, after in set_back:
        assert leg.counted[-1] == leg.again[0]
        assert leg.counted[-1][1] == pytest.approx(after.counted[0][1], abs=25)
        assert leg.again[-1][1] > after.counted[0][1]
    assert not found[-1].again


def test_the_steps_of_a_second_fit_continue_from_those_of_the_first():
    """A script with two fits climbs once, though each fit counts from 0."""
    run = ImaginedRun()
    run.begin()
    run.train(100)
    run.end()
    first = run.step
    for line in [dict(line) for line in run.lines]:
        run.lines.append(line | {"fit": 2, "time": line["time"] + 200})
    found = legs(made_of(run.lines).chapters[0])
    assert (found[0].counted[-1][1], found[1].counted[0][1], found[1].counted[-1][1]) == (first, first, 2 * first)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_first_lines_of_a_history_have_a_page(number):
    """A run that has just begun, or died immediately, can be reported."""
    run = ImaginedRun()
    run.begin()
    run.train(0.1)
    text = Parsed(page(made_of(run.lines[:number]))).text
    assert "may be running" not in text
    assert "killed" in text
    assert "may be running" in Parsed(page(made_of(run.lines[:number], made=run.now + 30))).text
    assert "No training yet" in text


def test_a_run_without_faults_has_no_word_of_them():
    """One process that finishes has no marks, no setbacks, and one row."""
    parsed = Parsed(page(calm()))
    assert not [each for each in parsed.named("svg") if "mark" in each.get("class", "")]
    assert not _ends_of_bars(parsed, "again")
    assert "done again" not in parsed.text.split("Goodput is")[0]
    assert len(parsed.named("tr")) == 2


@pytest.fixture(scope="module")
def long_report():
    """Return the report of a run of 200 processes and some 20,000 autosaves."""
    report = faulty(num_faults=199, hours=120, save_every=21.6, down=100)
    assert sum(fit.num_autosaves for fit in report.chapters[0].chapter.fits) > 19_000
    return report


@pytest.fixture(scope="module")
def long(long_report):
    """Return its page."""
    return page(long_report)


def test_a_long_run_makes_a_page_of_less_than_300_kilobytes(long):
    """However long a run was, its page is small enough for an email."""
    assert len(long) < 300_000


def test_a_long_table_shows_its_ends_and_keeps_the_rest(long):
    """All 200 processes are in the page, most of them folded up."""
    parsed = Parsed(long)
    assert "show the 180 processes between" in parsed.text
    numbers = [int(number) for number in re.findall(r"<tr><td class=\"firm\">(\d+)</td>", long)]
    assert numbers == list(range(1, 201))


def test_a_ribbon_of_columns_shows_each_kind_as_large_as_it_is(long_report):
    """If there are too many segments, each column is full, and all columns together are the account of the time."""
    chapter = long_report.chapters[0]
    found = slices(chapter.segments, number=250)
    assert all(sum(each.values()) == pytest.approx(1) for each in found)
    for kind in KINDS:
        share = sum(each.get(kind, 0) for each in found) / 250
        assert share == pytest.approx(getattr(chapter.account, kind) / chapter.account.total, abs=1e-6), kind


def test_a_long_autosave_stands_in_the_ribbon_and_a_short_one_does_not():
    """A save that took a tenth of the time is visible in the training, and one of a thousandth is a tick below."""
    cut = [0, 400, 401, 800, 900, 1000]
    kinds = [TRAINING, SAVING, TRAINING, SAVING, TRAINING]
    segments = [
        Segment(kind=kind, began=float(began), ended=float(ended), process=0, fit=1)
        for kind, began, ended in zip(kinds, cut, cut[1:], strict=False)
    ]
    shown = [(segment.kind, segment.began, segment.ended) for segment in without_narrow(segments)]
    assert shown == [(TRAINING, 0, 800), (SAVING, 800, 900), (TRAINING, 900, 1000)]


def test_what_is_read_out_is_in_the_order_of_its_places(long):
    """The script finds places by binary search, so they ascend, and they are few."""
    for each in Parsed(long).named("svg"):
        if "data-readouts" in each:
            rows = json.loads(each["data-readouts"])
            places = [row[0] for row in rows]
            assert places == sorted(places)
            assert 2 <= len(rows) <= 400


def test_earlier_chapters_stand_below_the_last():
    """A script that was run from its beginning again shows its last run first."""
    run = ImaginedRun()
    for _ in range(2):
        run.begin()
        run.train(120)
        run.end()
        run.lines.append({"event": "done", "time": run.now})
        run.saved, run.step = None, 0
        run.wait(3600)
    report = made_of(run.lines)
    assert len(report.chapters) == 2
    parsed = Parsed(page(report))
    assert parsed.text.index("Autosaves") < parsed.text.index("Before that:")


def test_what_a_run_calls_itself_is_never_markup():
    """A host, a path, a note, or an exception that looks like HTML is shown as it is."""
    run = ImaginedRun(host=NASTY)
    run.begin()
    run.train(30)
    run.end(NASTY, NASTY)
    run.begin(notes=[NASTY], not_exact=[NASTY])
    run.lines[-1]["resumed"] |= {"position": NASTY, "path": NASTY, "restored": [NASTY]}
    run.train(30)
    made = page(made_of(run.lines, run_id=NASTY))
    parsed = Parsed(made)
    assert len(parsed.named("script")) == len(parsed.named("style")) == 1
    assert not parsed.named("img")
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    assert "\x00" not in made


def test_evaluation_has_its_own_color_legend_and_words():
    """It is a part of the bar and of the ribbon, in the legends, and each evaluation has a row and its name."""
    report = evaluated()
    [chapter] = report.chapters
    made = page(report)
    parsed = Parsed(made)
    bar = Parsed(re.search(r'<svg[^>]*account".*?</svg>', made, re.DOTALL).group())
    [part] = [each for each in bar.named("rect") if each["class"] == "evaluation"]
    assert float(part["width"][:-1]) == pytest.approx(
        100 * chapter.account.evaluation / chapter.account.total, abs=0.05
    )
    segments = [segment for segment in chapter.segments if segment.kind == EVALUATION]
    assert len(_ends_of_bars(parsed, "evaluation")) == len(segments) + 1
    assert sum("key evaluation" in each.get("class", "") for each in parsed.named("i")) == 2
    for title in ("process 1: validation, 2 min", "process 2: test, 5 min", "process 3: predict, 1 min 40 s"):
        assert title in parsed.text
    for text in (
        "training and evaluation made lasting progress for",
        "evaluation that counted",
        "4 validation runs inside fits",
    ):
        assert text in parsed.text
    assert "Process 3 continued test-2 before batch 300: at least 40 batches of evaluation ran again." in parsed.text


def test_an_evaluation_that_may_be_running_is_called_so():
    """Its row says so if its last sign of life is fresh and nothing came after it; otherwise, it was killed."""
    run = ImaginedRun()
    run.begin()
    run.train(30)
    run.end()
    run.evaluate("test", 600, seconds=1.0, number=2, until=340)

    def ended(age, *more):
        report = made_of([*run.lines, *more], made=run.now + age)
        table = page(report).split("<h2>Evaluation</h2>")[1].split("</table>")[0]
        return re.search(r'<td data-name="ended">(.*?)</td>', table).group(1)

    assert ended(20) == "may be running"
    assert ended(200) == "killed"
    assert ended(20, {"event": "done", "time": run.now}) == "killed"
    run.wait(5)
    run.begin()
    assert ended(20) == "killed"


def test_an_evaluation_makes_no_steps():
    """The curve of the steps ends with the fit: neither the evaluations after it nor restored fits are in it."""
    report = evaluated()
    [chapter] = report.chapters
    found = legs(chapter)
    assert [leg.process for leg in found] == [1, 2]
    assert found[-1].counted[-1][1] == max(fit.last_place.global_step for fit in chapter.chapter.fits)


def test_a_script_that_only_tests_has_a_page_without_training():
    """Its goodput is that of the evaluation, and it counts batches, not steps."""
    parsed = Parsed(page(only_tested()))
    assert "No training yet" not in parsed.text
    assert "batches evaluated 600" in parsed.text
    assert "steps done" not in parsed.text
    assert "training that counted" not in parsed.text
    assert "Evaluation waited" in parsed.text

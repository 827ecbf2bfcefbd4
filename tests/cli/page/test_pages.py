"""The pages of drills and of runs: what a reader reads on them, and that nothing in them acts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.drill.page import BatchStretch, page as page_of_drill, stretches
from lightning_faulttolerant.cli.drill.result import NOT_JUDGED, NOT_RESUMED, Cause, DrillVerdict
from lightning_faulttolerant.cli.report_page import page as page_of_run
from lightning_faulttolerant.cli.report_pictures import legs
from tests.cli.page.drills import differing_drill, exact_drill, losses_of, run, strike
from tests.cli.stories import killed_and_done, often_killed, only_tested, reported, with_a_test
from tests.records.made import Story

NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)></style>\x00"
VOID = {"meta", "link", "br", "input"}
INLINE = {"b", "i", "em", "strong", "span", "code", "a", "label", "time", "abbr", "small"}


class Page(HTMLParser):
    """What a browser takes from a page, in which every element must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._texts.append(" " if tag in INLINE else " | " if tag in ("td", "th") else "\n")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[Any]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._texts.append(" " if tag in {*INLINE, "td", "th"} else "\n")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self._texts.append(data)

    @property
    def text(self) -> str:
        """The text that a reader sees, a line for each block."""
        lines = (" ".join(line.split()) for line in "".join(self._texts).splitlines())
        return "\n".join(line for line in lines if line)


def not_judged(**more: Any) -> Any:
    """Return a drill that could not judge."""
    cause = Cause(part="no seed", text="The script draws other numbers each time.", advice=("Call seed_everything.",))
    verdict = DrillVerdict(word=NOT_JUDGED, text="The script is not deterministic by itself.", cause=cause)
    return replace(exact_drill(), verdict=verdict, strikes=(), **{"uninterrupted": None, "interrupted": None, **more})


def one_second_fit() -> Story:
    """Return a script with two fits that counts each from 0, and then runs from its beginning again."""
    story = Story().begin().start().train(100, 10).end().begin(same=True, fit=2).start().train(50, 5).end().done()
    return story.wait(3600).begin().start().train(77, 7)


def with_notes() -> Story:
    """Return a run whose resume is not exact, and has notes, and that an exception without more words ends."""
    story = often_killed(1)
    story.lines[-1] |= {"reason": "Error", "text": "Error"}
    told = next(line["resumed"] for line in story.lines if line.get("resumed"))
    told |= {"notes": ["torch 2.12.1 before, 2.13.0 now."], "not_exact": ["the workers' generators"]}
    return story


DIVERGED = losses_of(140) + [math.nan, math.inf] * 5
DRILLS = {
    "exact": exact_drill,
    "differs": differing_drill,
    "refused": lambda: replace(differing_drill(), verdict=DrillVerdict(word=NOT_RESUMED, text="Refused to resume.")),
    "no run at all": lambda: not_judged(last_words=("Traceback:", "ValueError: <it fails>")),
    "a check": lambda: not_judged(uninterrupted=run("one", losses_of(200)), repeated=run("repeated", [1.0] * 200)),
    "diverged": lambda: exact_drill(losses=DIVERGED, num_strikes=1),
    "falls by factors": lambda: exact_drill(losses=[10 ** -(number / 50) for number in range(150)], num_strikes=1),
    "no losses": lambda: exact_drill(losses=[None] * 150, num_strikes=1),
}
RUNS = {
    "killed and done": lambda: reported(killed_and_done()),
    "with a test": lambda: reported(with_a_test()),
    "only tested": lambda: reported(only_tested()),
    "without faults": lambda: reported(often_killed(0)),
    "begun": lambda: reported(Story(1_700_000_000.0).begin().start()),
    "all chapters": lambda: reported(one_second_fit(), is_whole=True),
    "not exact": lambda: reported(with_notes()),
}


@pytest.mark.parametrize("name", DRILLS)
def test_what_a_page_of_a_drill_says(name: str, snapshot: SnapshotAssertion) -> None:
    """Each kind of drill has a page whose whole text is known."""
    assert Page(page_of_drill(DRILLS[name]())).text == snapshot


@pytest.mark.parametrize("name", RUNS)
def test_what_a_page_of_a_run_says(name: str, snapshot: SnapshotAssertion) -> None:
    """Each kind of run has a page whose whole text is known."""
    assert Page(page_of_run(RUNS[name]())).text == snapshot


@pytest.mark.parametrize(
    "losses",
    [[1.0] * 9, [0.0] * 50, [math.nan] * 50, [1.0, math.nan, math.inf, -math.inf, None, 2.0] * 9, [5e-324, 1.7e308] * 9,
     [-1.7e308, 1.7e308] * 9],
    ids=["few", "zero", "nan", "mixed", "huge", "both"],
)  # fmt: skip
def test_any_losses_can_be_drawn(losses: list[float | None]) -> None:
    """Losses that are missing, not finite, or as large as a float can be leave the page intact."""
    page = Page(page_of_drill(exact_drill(losses=losses, num_strikes=1)))
    paths = [each["d"] for name, each in page.elements if name == "path"]
    assert "nan" not in "".join(paths)
    assert all(-30 <= float(number) <= 1000 for path in paths for number in re.findall(r"-?\d+(?:\.\d+)?", path))


def test_long_runs_make_small_pages_that_keep_a_spike() -> None:
    """A hundred thousand batches, or 200 processes, are an attachment, and one bad batch changes the picture."""
    losses = losses_of(100_000)
    drill = exact_drill(losses=losses, num_strikes=60)
    losses[77_777] = 50.0
    spiked = replace(drill, uninterrupted=run("uninterrupted", losses))
    assert len(page_of_drill(spiked)) < 150_000
    assert page_of_drill(spiked) != page_of_drill(drill)
    page = page_of_run(reported(often_killed(199, num_autosaves=40)))
    assert len(page) < 300_000
    assert "show the 180 processes between" in Page(page).text


def test_no_text_is_markup_and_no_page_names_another_file() -> None:
    """A name that looks like HTML is shown as it is; the policy of a page allows no request."""
    drill = differing_drill()
    difference = drill.verdict.difference
    assert difference is not None
    value = replace(difference.values[0], name=NASTY, expected=NASTY, found=NASTY)
    nasty = DrillVerdict(
        word=NASTY,
        text=NASTY,
        notes=(NASTY,),
        difference=replace(difference, values=(value,), place=NASTY, equal=(NASTY,)),
        cause=Cause(part=NASTY, text=NASTY, advice=(NASTY,)),
    )
    strikes = tuple(replace(each, resumed_text=NASTY, kind=NASTY, hook=NASTY) for each in drill.strikes)
    texts: dict[str, Any] = {"command": (NASTY,), "directory": NASTY, "kind": NASTY, "versions": {NASTY: NASTY}}
    story = with_notes()
    for line in story.lines:
        line |= {name: NASTY for name in ("host", "text", "reason") if name in line}
        if line.get("resumed"):
            line["resumed"] |= {name: [NASTY] for name in ("restored", "notes", "not_exact")}
            line["resumed"] |= {"path": NASTY, "position": NASTY}
    pages = [
        page_of_drill(replace(drill, verdict=nasty, strikes=strikes, **texts)),
        page_of_run(reported(story, run_id=NASTY)),
    ]
    for made in pages:
        page = Page(made)
        assert [name for name, _ in page.elements if name in ("script", "style", "img")] == ["style", "script"]
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        assert {each.get("href", each.get("src", "data:,")) for _, each in page.elements} == {"data:,"}
        assert "\x00" not in made
        [policy] = [each["content"] for _, each in page.elements if "Content-Security" in str(each.get("http-equiv"))]
        assert "default-src 'none'" in policy
        assert not re.search("unsafe|http", policy)


def test_what_counts_of_a_process_ends_where_a_later_one_continued() -> None:
    """Repeated batches are those between the place of a restart and the strike before it; idle processes count."""
    strikes = (strike(1, at=100, num_twice=46), strike(2, at=300, num_twice=69), strike(3, at=310, num_twice=110))
    assert stretches(strikes, [0] * 54 + [1] * 146 + [3] * 200) == [
        BatchStretch(process=0, begin=0, counts_until=54, end=100),
        BatchStretch(process=1, begin=54, counts_until=200, end=300),
        BatchStretch(process=2, begin=231, counts_until=231, end=310),
        BatchStretch(process=3, begin=200, counts_until=400, end=400),
    ]
    assert stretches((), [0] * 7) == [BatchStretch(process=0, begin=0, counts_until=7, end=7)]


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (often_killed(1), [(1, 602, 650), (2, 1200, None)]),
        (one_second_fit(), [(1, 10, None), (1, 15, None)]),
        (with_a_test(), [(1, 10, 10), (2, 10, None)]),
    ],
    ids=["killed", "two fits", "evaluated"],
)
def test_steps_that_were_done_again_are_drawn_as_such(story: Story, expected: list[Any]) -> None:
    """A leg of the curve is cut where a later process resumed; evaluations make no steps."""
    found = legs(reported(story, is_whole=True).chapters[0])
    ends = [[round(points[-1][1]) if points else None for points in (leg.counted, leg.again)] for leg in found]
    assert [(leg.process, *end) for leg, end in zip(found, ends, strict=True)] == expected

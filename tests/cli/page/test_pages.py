"""The pages of drills and of runs: what a reader reads, that nothing in them acts, and how a browser shows them.

Without Chromium the tests in a browser are skipped: `make browser` installs it.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.drill.page import page as page_of_drill
from lightning_faulttolerant.cli.drill.result import (
    DIFFERS,
    EXACT,
    NOT_JUDGED,
    Cause,
    Difference,
    DrillResult,
    DrillVerdict,
    Point,
    RunOfDrill,
    Strike,
    Value,
)
from lightning_faulttolerant.cli.report_page import page as page_of_run
from tests.cli.page.browser import PHONE, WIDE, Browser, missing
from tests.cli.stories import killed_and_done, often_killed, reported, with_a_test
from tests.records.made import Story

NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)></style>\x00"
LONG = "a/very/long/path/without/any/space" * 12
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


# Drills, invented but consistent, and runs.


def run(name: str, losses: Sequence[float | None], begins: Sequence[int] = (0,)) -> RunOfDrill:
    """Return a run with these losses, whose processes begin at these batches."""
    processes = [sum(begin <= number for begin in begins) - 1 for number in range(len(losses))]
    points = tuple(
        Point(number=number, fit=1, epoch=number // 100, batch=number % 100, loss=loss, process=process)
        for number, (loss, process) in enumerate(zip(losses, processes, strict=True))
    )
    counts = {"num_ranks": 1, "num_fits": 1, "num_evaluated": 0, "num_autosaves": 3 * len(begins)}
    counts |= {"num_processes": len(begins), "num_validations": len(points) // 100, "num_logs": len(points) // 50}
    return RunOfDrill(name=name, curve=points, seconds=61.3 * len(begins), is_complete=True, **counts)


def strike(number: int, at: int) -> Strike:
    """Return a strike at a batch, after which up to 23 batches are repeated."""
    begin = max(at - 23, 0)
    place = {"stage": "train", "fit": 1, "epoch": at // 100, "batch": at % 100, "at": at, "resumed_at": begin}
    texts = {"kind": "KILL", "place": f"batch {at % 100}", "resumed_text": f"batch {begin % 100} of {begin // 100}"}
    times = {"seconds_in_process": 14.2 + number, "seconds_to_first_batch": 5.31 + number / 7}
    more: dict[str, Any] = {**place, **texts, **times, "exit_code": -9, "num_twice": at - begin, "resumed_batch": None}
    return Strike(number=number, **more)


def losses_of(num_batches: int) -> list[float]:
    """Return losses that fall, as in a training."""
    noise = random.Random(0)
    return [0.12 + 2.2 * math.exp(-5 * n / num_batches) * (1 + 0.18 * noise.gauss(0, 1)) for n in range(num_batches)]


def drill(losses: Sequence[float | None] = (), num_strikes: int = 3, **more: Any) -> DrillResult:
    """Return a drill with two equal runs."""
    losses = losses or losses_of(600)
    places = [len(losses) * number // (num_strikes + 1) for number in range(1, num_strikes + 1)]
    strikes = tuple(strike(number, at) for number, at in enumerate(places, 1))
    own: dict[str, Any] = {
        "command": ("python", "train.py", "--data", "/mnt/data/my digits", "--epochs", "12"),
        "verdict": DrillVerdict(
            word=EXACT, text=f"Struck {num_strikes} times, the run is the run that was left alone."
        ),
        "strikes": strikes,
        "directory": "/home/ada/drills/2026-11-22",
        "versions": {"torch": "2.13.0", "device": "cpu", "threads": "2"},
        "uninterrupted": run("uninterrupted", losses),
        "interrupted": run("interrupted", losses, [0, *(each.resumed_at for each in strikes)]),
        **more,
    }
    return DrillResult(num_wanted=num_strikes, kind="KILL", seed=20261122, began=1795327200.0, seconds=412.7, **own)


def verdict(word: str, text: str, *, cause: Sequence[str], difference: Difference | None = None) -> DrillVerdict:
    """Return a verdict with a cause: its part, its text, and its advice."""
    likely = Cause(part=cause[0], text=cause[1], advice=tuple(cause[2:]))
    return DrillVerdict(word=word, text=text, cause=likely, difference=difference, notes=("A note.",))


def differing(text: str = "The two runs differ from batch 40 on.", **more: Any) -> DrillResult:
    """Return a drill with runs that differ from one batch on."""
    losses = [loss + (0.2 if number >= 340 else 0) for number, loss in enumerate(losses_of(600))]
    values = (Value(name="contents of the batch", expected="9f1c 03ab 77e0", found="41d2 9c07 b5fa"),) * 2
    place = {"place": "batch 40 of epoch 3", "number": 340, "rank": 0, "num_equal": 340, "process": 2}
    difference = Difference(values=values, equal=("order of the samples", "main RNG"), **place)  # type: ignore[arg-type]
    found = verdict(
        DIFFERS, text, cause=("augmentation", "What is made of the samples differs."), difference=difference
    )
    return drill(verdict=found, interrupted=run("interrupted", losses, (0, 127, 277, 427)), **more)


def not_judged(**runs: Any) -> DrillResult:
    """Return a drill that could not judge."""
    cause = ("no seed", "The script draws other numbers each time.", "Call seed_everything.", "Or something else.")
    found = verdict(NOT_JUDGED, "The script is not deterministic by itself.", cause=cause)
    return drill(verdict=found, strikes=(), **{"uninterrupted": None, "interrupted": None, **runs})


def two_fits() -> Story:
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


READ: dict[str, Callable[[], str]] = {
    "drill: exact": lambda: page_of_drill(drill()),
    "drill: differs": lambda: page_of_drill(differing()),
    "drill: no run": lambda: page_of_drill(not_judged(last_words=("Traceback:", "ValueError: <it fails>"))),
    "drill: a check": lambda: page_of_drill(
        not_judged(uninterrupted=run("one", losses_of(200)), repeated=run("repeated", [1.0] * 200))
    ),
    "drill: by factors": lambda: page_of_drill(drill([10 ** -(number / 50) for number in range(150)], 1)),
    "drill: no losses": lambda: page_of_drill(drill([None] * 150, 1)),
    "run: killed and done": lambda: page_of_run(reported(killed_and_done())),
    "run: with a test": lambda: page_of_run(reported(with_a_test())),
    "run: begun": lambda: page_of_run(reported(Story(1_700_000_000.0).begin().start())),
    "run: all chapters": lambda: page_of_run(reported(two_fits(), is_whole=True)),
    "run: not exact": lambda: page_of_run(reported(with_notes())),
}
PAGES = {
    **READ,
    "drill: many strikes": lambda: page_of_drill(drill(losses_of(40_000), 60)),
    "drill: long names": lambda: page_of_drill(differing(command=(LONG,), directory=LONG, versions={LONG: LONG})),
    "run: calm": lambda: page_of_run(reported(often_killed(0))),
    "run: long": lambda: page_of_run(reported(often_killed(199, num_autosaves=40))),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_page_says(name: str, snapshot: SnapshotAssertion) -> None:
    """Each kind of drill and of run has a page whose whole text is known."""
    assert Page(READ[name]()).text == snapshot


def test_the_bar_of_the_account_has_the_shares_that_are_named() -> None:
    """Each part begins where the one before it ends, and is as wide as its share."""
    [bar] = re.findall(r'<svg[^>]* class="[^"]*\baccount".*?</svg>', PAGES["run: calm"]())
    parts = re.findall(r'x="([\d.]+)%" width="([\d.]+)%".*?, ([\d.]+) %<', bar)
    ends = [0.0, *itertools.accumulate(float(width) for _, width, _ in parts)]
    assert [float(begin) for begin, *_ in parts] + [100] == pytest.approx(ends, abs=0.1)
    assert [float(width) for _, width, _ in parts] == pytest.approx([float(share) for *_, share in parts], abs=0.06)


def test_steps_that_were_done_again_are_drawn_as_such() -> None:
    """A curve of their own shows the steps that a later process did again."""
    for name, is_drawn in (("run: not exact", True), ("run: calm", False)):
        paths = [each for tag, each in Page(PAGES[name]()).elements if tag == "path"]
        assert any(each["d"] for each in paths if "again" in each.get("class", "").split()) == is_drawn


@pytest.mark.parametrize(
    "losses",
    [[0.0] * 50, [math.nan] * 50, [1.0, math.nan, math.inf, -math.inf, None, 2.0] * 9, [5e-324, 1.7e308] * 9],
    ids=["zero", "nan", "mixed", "huge"],
)
def test_any_losses_can_be_drawn(losses: list[float | None]) -> None:
    """Losses that are missing, not finite, or as large as a float can be leave the page intact."""
    paths = [each["d"] for name, each in Page(page_of_drill(drill(losses, 1))).elements if name == "path"]
    assert "nan" not in "".join(paths)
    assert all(-30 <= float(number) <= 1000 for path in paths for number in re.findall(r"-?\d+(?:\.\d+)?", path))


def test_long_runs_make_small_pages_that_keep_a_spike() -> None:
    """A hundred thousand batches, or 200 processes, are an attachment, and one bad batch changes the picture."""
    losses = losses_of(100_000)
    whole = drill(losses, 60)
    losses[77_777] = 50.0
    spiked = page_of_drill(replace(whole, uninterrupted=run("uninterrupted", losses)))
    assert len(spiked) < 150_000
    assert spiked != page_of_drill(whole)
    page = PAGES["run: long"]()
    assert len(page) < 300_000
    assert "show the 180 processes between" in Page(page).text


def test_no_text_is_markup_and_no_page_names_another_file() -> None:
    """A name that looks like HTML is shown as it is; the policy of a page allows no request."""
    value = Value(name=NASTY, expected=NASTY, found=NASTY)
    difference = Difference(place=NASTY, number=340, rank=0, values=(value,), equal=(NASTY,), num_equal=340, process=2)
    nasty = verdict(NASTY, NASTY, cause=(NASTY, NASTY, NASTY), difference=difference)
    strikes = tuple(replace(each, resumed_text=NASTY, kind=NASTY, hook=NASTY) for each in drill().strikes)
    made = differing(command=(NASTY,), directory=NASTY, versions={NASTY: NASTY}, strikes=strikes)
    story = with_notes()
    for line in story.lines:
        line |= {name: NASTY for name in ("host", "text", "reason") if name in line}
        if line.get("resumed"):
            line["resumed"] |= {name: [NASTY] for name in ("restored", "notes", "not_exact")}
            line["resumed"] |= {"path": NASTY, "position": NASTY}
    nasty = replace(nasty, notes=(NASTY,))
    for text in (
        page_of_drill(replace(made, verdict=nasty, kind=NASTY)),
        page_of_run(reported(story, run_id=NASTY)),
    ):
        page = Page(text)
        assert [name for name, _ in page.elements if name in ("script", "style", "img")] == ["style", "script"]
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        assert {each.get("href", each.get("src", "data:,")) for _, each in page.elements} == {"data:,"}
        assert "\x00" not in text
        [policy] = [each["content"] for _, each in page.elements if "Content-Security" in str(each.get("http-equiv"))]
        assert "default-src 'none'" in policy
        assert not re.search("unsafe|http", policy)


# In a browser.

# Chart texts with boxes that (nearly) meet, texts outside the window, and the width that the window lacks.
MEASURED = """
const boxes = (root) => [...root.querySelectorAll("text")]
  .map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width > 0);
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > -6
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
const met = [], outside = [];
for (const plot of document.querySelectorAll("svg.plot")) {
  const found = boxes(plot);
  found.forEach(([text, box], index) => {
    if (box.left < 0 || box.right > innerWidth) outside.push(text);
    for (const [other, another] of found.slice(index + 1)) if (meet(box, another)) met.push([text, other]);
  });
}
return {met, outside, is_too_wide: document.documentElement.scrollWidth > innerWidth};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yield a browser that all tests of this file share."""
    if missing() is not None:
        pytest.skip(str(missing()))
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def written(directory: Path, page: str) -> Path:
    """Write a page, and return its path."""
    path = directory / "page.html"
    path.write_text(page, encoding="utf-8")
    return path


def check(browser: Browser, path: Path, *, width: int, scheme: str = "light") -> None:
    """Check that a page fits, that nothing complains, and that nothing is requested."""
    browser.requests()
    browser.open(path, width=width, scheme=scheme)
    assert browser.ask(MEASURED) == {"met": [], "outside": [], "is_too_wide": False}
    assert browser.complaints() == []
    assert {address for address in browser.requests() if not address.startswith("data:")} == {path.as_uri()}


def test_both_pages_fit_a_screen_and_a_phone_and_read_out_their_curves(browser: Browser, tmp_path: Path) -> None:
    """Nothing is requested or complained about, nothing overflows, no texts meet; pointer and keys read values."""
    for name, unit in (("run: not exact", "step"), ("drill: differs", "batch")):
        path = written(tmp_path, PAGES[name]())
        for width in (PHONE, WIDE):
            check(browser, path, width=width)
        plot, output = browser.find("svg[data-readouts]"), browser.find("output")
        assert output.text == ""
        browser.hover(plot, share=0.9)
        early = output.text
        plot.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
        assert unit in early != output.text
        browser.ask("document.activeElement.blur()")
        assert output.text == ""
    browser.hover(plot, share=0.9)
    line, box = browser.find(".cursor line").rect, plot.rect
    assert abs(line["x"] - box["x"] - 0.9 * box["width"]) < 4


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_in_each_width_and_scheme(browser: Browser, tmp_path: Path, name: str) -> None:
    """Each page is readable, wide and narrow, and the rest of a long table is one click away."""
    path = written(tmp_path, PAGES[name]())
    for width, scheme in ((WIDE, "dark"), (PHONE, "light"), (820, "light"), (330, "dark")):
        check(browser, path, width=width, scheme=scheme)
    if name == "run: long":
        count = "return [...document.querySelectorAll('table tbody tr')].filter((row) => row.offsetHeight > 0).length"
        assert browser.ask(count) == 21
        browser.find(".switch input").click()
        assert browser.ask(count) == 201


@pytest.mark.slow
def test_the_scheme_of_the_reader_is_taken_and_paper_is_light(browser: Browser, tmp_path: Path) -> None:
    """A dark page is dark with light text and curves, and the reverse; a print is light whatever the screen is."""
    path = written(tmp_path, PAGES["drill: exact"]())
    script = """const of = (element, name) => getComputedStyle(element)[name].match(/\\d+/g).slice(0, 3)
      .reduce((sum, part) => sum + Number(part), 0) / 765;
    return [of(document.body, "backgroundColor"), of(document.body, "color"),
      of(document.querySelector(".curve.ink"), "stroke")];"""
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        browser.open(path, scheme=scheme, width=720)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.command("Emulation.setEmulatedMedia", media=media, features=features)
        paper, *drawn = browser.ask(script)
        is_light = scheme == "light" or media == "print"
        assert (paper > 0.9 and max(drawn) < 0.2) if is_light else (paper < 0.15 and min(drawn) > 0.8)
        assert not browser.ask(MEASURED)["is_too_wide"]
    browser.command("Emulation.setEmulatedMedia", media="")

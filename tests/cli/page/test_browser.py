"""The pages in a real browser. Without Chromium these tests are skipped: `make browser` installs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from lightning_faulttolerant.cli.drill.page import page as page_of_drill
from lightning_faulttolerant.cli.report_page import page as page_of_run
from tests.cli.page.browser import PHONE, WIDE, Browser, missing
from tests.cli.page.drills import differing_drill, exact_drill
from tests.cli.stories import often_killed, only_tested, reported, with_a_test

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

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
FITS = {"met": [], "outside": [], "is_too_wide": False}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yield a browser that all tests of this file share."""
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def written(directory: Path, page: str) -> Path:
    """Write a page, and return its path."""
    path = directory / "page.html"
    path.write_text(page, encoding="utf-8")
    return path


def with_long_names() -> str:
    """Return the page of a drill with names that no line can hold."""
    drill, name = differing_drill(), "a/very/long/path/without/any/space" * 12
    strikes = tuple(replace(strike, resumed_text=name) for strike in drill.strikes)
    verdict = replace(drill.verdict, text=name)
    long = replace(drill, command=(name,), directory=name, verdict=verdict, strikes=strikes, versions={name: name})
    return page_of_drill(long)


PAGES = {
    "exact": lambda: page_of_drill(exact_drill()),
    "differs": lambda: page_of_drill(differing_drill()),
    "many strikes": lambda: page_of_drill(exact_drill(40_000, num_strikes=60)),
    "without losses": lambda: page_of_drill(exact_drill(losses=[None] * 900)),
    "long names": with_long_names,
    "run": lambda: page_of_run(reported(often_killed(4))),
    "calm": lambda: page_of_run(reported(often_killed(0))),
    "evaluated": lambda: page_of_run(reported(with_a_test())),
    "only tested": lambda: page_of_run(reported(only_tested())),
    "long": lambda: page_of_run(reported(often_killed(199, num_autosaves=40))),
}


def check(browser: Browser, path: Path, *, width: int, scheme: str) -> None:
    """Check that a page fits, that nothing complains, and that nothing is requested."""
    browser.requests()
    browser.open(path, width=width, scheme=scheme)
    assert browser.ask(MEASURED) == FITS
    assert browser.complaints() == []
    assert {address for address in browser.requests() if not address.startswith("data:")} == {path.as_uri()}


def test_both_pages_fit_a_screen_and_a_phone_and_read_out_their_curves(browser: Browser, tmp_path: Path) -> None:
    """Nothing is requested or complained about, nothing overflows, no texts meet, and a pointer reads values."""
    for name in ("exact", "run"):
        path = written(tmp_path, PAGES[name]())
        for width in (PHONE, WIDE):
            check(browser, path, width=width, scheme="light")
        plot, output = browser.find("svg[data-readouts]"), browser.find("output")
        assert output.text == ""
        browser.hover(plot, share=0.25)
        early = output.text
        browser.hover(plot, share=0.75)
        assert ("batch" if name == "exact" else "step") in early != output.text


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PAGES))
def test_every_page_fits_in_each_width_and_scheme(browser: Browser, tmp_path: Path, name: str) -> None:
    """Each page is readable, wide and narrow, and the rest of a long table is one click away."""
    path = written(tmp_path, PAGES[name]())
    for width, scheme in ((WIDE, "dark"), (PHONE, "light"), (820, "light"), (330, "dark")):
        check(browser, path, width=width, scheme=scheme)
    if name == "long":
        count = "return [...document.querySelectorAll('table tbody tr')].filter((row) => row.offsetHeight > 0).length"
        assert browser.ask(count) == 21
        browser.find(".switch input").click()
        assert browser.ask(count) == 201


@pytest.mark.slow
def test_the_scheme_of_the_reader_is_taken_and_paper_is_light(browser: Browser, tmp_path: Path) -> None:
    """A dark page is dark with light text and curves, and the reverse; a print is light whatever the screen is."""
    path = written(tmp_path, PAGES["exact"]())
    script = """const of = (element, name) => getComputedStyle(element)[name].match(/\\d+/g).slice(0, 3)
      .reduce((sum, part) => sum + Number(part), 0) / 765;
    return [of(document.body, "backgroundColor"), of(document.body, "color"),
      of(document.querySelector(".curve.ink"), "stroke")];"""
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        browser.open(path, scheme=scheme, width=720)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.command("Emulation.setEmulatedMedia", media=media, features=features)
        paper, *drawn = browser.ask(script)
        if scheme == "light" or media == "print":
            assert (paper > 0.9, max(drawn) < 0.2) == (True, True)
        else:
            assert (paper < 0.15, min(drawn) > 0.8) == (True, True)
        assert not browser.ask(MEASURED)["is_too_wide"]
    browser.command("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
def test_the_keys_read_out_what_a_pointer_does(browser: Browser, tmp_path: Path) -> None:
    """The arrows go from value to value, leaving clears the readout, and its line is where the pointer is."""
    browser.open(written(tmp_path, PAGES["differs"]()))
    plot, output = browser.find("svg[data-readouts]"), browser.find("output")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert "epoch 0, batch 0" in output.text
    for _ in range(40):
        plot.send_keys(Keys.PAGE_DOWN)
    assert "epoch 5, batch 99" in output.text
    assert " / " in output.text  # both losses, where they differ
    browser.ask("document.activeElement.blur()")
    assert output.text == ""
    for share in (0.1, 0.5, 0.9):
        browser.hover(plot, share=share)
        line, box = browser.find(".cursor line").rect, plot.rect
        assert abs(line["x"] - box["x"] - share * box["width"]) < 4


@pytest.mark.slow
def test_the_policy_of_a_page_is_obeyed(browser: Browser, tmp_path: Path) -> None:
    """Even if a text became markup, the browser would run no script of it and make no request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        picture = f"<img src='http://127.0.0.1:{server.getsockname()[1]}/x.png' onerror='window.bad=1'>"
        nasty = f"<script>window.bad=1</script>{picture}<p onclick='window.bad=1'>x</p></main>"
        browser.open(written(tmp_path, PAGES["calm"]().replace("</main>", nasty)))
        browser.find("p[onclick]").click()
        assert browser.ask("return window.bad") is None
        assert len([text for text in browser.complaints() if "Content Security Policy" in text]) >= 2
        with pytest.raises(BlockingIOError):
            server.accept()

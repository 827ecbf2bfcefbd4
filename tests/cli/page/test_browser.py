"""The pages in a real browser. Without Chromium these tests are skipped: `make browser` installs it."""

import socket
from dataclasses import replace
from functools import cache

import pytest
from selenium.webdriver.common.keys import Keys

from lightning_faulttolerant.cli.drill.page import page as page_of_drill
from lightning_faulttolerant.cli.report_page import page as page_of_run
from tests.cli.page.browser import PHONE, WIDE, Browser, missing
from tests.cli.page.drills import differing_drill, exact_drill
from tests.cli.page.histories import ImaginedRun, calm, evaluated, faulty, made_of, only_tested

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

NASTY = (
    "<script>window.bad=1</script><img src='http://127.0.0.1:9/x.png' onerror='window.bad=1'>\"' onclick='window.bad=1"
)

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
return {met, outside, too_wide: document.documentElement.scrollWidth - innerWidth,
  num_texts: document.querySelectorAll("svg.plot text").length};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Yield a browser that all tests of this file share."""
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def _written(directory, page):
    path = directory / "page.html"
    path.write_text(page, encoding="utf-8")
    return path


def _many_strikes():
    return exact_drill(40_000, num_strikes=60)


def _without_losses():
    drill = exact_drill(900, num_strikes=4)
    points = tuple(replace(point, loss=None) for point in drill.uninterrupted.curve)
    return replace(
        drill,
        uninterrupted=replace(drill.uninterrupted, curve=points),
        interrupted=replace(drill.interrupted, curve=points),
    )


def _begun():
    run = ImaginedRun()
    run.begin()
    return made_of(run.lines[:1])


@cache
def _long():
    return faulty(num_faults=199, hours=120, save_every=21.6, down=100)


def _with_long_names():
    drill = differing_drill()
    name = "a/very/long/path/without/any/space" * 12
    values = tuple(replace(value, name=name, expected=name, found=name) for value in drill.verdict.difference.values)
    difference = replace(drill.verdict.difference, values=values)
    strikes = tuple(replace(strike, resumed_text=name) for strike in drill.strikes)
    verdict = replace(drill.verdict, difference=difference, text=name)
    return replace(drill, command=(name,), directory=name, verdict=verdict, strikes=strikes, versions={name: name})


def _with_long_texts():
    name = "an-exception-that-tells-all-it-knows-without-any-space" * 10
    run = ImaginedRun(host=name)
    run.begin()
    run.train(300)
    run.end(name, name)
    run.begin(notes=[name], not_exact=[name])
    run.train(300)
    return made_of(run.lines, run_id=name)


PAGES = {
    "exact": lambda: page_of_drill(exact_drill()),
    "differs": lambda: page_of_drill(differing_drill()),
    "many strikes": lambda: page_of_drill(_many_strikes()),
    "without losses": lambda: page_of_drill(_without_losses()),
    "long names": lambda: page_of_drill(_with_long_names()),
    "run": lambda: page_of_run(faulty()),
    "calm": lambda: page_of_run(calm()),
    "evaluated": lambda: page_of_run(evaluated()),
    "only tested": lambda: page_of_run(only_tested()),
    "begun": lambda: page_of_run(_begun()),
    "long": lambda: page_of_run(_long()),
    "long texts": lambda: page_of_run(_with_long_texts()),
}


def _check(browser, path, *, width, scheme):
    browser.requests()
    browser.open(path, width=width, scheme=scheme)
    measured = browser.ask(MEASURED)
    assert measured["num_texts"] >= 2
    assert measured["met"] == []
    assert measured["outside"] == []
    assert measured["too_wide"] <= 0
    assert browser.complaints() == []
    assert {address for address in browser.requests() if not address.startswith("data:")} == {path.as_uri()}


def test_both_pages_fit_a_screen_and_a_phone_and_read_out_their_curves(browser, tmp_path):
    """Nothing is requested or complained about, nothing overflows, no texts meet, and a pointer reads values."""
    for name in ("exact", "run"):
        path = _written(tmp_path, PAGES[name]())
        for width in (PHONE, WIDE):
            _check(browser, path, width=width, scheme="light")
        plot = browser.find("svg[data-readouts]")
        output = browser.find("output")
        assert output.text == ""
        browser.hover(plot, share=0.25)
        early = output.text
        browser.hover(plot, share=0.75)
        assert early
        assert output.text != early
        assert ("batch" if name == "exact" else "step") in early


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PAGES))
def test_every_page_fits_in_each_width_and_scheme(browser, tmp_path, name):
    """Long names, many strikes, no losses, one line of history: each page is readable, wide and narrow."""
    path = _written(tmp_path, PAGES[name]())
    for width, scheme in ((WIDE, "dark"), (PHONE, "light"), (820, "light"), (330, "dark")):
        _check(browser, path, width=width, scheme=scheme)


@pytest.mark.slow
def test_the_scheme_of_the_reader_is_taken(browser, tmp_path):
    """A dark page is dark with light text and curves, and the reverse."""
    path = _written(tmp_path, PAGES["exact"]())
    script = """const of = (element, name) => getComputedStyle(element)[name].match(/\\d+/g).slice(0, 3)
      .reduce((sum, part) => sum + Number(part), 0) / 765;
    return [of(document.body, "backgroundColor"), of(document.body, "color"),
      of(document.querySelector(".curve.ink"), "stroke")];"""
    browser.open(path, scheme="light")
    paper, ink, curve = browser.ask(script)
    assert paper > 0.9
    assert max(ink, curve) < 0.2
    browser.open(path, scheme="dark")
    paper, ink, curve = browser.ask(script)
    assert paper < 0.15
    assert min(ink, curve) > 0.8


@pytest.mark.slow
def test_the_keys_read_out_what_a_pointer_does(browser, tmp_path):
    """A chart works without a pointer: the arrows go from value to value, and leaving it clears the readout."""
    browser.open(_written(tmp_path, PAGES["differs"]()))
    plot, output = browser.find("svg[data-readouts]"), browser.find("output")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert "epoch 0, batch 0" in output.text
    plot.send_keys(Keys.ARROW_RIGHT)
    assert "epoch 0, batch 0" not in output.text
    for _ in range(40):
        plot.send_keys(Keys.PAGE_DOWN)
    assert "epoch 11, batch 99" in output.text
    assert " / " in output.text  # both losses, where they differ
    browser.ask("document.activeElement.blur()")
    assert output.text == ""


@pytest.mark.slow
def test_the_line_of_a_readout_stands_where_the_pointer_is(browser, tmp_path):
    """The readout belongs to the place under the pointer, and goes away with it."""
    browser.open(_written(tmp_path, PAGES["exact"]()))
    plot = browser.find("svg[data-readouts]")
    for share in (0.1, 0.5, 0.9):
        browser.hover(plot, share=share)
        line, box = browser.find(".cursor line").rect, plot.rect
        assert abs(line["x"] - box["x"] - share * box["width"]) < 4
    browser.hover(browser.find("h1"), share=0.5)
    assert browser.find("output").text == ""
    assert browser.find(".cursor").get_attribute("visibility") == "hidden"


@pytest.mark.slow
def test_the_rest_of_a_long_table_is_one_click_away(browser, tmp_path):
    """Twenty of 200 processes are shown, and all of them on request, without a script."""
    browser.open(_written(tmp_path, PAGES["long"]()))
    count = "return [...document.querySelectorAll('table tbody tr')].filter((row) => row.offsetHeight > 0).length"
    assert browser.ask(count) == 21
    browser.find(".switch input").click()
    assert browser.ask(count) == 201


@pytest.mark.slow
def test_names_that_look_like_markup_do_nothing(browser, tmp_path):
    """A name's script does not run, and its picture is not requested."""
    run = ImaginedRun(host=NASTY)
    run.begin()
    run.train(60)
    run.end(NASTY, NASTY)
    drill = replace(differing_drill(), command=(NASTY,), directory=NASTY, versions={NASTY: NASTY})
    for made in (page_of_run(made_of(run.lines, run_id=NASTY)), page_of_drill(drill)):
        path = _written(tmp_path, made)
        _check(browser, path, width=WIDE, scheme="light")
        assert browser.ask("return window.bad") is None
        assert "onerror" in browser.find("body").text


@pytest.mark.slow
def test_the_policy_of_a_page_is_obeyed(browser, tmp_path):
    """Even if a text became markup, the browser would run no script of it and make no request."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        name = NASTY.replace(":9/", f":{server.getsockname()[1]}/")
        page = PAGES["calm"]().replace("</main>", f"{name}<p onclick='window.bad=1'>x</p></main>")
        browser.open(_written(tmp_path, page))
        browser.find("p[onclick]").click()
        assert browser.ask("return window.bad") is None
        assert len([text for text in browser.complaints() if "Content Security Policy" in text]) >= 2
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.slow
def test_a_page_prints_in_light_colours_within_its_paper(browser, tmp_path):
    """On paper a page is light, whatever the screen is, and no wider than the sheet."""
    browser.open(_written(tmp_path, PAGES["run"]()), scheme="dark", width=720)
    browser.command("Emulation.setEmulatedMedia", media="print")
    paper = browser.ask("return getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    measured = browser.ask(MEASURED)
    assert (measured["met"], measured["too_wide"]) == ([], 0)
    browser.command("Emulation.setEmulatedMedia", media="")

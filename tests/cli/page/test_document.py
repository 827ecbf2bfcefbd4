import base64
import hashlib
import re
from importlib import resources

import pytest

from lightning_faulttolerant.cli.html import document, tag
from tests.cli.page.parsed import Parsed

ASSETS = resources.files("lightning_faulttolerant.cli")
KINDS = (
    "good",
    "evaluation",
    "data",
    "again",
    "saving",
    "restoring",
    "restarting",
    "starting",
    "outside",
    "hung",
    "idle",
)


@pytest.fixture(scope="module")
def parsed():
    """Return an empty page."""
    return Parsed(document("A <title>", tag("p", "text")))


def test_the_policy_of_a_page_allows_its_own_style_and_script_only(parsed):
    """The policy names the digests of the contents of the page, and allows no request."""
    [policy] = [each["content"] for each in parsed.named("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for kind in ("script", "style"):
        [text] = parsed.raw[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy
    assert "http" not in policy


def test_a_page_names_no_other_file(parsed):
    """Nothing in it has an address that a browser would go to, and its style imports nothing."""
    for _, attributes in parsed.elements:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert "style" not in attributes
    for text in (*parsed.raw["style"], *parsed.raw["script"]):
        assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp|import\(", text)


def test_a_page_is_small_before_anything_is_in_it():
    """Style and script together take less than a photograph's thumbnail."""
    assert len(document("t")) < 16_000


def test_a_title_is_text(parsed):
    """The name of a run is not markup in the tab either."""
    assert "A <title>" in parsed.texts


def _colours(block):
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))


def _schemes():
    style = ASSETS.joinpath("page.css").read_text(encoding="utf-8")
    light, dark = (_colours(block) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2])
    return {"light": light, "dark": light | dark}


def _linear(colour):
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(colour):
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), _linear(colour), strict=True))


def _contrast(one, other):
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


# What remains of a color without one kind of cone, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
_SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _lab(colour, matrix):
    parts = [sum(weight * part for weight, part in zip(row, _linear(colour), strict=True)) for row in matrix]
    r, g, b = (min(max(part, 0.0), 1.0) for part in parts)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("seen", list(_SEEN))
def test_the_kinds_of_time_can_be_distinguished_with_any_eyes(scheme, seen):
    """Two kinds in one bar differ clearly in what remains of their colors without one kind of cone."""
    colours = _schemes()[scheme]
    places = {kind: _lab(colours[kind], _SEEN[seen]) for kind in (*KINDS, "paper")}
    for one, place in places.items():
        for other, another in places.items():
            distance = sum((a - b) ** 2 for a, b in zip(place, another, strict=True)) ** 0.5
            assert one == other or distance > 11, f"{one} and {other} are {distance:.1f} apart"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_paper(scheme):
    """All text has the contrast that WCAG 2 requires of small text (4.5), the headline's colors that of large text."""
    colours = _schemes()[scheme]
    for name in ("ink", "soft", "fault"):
        assert _contrast(colours[name], colours["paper"]) >= 4.5, name
    assert _contrast(colours["ink"], colours["wash"]) >= 4.5
    assert _contrast(colours["good"], colours["paper"]) >= 3


def test_a_print_has_the_colours_of_the_light_page():
    """Printing from a dark browser gives the light page."""
    style = ASSETS.joinpath("page.css").read_text(encoding="utf-8")
    printed = _colours(style.partition("@media print")[2])
    light = _schemes()["light"]
    assert {name: light[name] for name in KINDS} == {name: printed[name] for name in KINDS}

import pytest

from lightning_faulttolerant.cli.html import Markup, escaped, joined, tag
from tests.cli.page.parsed import Parsed

NASTY = [
    "<script>x</script>",
    "</style>",
    "\"' onload=x y='",
    "&lt;",
    "a\x00b\x1b[31m",
    "\u202egpj",
    "\ud800",
    "<!--",
    "é ✓",
]


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_one_text_in_an_element_and_in_an_attribute(text):
    """For any text, a reader of the page gets that text and no additional element or attribute."""
    page = Parsed(joined(tag("p", text, title=text)).html)
    [(name, attributes)] = page.elements
    assert (name, list(attributes), page.texts) == ("p", ["title"], [attributes["title"]])


def test_characters_that_no_page_holds_are_written_as_escapes():
    """Control characters, lone surrogates, and characters that turn the reading direction can't act on a page."""
    assert escaped("a\x00b\u202ec\ud800") == "a\\x00b\\u202ec\\ud800"
    escaped("a\x00b\u202ec\ud800").encode("utf-8")
    assert escaped("é ✓\n") == "é ✓\n"


def test_markup_is_not_escaped_again_and_text_made_of_it_is():
    """Only markup passes unescaped, and a text that is built from it is text."""
    bold = tag("b", "x")
    assert tag("p", bold).html == "<p><b>x</b></p>"
    assert "&lt;b&gt;" in tag("p", f"{bold.html}").html


def test_children_are_flattened_and_none_is_nothing():
    """Lists, generators, and None can be children."""
    assert tag("p", None, ["a", [1, None]], (each for each in "bc"), 2.5).html == "<p>a1bc2.5</p>"


def test_attributes_are_spelled_as_html_spells_them():
    """Underscores become hyphens, one at the end is dropped, and None omits an attribute."""
    assert (
        tag("path", class_="a", data_name=1, viewBox="0", title=None).html
        == '<path class="a" data-name="1" viewBox="0"/>'
    )
    assert tag("br").html == "<br>"
    assert tag("td").html == "<td></td>"
    assert joined("<", Markup("<br>")).html == "&lt;<br>"

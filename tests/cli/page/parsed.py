"""Reads a page strictly: every element must be closed, and the result is what a browser would take from it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "input"}


class Parsed(HTMLParser):
    """The elements of a page in their order, and its text without script and style."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.texts = []
        self.raw = {"script": [], "style": []}
        self._open = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in <{tag}>"
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in self.raw:
            self.raw[self._open[-1]].append(data)
        else:
            self.texts.append(data)

    def named(self, tag):
        """Return the attributes of all elements of a name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        """Return the text that a reader sees."""
        return " ".join(" ".join(self.texts).split())

"""What every HTML page of the project must be: tags closed in order, and nothing fetched."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "br")


class _Checked(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        assert not {"src", "href"} & {name for name, _ in attributes}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(text: str) -> str:
    """What the page says; AssertionError if it is none that stands by itself."""
    checked = _Checked()
    checked.feed(text)
    assert not checked.open
    return checked.text

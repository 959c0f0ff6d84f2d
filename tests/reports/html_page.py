"""An HTML page taken apart: its elements, their texts, and whether every tag was closed."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect", "image"}


class Page(HTMLParser):
    """Parses the page at once; raises ``AssertionError`` if tags do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    @property
    def text(self) -> str:
        """All text, white space made one blank."""
        return " ".join(" ".join(self.texts).split())

    def attributes(self, name: str) -> list[str]:
        """Values of an attribute in all elements."""
        return [value for _, found in self.elements if (value := found.get(name)) is not None]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open and "script" not in self.open:
            self.texts.append(data)

"""Reads a page as a browser would: elements, attributes, texts."""

from html.parser import HTMLParser

VOID = {"meta", "path", "use", "br"}


class Page(HTMLParser):
    """A page that was taken apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def tags(self) -> set[str]:
        """Names of all elements."""
        return {tag for tag, _ in self.elements}

    def values(self, attribute: str) -> list[str]:
        """Of an attribute, of all elements that have it."""
        return [attrs[attribute] for _, attrs in self.elements if attribute in attrs]

    @property
    def text(self) -> str:
        """All that can be read."""
        return " ".join(" ".join(self.texts).split())

"""Inline SVG: matplotlib figures that take their colours and font from the page around them."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.9, 2.3  # inches: about the width of a phone, so that text stays readable there

# Colours that stand for the page's: each becomes a CSS value that follows light and dark.
INK = "#010203"
SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215")
_CSS = {INK: "currentColor"} | {
    color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


class Canvas:
    """One pair of axes in the page's style, to draw on and then to turn into SVG."""

    def __init__(
        self, *, xlabel: str, ylabel: str, height: float = HEIGHT, width: float = WIDTH
    ) -> None:
        with matplotlib.rc_context(_STYLE):
            self.figure = Figure(figsize=(width, height), layout="constrained")
            self.axes: Axes = self.figure.add_subplot()
        self.figure.patch.set_visible(False)
        self.axes.patch.set_visible(False)
        self.axes.set_xlabel(xlabel)
        self.axes.set_ylabel(ylabel)
        self.axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.7)
        self.axes.set_axisbelow(True)

    def legend(self, **options: Any) -> None:
        """Add a legend in the page's style."""
        with matplotlib.rc_context(_STYLE):
            self.axes.legend(**options)

    def svg(self, key: str) -> str:
        """Return the picture as an ``<svg>`` element; ``key`` keeps its ids apart from others'."""
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}):
            file = io.StringIO()
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return adopt(file.getvalue(), key)


def adopt(document: str, key: str) -> str:
    """Turn a matplotlib SVG document into an element with the page's colours, font and own ids."""
    element = document[document.index("<svg") :].strip()
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"<!--.*?-->\s*", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)
    element = element.replace("xlink:href", "href")
    element = re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', element)
    element = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", element)
    for color, css in _CSS.items():
        element = element.replace(color, css)
    return own_ids(element, key)


def own_ids(element: str, key: str) -> str:
    """Drop the ids that nothing refers to and put ``key`` before the others."""
    used = set(re.findall(r'(?:href="#|url\(#)([\w.-]+)', element))
    element = re.sub(
        r' id="([^"]*)"',
        lambda match: f' id="{key}-{match[1]}"' if match[1] in used else "",
        element,
    )
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{key}-", element)

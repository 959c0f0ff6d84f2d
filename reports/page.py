"""The page: a report as one HTML file that needs nothing else, no network.

Its one script sorts tables; without it, everything can still be read.
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reports.blocks import Report

TEMPLATES = Path(__file__).parent / "templates"


def render_page(report: Report) -> str:
    """Return the report as HTML; every text in it is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2").render(report=report)

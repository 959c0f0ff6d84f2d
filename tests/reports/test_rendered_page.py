"""The page in a real browser: it fits a phone, and the console stays empty."""

import pytest

from reports.run_report import write_report
from tests.reports.chromium import Chromium, find_chromium
from tests.reports.sample_records import (
    failed_record,
    hostile_record,
    measured_record,
    published_record,
    write_run,
)

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    records = [measured_record(), failed_record(), hostile_record()]
    folders = {record.run_id: write_run(folder, record) for record in records[:2]}
    published = {record.workload.name: [published_record()] for record in records}
    return write_report(records, published, folders, folder / "report.html")[0]


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_and_the_console_is_empty(browser, page, width, scheme):
    browser.open(page, width=width, scheme=scheme)

    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_in_pictures_has_the_contrast_of_the_page(browser, page, scheme):
    """At least 4.5 to 1 (WCAG AA) for text, 3 to 1 for the lines of a picture."""
    browser.open(page, width=1200, scheme=scheme)
    ratios = browser.evaluate(
        """
        (() => {
          const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
          const luminance = colour => {
            const [r, g, b] = colour.match(/[0-9.]+/g).map(Number).map(channel);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const page = luminance(getComputedStyle(document.body).backgroundColor);
          const contrast = colour => {
            const [low, high] = [page, luminance(colour)].sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05);
          };
          const fills = [...document.querySelectorAll("svg text")]
            .map(e => getComputedStyle(e).fill);
          const strokes = [...document.querySelectorAll("svg path")]
            .map(e => getComputedStyle(e).stroke).filter(c => c.startsWith("rgb"));
          return [Math.min(...fills.map(contrast)), Math.min(...strokes.map(contrast)),
                  fills.length, strokes.length];
        })()
        """
    )

    assert ratios[0] >= 4.5 and ratios[1] >= 3
    assert ratios[2] > 20 and ratios[3] > 20


def test_wide_tables_scroll_inside_their_own_box(browser, page):
    browser.open(page, width=390)

    widths = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].map(e => [e.clientWidth, e.scrollWidth])"
    )

    assert max(scroll for _, scroll in widths) > 390
    assert max(client for client, _ in widths) <= 390

"""Reports of traces and comparisons in a real browser: they fit a phone, and tables sort."""

import pytest

from reports.compare_report import write_compare_report
from reports.comparison import compare_all
from reports.run_report import write_rendered
from reports.run_traces import read_traces
from reports.sides import read_sides
from reports.trace_answer import trace_answer
from reports.trace_report import trace_report
from tests.reports.chromium import Chromium, find_chromium
from tests.reports.sample_traces import balanced, late

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    folders = [balanced(out / "a", norm_us=50.0), late(out / "b")]
    answer = trace_answer(read_traces([folders[1]], num_workers=1))
    sides = read_sides(folders)
    comparisons, reasons = compare_all(sides)
    return {
        "analyze": write_rendered(trace_report(answer, ["b"]), out / "analyze.html")[0],
        "compare": write_compare_report(sides, comparisons, reasons, out / "compare.html")[0],
    }


@pytest.mark.parametrize("name", ["analyze", "compare"])
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_and_the_console_is_empty(
    browser, pages, name, width, scheme
):
    browser.open(pages[name], width=width, scheme=scheme)

    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].resolve().as_uri()]


@pytest.mark.parametrize(("width", "shown"), [(390, "on-narrow"), (1200, "on-wide")])
def test_one_version_of_the_waterfall_is_shown(browser, pages, width, shown):
    browser.open(pages["analyze"], width=width)

    visible = browser.evaluate(
        "[...document.querySelectorAll('.on-narrow, .on-wide')]"
        ".filter(e => e.offsetParent !== null).map(e => e.className)"
    )

    assert visible == [shown]


def column(browser, index):
    return browser.evaluate(
        f"[...document.querySelector('table.sortable').tBodies[0].rows]"
        f".map(r => r.cells[{index}].querySelector('data')?.value"
        f" ?? r.cells[{index}].textContent.trim())"
    )


def test_tables_sort_by_number_and_by_text_and_keep_their_sum_last(browser, pages):
    browser.open(pages["analyze"], width=1200)
    title = "document.querySelector('table.sortable').tHead.rows[0].cells[{}]"
    before = sorted(map(float, column(browser, 2)))

    browser.evaluate(f"{title.format(2)}.querySelector('button').click()")
    assert list(map(float, column(browser, 2))) == before[::-1]
    assert browser.evaluate(f"{title.format(2)}.getAttribute('aria-sort')") == "descending"

    browser.evaluate(f"{title.format(2)}.querySelector('button').click()")
    assert list(map(float, column(browser, 2))) == before

    browser.evaluate(f"{title.format(0)}.querySelector('button').click()")
    assert column(browser, 0) == sorted(column(browser, 0))
    assert browser.evaluate(f"{title.format(2)}.getAttribute('aria-sort')") is None
    last = browser.evaluate("document.querySelector('table.sortable').rows.length - 1")
    footer = browser.evaluate(f"document.querySelector('table.sortable').rows[{last}].innerText")
    assert footer.startswith("step")

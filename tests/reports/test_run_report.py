"""The report of runs: what it says is what the records say, in HTML and in Markdown."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

from bench.errors import UsageError
from bench.metrics import METRICS
from reports.blocks import Text
from reports.numbers import number
from reports.run_parts import RUN_PARTS
from reports.run_report import write_report
from tests.reports.html_page import Page
from tests.reports.sample_records import (
    HOSTILE,
    failed_record,
    hostile_record,
    measured_record,
    published_record,
    step_rows,
    write_run,
)

ROOT = Path(__file__).resolve().parents[2]
HOSTILE_TEXT = " ".join(HOSTILE.split())


def write_both(tmp_path: Path, *records, references=(), rows=None, **options) -> tuple[str, str]:
    """Write the runs and their report; return the page and the Markdown."""
    folders = {
        record.run_id: write_run(tmp_path / f"runs{i}", record, rows)
        for i, record in enumerate(records)
        if "/" not in record.run_id
    }
    published = {record.workload.name: list(references) for record in records}
    html, md = write_report(records, published, folders, tmp_path / "report", **options)
    return html.read_text(), md.read_text()


def tables_of(markdown: str) -> list[list[list[str]]]:
    """Return the cells of every pipe table: tables of rows of cells."""
    tables, current = [], []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            assert line.endswith(" |")
            current.append(re.split(r"(?<!\\)\|", line)[1:-1])
        elif current:
            tables.append(current)
            current = []
    return tables


def test_page_is_well_formed_and_needs_nothing_else(tmp_path):
    html, _ = write_both(
        tmp_path, measured_record(), failed_record(), references=[published_record()]
    )
    page = Page(html)

    tags = Counter(tag for tag, _ in page.elements)
    assert tags["script"] == 1, "the one that sorts tables"
    assert not set(tags) & {"iframe", "img", "object"}
    assert page.attributes("src") == []
    links = [found.get("href", "") for tag, found in page.elements if tag not in ("a", "use")]
    assert {link for link in links if link} == {"data:,"}
    assert not re.search(r"@import|url\((?!#)", html)


def test_ids_are_unique_and_every_reference_has_its_target(tmp_path):
    html, _ = write_both(tmp_path, measured_record(), measured_record("muse_spark_proxy"))
    page = Page(html)

    counts = Counter(page.attributes("id"))
    references = [href[1:] for href in page.attributes("href") if href.startswith("#")]
    references += re.findall(r"url\(#([^)]+)\)", html)

    assert max(counts.values()) == 1
    assert references and set(references) <= set(counts)


def test_every_valid_metric_is_on_the_page_with_its_exact_value(tmp_path):
    record = measured_record()
    html, _ = write_both(tmp_path, record)

    values = {float(value) for value in Page(html).attributes("value")}

    expected = {metric.value for metric in record.metrics.values() if metric.value is not None}
    assert len(expected) > 8
    assert expected <= values


def test_metrics_table_says_value_unit_spread_and_counting(tmp_path):
    record = measured_record()
    _, markdown = write_both(tmp_path, record)

    table = next(t for t in tables_of(markdown) if "How it is counted" in t[0][-1])
    rows = {row[0].split("(")[-1].strip(" )"): [cell.strip() for cell in row] for row in table[2:]}

    assert list(rows) == [name for name in METRICS if name in record.metrics]
    _, value, unit, spread, counting = rows["step_time"]
    assert (value, unit) == (number(record.metrics["step_time"].value), "s")
    assert spread == "1.169 to 1.262 (median 1.182 of 10 steps)"
    assert counting == METRICS["step_time"].formula
    assert "bf16 peak of 321.0 GFLOPS per device" in rows["mfu_bf16.full"][-1]
    assert "largest on rank 0" in rows["peak_tensor_memory"][-1]
    assert rows["peak_tensor_memory"][1:4] == [
        "421.9",
        "MiB",
        "418.8 to 421.9 (median 420.4 of 2 ranks)",
    ]


def test_invalid_metric_shows_its_reason_instead_of_a_number(tmp_path):
    html, markdown = write_both(tmp_path, measured_record())

    reason = "no mxfp8 peak is known for this CPU"
    assert reason in Page(html).text
    row = next(line for line in markdown.splitlines() if "(mfu.full)" in line)
    assert "| invalid |" in row and reason in row


def test_run_says_plan_precision_routing_and_that_mxfp8_is_emulated(tmp_path):
    text = Page(write_both(tmp_path, measured_record())[0]).text

    assert "world_size 2, dp_replicate 1, dp_shard 2, ep 2, remat selective" in text
    assert "quantization mxfp8 (emulated)" in text
    assert "Routing learned" in text
    assert "4 sequences x 512 tokens = 2,048 tokens per step" in text
    assert "12,080,465 tokens in 729 documents" in text


def test_run_without_emulation_does_not_claim_it(tmp_path):
    html, _ = write_both(tmp_path, measured_record(quantization="none"))

    assert "emulated" not in Page(html).text


def test_failed_run_shows_rank_error_hint_and_its_steps(tmp_path):
    html, markdown = write_both(tmp_path, failed_record(), rows=step_rows()[:7])

    for text in (Page(html).text, markdown):
        assert "Failed on rank 1, after 7 completed steps." in text
        assert "FloatingPointError: step 7: loss nan" in text
        assert "lower training.learning_rate" in text
    assert html.count("<svg") == 2  # the time of the steps and the loss, as far as it got


def test_suite_has_an_overview_that_leads_to_each_run(tmp_path):
    html, markdown = write_both(tmp_path, measured_record(), failed_record())
    page = Page(html)

    overview = tables_of(markdown)[0]
    assert len(overview) == 2 + 2
    assert "1 of 2 runs succeeded, not muse_spark_proxy." in page.text
    cells = [cell.strip() for cell in overview[2]]
    assert cells[2:5] == ["866.3", "0.03595", "0.03370"]
    assert cells[8] == f"{number(step_rows()[0]['loss'])} \u2192 {number(step_rows()[12]['loss'])}"
    assert {"#run-1", "#run-2"} <= set(page.attributes("href"))


def test_single_run_has_no_overview(tmp_path):
    _, markdown = write_both(tmp_path, measured_record())

    assert "Status" not in tables_of(markdown)[0][0]


def test_published_results_are_marked_and_keep_their_figures(tmp_path):
    html, markdown = write_both(tmp_path, measured_record(), references=[published_record()])
    text = Page(html).text

    row = next(line for line in markdown.splitlines() if line.startswith("| TorchTitan"))
    assert "published, not measured here" in row
    assert "| 5,262.68 | 1,535.93 | 1,372 (derived) |" in row
    assert "30.72 (mxfp8, derived)" in row and "224.65 (reserved)" in row
    assert "PyTorch announcement of TorchTitan" in row
    assert "not comparable with the full-size references" in text


def test_full_size_run_on_its_hardware_is_not_called_incomparable(tmp_path):
    run = msgspec.structs.replace(published_record(), kind="measured", run_id="full")

    html, _ = write_both(tmp_path, run, references=[published_record()])

    assert "not comparable" not in Page(html).text


def test_source_that_is_an_address_becomes_a_link(tmp_path):
    address = "https://example.org/a_(b)|c"
    reference = msgspec.structs.replace(published_record(), source=address)
    html, markdown = write_both(tmp_path, measured_record(), references=[reference])

    assert address in Page(html).attributes("href")
    assert "[example.org, 2026-10](https://example.org/a_%28b%29%7Cc)" in markdown


def test_hostile_names_stay_text_in_the_page(tmp_path):
    html = write_report([hostile_record()], {}, {}, tmp_path / "x.html")[0].read_text()
    page = Page(html)

    assert page.text.count(HOSTILE_TEXT) > 8
    assert [tag for tag, _ in page.elements].count("script") == 1, "the one that sorts tables"
    assert not [href for href in page.attributes("href") if href.startswith("javascript")]


def test_hostile_names_stay_text_in_markdown(tmp_path):
    markdown = write_report([hostile_record()], {}, {}, tmp_path / "x.md")[0].read_text()
    page = Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))

    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "em"}
    assert not [href for href in page.attributes("href") if "javascript" in href]
    assert page.text.count(HOSTILE_TEXT) > 8
    for table in tables_of(markdown):
        assert {len(row) for row in table} == {len(table[0])}


def test_markdown_tables_are_tables_to_a_parser(tmp_path):
    _, markdown = write_both(
        tmp_path, measured_record(), failed_record(), references=[published_record()]
    )
    page = Page(MarkdownIt("commonmark").enable("table").render(markdown))

    num_rows = sum(len(table) - 1 for table in tables_of(markdown))  # without the rule
    assert Counter(tag for tag, _ in page.elements)["tr"] == num_rows
    assert num_rows > 20


def test_pictures_take_their_colours_from_the_page(tmp_path):
    html, _ = write_both(tmp_path, measured_record())
    pictures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)

    assert len(pictures) == 3
    for picture in pictures:
        colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", picture))
        assert colours <= {
            "none", "currentColor", "var(--series-1)", "var(--series-2)", "var(--series-3)",
        }  # fmt: skip
        assert "currentColor" in colours and "var(--series-1)" in colours
        text_styles = re.findall(r'<text style="([^"]*)"', picture)
        assert text_styles and all("fill: currentColor" in style for style in text_styles)


def test_every_picture_has_a_caption_with_unit_and_source(tmp_path):
    html, _ = write_both(tmp_path, measured_record())

    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html, flags=re.DOTALL)
    assert len(captions) == html.count("<svg") == 3
    assert "in s" in captions[0] and "steps.jsonl" in captions[0]
    assert "3 of warm-up, the longest 3.400 s" in captions[0]
    assert "in GiB" in captions[1] and "storages that the tracker saw" in captions[1]
    assert "nats per token" in captions[2] and "steps.jsonl" in captions[2]


def test_memory_of_many_ranks_is_one_picture_of_lines(tmp_path):
    record = measured_record()
    metric = record.metrics["peak_rss"]
    many = msgspec.structs.replace(metric, samples=[1.0 + rank / 512 for rank in range(512)])
    record = msgspec.structs.replace(record, metrics={"peak_rss": many})

    html, markdown = write_both(tmp_path, record, rows=[])

    assert html.count("<svg") == 1
    assert "peak resident set 1.000 to 1.998 GiB over 512 ranks" in markdown


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("report.html", ["report.html"]),
        ("report.md", ["report.md"]),
        ("some/stem.v2", ["stem.v2.html", "stem.v2.md"]),
        (".", ["report.html", "report.md"]),
    ],
)
def test_output_names_one_format_or_the_stem_of_both(tmp_path, output, names):
    written = write_report([measured_record()], {}, {}, tmp_path / output)

    assert [path.name for path in written] == names
    assert all(path.is_file() for path in written)


def test_output_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="cannot write"):
        write_report([measured_record()], {}, {}, tmp_path / "file" / "report.html")


def test_no_record_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no run to report on"):
        write_report([], {}, {}, tmp_path / "report")


def test_further_parts_can_be_added(tmp_path):
    parts = (*RUN_PARTS, ("Mine", lambda run, anchor: [Text(text=f"about {run.record.run_id}")]))
    record = measured_record()

    html, markdown = write_both(tmp_path, record, parts=parts)

    assert f"about {record.run_id}" in Page(html).text
    assert "### Mine" in markdown


def test_the_same_records_give_the_same_bytes(tmp_path):
    pages = [
        write_report([measured_record()], {}, {}, tmp_path / name)[0].read_bytes()
        for name in ("1.html", "2.html")
    ]

    assert pages[0] == pages[1]


def test_reports_start_without_torch():
    code = (
        "import sys, reports.run_report; "
        "print(sorted({'torch', 'models', 'parallel', 'workloads'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"

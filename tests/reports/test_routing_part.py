"""The part on routing says what the record counted, and what `balanced` routing spares."""

import msgspec

from tests.reports.sample_records import measured_record
from tests.reports.test_run_report import tables_of, write_both

COUNTS = {
    "expert_ranks": 64,
    "max_load": 1335,
    "mean_load": 512.0,
    "max_over_mean": 2.607,
    "ranks_per_token": 2.0,
    "dropped_tokens": 0,
}


def routed(routing: str):
    record = measured_record("deepseek_v3_proxy")
    workload = msgspec.structs.replace(record.workload, routing=routing)
    environment = record.environment | {"kernels": {"attention": "tiles", "indexer": "chosen"}}
    counters = record.counters | {"routing": COUNTS}
    return msgspec.structs.replace(
        record, workload=workload, counters=counters, environment=environment
    )


def test_routing_shows_load_reach_and_drops(tmp_path):
    html, markdown = write_both(tmp_path, routed("learned"))
    (table,) = [table for table in tables_of(markdown) if table[0][0].strip() == "Routing"]
    values = {row[0].strip(): row[1].strip() for row in table[2:]}

    assert values["Tokens of an expert, mean"].startswith("512")
    assert values["Tokens of an expert, most"].startswith("1,335")
    assert values["Ranks that a token visits"].startswith("2")
    assert "of 64" in values["Ranks that a token visits"]
    assert values["Choices dropped"] == "0"
    assert "Routing of the experts" in html
    assert "neighbours" not in markdown


def test_balanced_routing_is_said_to_visit_fewer_ranks(tmp_path):
    _, markdown = write_both(tmp_path, routed("balanced"))

    assert "neighbours" in markdown


def test_a_run_without_experts_has_no_such_part(tmp_path):
    _, markdown = write_both(tmp_path, measured_record("deepseek_v3_proxy"))

    assert "Routing of the experts" not in markdown


def test_a_run_names_the_kernels_that_served_it(tmp_path):
    _, markdown = write_both(tmp_path, routed("learned"))

    assert "attention tiles, indexer chosen" in markdown

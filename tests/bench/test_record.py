"""Records: strict, finite, and whole or not there."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from bench import record as records
from bench.errors import UsageError
from bench.record import (
    FlopsSection,
    HardwareSection,
    MetricValue,
    ModelSection,
    RunRecord,
    WorkloadSection,
    encode,
    read_record,
    write_atomic,
    write_record,
)


def make_record(**changes: object) -> RunRecord:
    record = RunRecord(
        run_id="r1",
        kind="measured",
        status="ok",
        created="2026-12-01T00:00:00+00:00",
        workload=WorkloadSection(
            name="w",
            version=1,
            sequence_length=8,
            global_batch_size=2,
            tokens_per_step=16,
            routing="learned",
            data={"source": "text"},
        ),
        model=ModelSection(family="f", parameters=10, active_parameters=5, config={"dim": 4}),
        plan={"world_size": 2},
        precision={"compute": "bfloat16"},
        flops=FlopsSection(per_token={"full": 2.0, "causal": 1.0}, terms={}),
        hardware=HardwareSection(device="d", num_devices=2),
        metrics={"step_time": MetricValue(value=0.1, unit="s", samples=[0.1, 0.2])},
    )
    return msgspec.structs.replace(record, **changes)


def test_a_record_reads_as_it_was_written_from_its_folder_and_its_file(tmp_path):
    record = make_record()
    path = write_record(record, tmp_path)

    assert read_record(tmp_path) == record
    assert read_record(path) == record


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_its_place_named(tmp_path, number):
    record = make_record(metrics={"loss": MetricValue(value=1.0, unit="1", samples=[0.5, number])})

    with pytest.raises(ValueError, match=r"record\.metrics\.loss\.samples\[1\]"):
        write_record(record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomic(path, b"old")

    def crash(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")

    assert path.read_bytes() == b"old"


def test_an_unknown_field_and_another_schema_are_refused(tmp_path):
    content = json.loads(encode(make_record()))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**content, "mfu": 61.4}))

    with pytest.raises(UsageError, match="not a run record"):
        read_record(path)


def test_a_missing_record_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_record(tmp_path)


def test_the_file_is_plain_json_that_other_tools_read(tmp_path):
    path: Path = write_record(make_record(), tmp_path)

    assert json.loads(path.read_text())["metrics"]["step_time"]["samples"] == [0.1, 0.2]

"""The GPU check runs whole on a CPU, in small: rates, four runs with records, traces."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.record import read_record

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.end_to_end, pytest.mark.exhaustive]


def test_small_check_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu_check.py", "-o", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--small"], cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    rates = msgspec.json.decode((tmp_path / "rates.json").read_bytes())
    assert {rate["operator"].partition("_")[0] for rate in rates} >= {"mm", "grouped", "attention"}
    assert all(rate["seconds"] > 0 for rate in rates)
    records = [read_record(path) for path in sorted(tmp_path.glob("*/run.json"))]
    assert [record.status for record in records] == ["ok"] * 4
    assert all(record.precision["quantization"] == "none" for record in records)
    assert len(list(tmp_path.glob("*/traces/rank0.json.gz"))) == 4

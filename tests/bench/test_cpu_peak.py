"""The measured peak of a CPU: kept, and never lowered by a busy moment."""

import msgspec
import pytest

from bench import cpu_peak as module
from bench.cpu_peak import CpuPeak, cpu_peak, measure_again


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Let measurements return what the test puts into this list, one after the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks: list[CpuPeak] = []
    monkeypatch.setattr(module, "measure", lambda threads: peaks.pop(0))
    return peaks


def peak(float32: float, bfloat16: float) -> CpuPeak:
    return CpuPeak(float32=float32, bfloat16=bfloat16, how="measured")


def test_a_peak_is_measured_once_for_each_number_of_threads(measured):
    measured += [peak(1, 2), peak(3, 4)]

    assert [cpu_peak(1), cpu_peak(2), cpu_peak(1)] == [peak(1, 2), peak(3, 4), peak(1, 2)]
    assert measured == []


def test_measuring_again_keeps_the_best(measured):
    measured += [peak(2, 2), peak(1, 3)]
    measure_again(1)

    assert measure_again(1) == peak(2, 3)
    assert cpu_peak(1) == peak(2, 3)


def test_a_cache_of_another_version_is_measured_anew(measured, tmp_path):
    measured += [peak(1, 2)]
    path = module._cache_path(1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"peak": 3}')

    assert cpu_peak(1) == peak(1, 2)


def test_a_cache_that_cannot_be_written_does_not_keep_a_run_from_its_peak(
    measured, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured += [peak(1, 2)]

    assert cpu_peak(1) == peak(1, 2)


def test_a_measurement_is_of_real_products(monkeypatch):
    monkeypatch.setattr(module, "SIZES", (256,))
    monkeypatch.setattr(module, "SECONDS_PER_SIZE", 0.0)
    found = module.measure(1)

    assert found.float32 > 0
    assert found.bfloat16 > 0
    assert "256" in found.how and "threads=1" in found.how
    assert msgspec.to_builtins(found)["how"] == found.how

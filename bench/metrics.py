"""The one table of metrics, and the pure functions that compute them.

TFLOPS and MFU say nothing without a convention and a denominator, so they come in two named
conventions, ``full`` (attention over the whole window, as TorchTitan and PaLM count) and
``causal`` (half of it, as Megatron and MaxText count), and MFU in two denominators. FLOPs are
those of the model: forward and backward, no recomputation (PaLM, arXiv:2204.02311, appendix B).
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from bench.record import MetricValue, Scalar

CONVENTIONS = ("full", "causal")
GIB = 1024**3

Direction = Literal["lower", "higher", "none"]


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a metric is. ``tolerance`` is relative: the change that a comparison lets pass.

    ``kind`` is ``timed`` for what varies from run to run, ``exact`` for what should not.
    """

    name: str
    title: str
    unit: str
    direction: Direction
    kind: Literal["timed", "exact"]
    tolerance: float
    formula: str


def _timed(name: str, title: str, unit: str, direction: Direction, formula: str) -> Metric:
    return Metric(
        name=name,
        title=title,
        unit=unit,
        direction=direction,
        kind="timed",
        tolerance=0.05,
        formula=formula,
    )


def _exact(
    name: str, title: str, unit: str, direction: Direction, formula: str, tolerance: float = 0.0
) -> Metric:
    return Metric(
        name=name,
        title=title,
        unit=unit,
        direction=direction,
        kind="exact",
        tolerance=tolerance,
        formula=formula,
    )


# fmt: off
_TABLE = (
    _timed("step_time", "Step time", "s", "lower",
           "median over the measured steps of the slowest rank's time of each step"),
    _timed("tokens_per_second", "Tokens per second", "tokens/s", "higher",
           "tokens trained on per step by all ranks, without padding / step_time"),
    _timed("tokens_per_second_per_device", "Tokens per second and device", "tokens/s", "higher",
           "tokens_per_second / devices"),
    _timed("model_tflops_per_device.full", "Model TFLOPS per device, full", "TFLOPS", "higher",
           "tokens_per_second_per_device x FLOPs per token (full) / 1e12"),
    _timed("model_tflops_per_device.causal", "Model TFLOPS per device, causal", "TFLOPS", "higher",
           "tokens_per_second_per_device x FLOPs per token (causal) / 1e12"),
    _timed("mfu.full", "MFU, full", "%", "higher",
           "model_tflops_per_device.full / dense peak of the dtype of the matrix products"),
    _timed("mfu.causal", "MFU, causal", "%", "higher",
           "model_tflops_per_device.causal / dense peak of the dtype of the matrix products"),
    _timed("mfu_bf16.full", "MFU against BF16, full", "%", "higher",
           "model_tflops_per_device.full / dense BF16 peak"),
    _timed("mfu_bf16.causal", "MFU against BF16, causal", "%", "higher",
           "model_tflops_per_device.causal / dense BF16 peak"),
    _exact("peak_memory_allocated", "Peak memory allocated", "GiB", "lower",
           "CUDA caching allocator, peak of allocated bytes, maximum over ranks", 0.01),
    _exact("peak_memory_reserved", "Peak memory reserved", "GiB", "lower",
           "CUDA caching allocator, peak of reserved bytes, maximum over ranks", 0.02),
    _exact("peak_tensor_memory", "Peak tensor memory", "GiB", "lower",
           "peak of the bytes in live tensor storages that the tracker saw, maximum over ranks"),
    _exact("peak_rss", "Peak resident set", "GiB", "lower",
           "peak resident set of the process as the system counts it, maximum over ranks", 0.05),
    _timed("exposed_communication", "Exposed communication", "%", "lower",
           "share of the profiled step, which the profiler slows, in which a collective runs and "
           "no computation does, maximum over ranks"),
    _exact("bubble", "Pipeline bubble", "%", "lower",
           "share of the step in which a pipeline rank waits for another, from the schedule's "
           "actions and the durations named in the details; 0 without stages"),
    _exact("loss", "Loss", "nats/token", "lower",
           "cross-entropy of the last measured step, mean over all targets", 0.01),
    _exact("mtp_loss", "MTP loss", "nats/token", "lower",
           "cross-entropy of the multi-token prediction of the last measured step", 0.01),
    _exact("grad_norm", "Gradient norm", "1", "none",
           "global norm of the gradients before clipping at the last measured step", 0.05),
)
# fmt: on
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}


def valid(
    name: str,
    value: float,
    *,
    samples: Sequence[float] = (),
    details: Mapping[str, Scalar] | None = None,
) -> MetricValue:
    """Return the metric ``name`` with a value in its unit."""
    unit = METRICS[name].unit
    return MetricValue(value=value, unit=unit, samples=list(samples), details=dict(details or {}))


def invalid(name: str, reason: str) -> MetricValue:
    """Return the metric ``name`` without a value, and why."""
    return MetricValue(value=None, unit=METRICS[name].unit, invalid=reason)


def speed(
    step_times: Sequence[float], *, tokens_per_step: float, num_devices: int
) -> dict[str, MetricValue]:
    """Return ``step_time`` and the two token rates.

    ``step_times`` (s) has the slowest rank's time of every measured step, at least one;
    ``tokens_per_step`` counts all ranks.
    """
    step_time = statistics.median(step_times)
    spread = {"minimum": min(step_times), "maximum": max(step_times)}
    rate = tokens_per_step / step_time
    rates = [tokens_per_step / time for time in step_times]
    per_device = [rate / num_devices for rate in rates]
    return {
        "step_time": valid("step_time", step_time, samples=step_times, details=spread),
        "tokens_per_second": valid("tokens_per_second", rate, samples=rates),
        "tokens_per_second_per_device": valid(
            "tokens_per_second_per_device", rate / num_devices, samples=per_device
        ),
    }


def model_tflops(tokens_per_second_per_device: float, flops_per_token: float) -> float:
    """Return the model's TFLOPS per device."""
    return tokens_per_second_per_device * flops_per_token / 1e12


def efficiency(
    tokens_per_second_per_device: float,
    flops_per_token: Mapping[str, float],
    *,
    dtype: str | None,
    peak_tflops: Mapping[str, float],
    no_peak: str,
) -> dict[str, MetricValue]:
    """Return TFLOPS and both kinds of MFU in every convention.

    ``dtype`` does the matrix products (None if that is unknown) and ``peak_tflops`` has the
    dense peaks by dtype, keys as in ``bench.hardware``; ``no_peak`` is the reason to give where
    the wanted one is missing.
    """
    result = {}
    for convention in CONVENTIONS:
        tflops = model_tflops(tokens_per_second_per_device, flops_per_token[convention])
        name = f"model_tflops_per_device.{convention}"
        result[name] = valid(name, tflops)
        for mfu_name, denominator in (("mfu", dtype), ("mfu_bf16", "bf16")):
            name = f"{mfu_name}.{convention}"
            result[name] = mfu(name, tflops, peak_tflops, denominator, no_peak=no_peak)
    return result


def mfu(
    name: str, tflops: float, peak_tflops: Mapping[str, float], dtype: str | None, *, no_peak: str
) -> MetricValue:
    """Return ``tflops`` in % of the dense peak of ``dtype``: invalid without one or over 100 %."""
    if dtype is None:
        return invalid(name, "the dtype of the matrix products is not known")
    if dtype not in peak_tflops:
        return invalid(name, no_peak)
    peak = peak_tflops[dtype]
    percent = 100 * tflops / peak
    if percent > 100:
        return invalid(
            name,
            f"{tflops:.4g} TFLOPS is {percent:.1f} % of the {dtype} peak of {peak:.4g}: "
            "the peak, the FLOPs or the time is wrong",
        )
    return valid(name, percent, details={"peak_dtype": dtype, "peak_tflops": peak})


def matmul_dtype(precision: Mapping[str, Scalar]) -> str | None:
    """Return the dtype that does the matrix products, in the keys of ``bench.hardware``.

    None if ``precision`` does not say, as in some published results.
    """
    quantization = precision.get("quantization") or "none"
    if quantization != "none":
        return str(quantization)
    return {"bfloat16": "bf16", "float32": "fp32"}.get(str(precision.get("compute")))


def memory(name: str, bytes_by_rank: Sequence[int]) -> MetricValue:
    """Return the largest over ranks in GiB; the samples are every rank's, in order."""
    most = max(bytes_by_rank)
    details = {"minimum": min(bytes_by_rank) / GIB, "rank": bytes_by_rank.index(most)}
    samples = [rank_bytes / GIB for rank_bytes in bytes_by_rank]
    return valid(name, most / GIB, samples=samples, details=details)


def bubble(pipeline: Mapping[str, Any]) -> MetricValue:
    """Return the pipeline bubble of what a rank reports of its pipeline, and how it was found."""
    details = {key: pipeline[key] for key in ("schedule", "durations", "parts") if key in pipeline}
    details["pipeline_stages"] = pipeline["num_stages"]
    return valid("bubble", pipeline["bubble_percent"], details=details)

"""Rates of the operators that a training step is made of, measured alone on one device.

Each rate is the median of several timed calls after warm-up. The tables feed predictions; they
are upper bounds for a step, since an operator alone has the whole device and warm caches.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F

from bench.record import write_atomic
from models.ops.attention import attention
from models.ops.grouped_mm import grouped_mm

WARMUP = 3
CALLS = 10


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One operator at one shape: median seconds a call, and FLOPs or bytes of that call."""

    operator: str
    shape: str
    dtype: str
    seconds: float
    flops: int
    bytes: int

    def line(self) -> str:
        """Return the rate in TFLOPS or, for a memory-bound operator, in GB/s."""
        if self.flops:
            rate = f"{self.flops / self.seconds / 1e12:.3f} TFLOPS"
        else:
            rate = f"{self.bytes / self.seconds / 1e9:.1f} GB/s"
        return f"{self.operator} {self.shape} {self.dtype}: {rate}, {1e3 * self.seconds:.3f} ms"


def measure_rates(device: str, *, small: bool) -> list[Rate]:
    """Measure every operator on ``device``; ``small`` divides the sizes for a CPU."""
    torch.manual_seed(0)
    tokens, width, hidden = (512, 256, 512) if small else (8192, 7168, 18432)
    return [
        *(product(device, tokens, n, k) for n, k in ((hidden, width), (width, hidden))),
        *(grouped(device, tokens, experts, small=small) for experts in (8, 32)),
        *attentions(device, small=small),
        *memory_bound(device, tokens, width),
    ]


def write_rates(rates: list[Rate], path: Path) -> None:
    """Write the table as JSON."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(rates), indent=1))


def product(device: str, M: int, N: int, K: int) -> Rate:
    """Measure (M, K) x (K, N)."""
    a = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    b = torch.randn(N, K, device=device, dtype=torch.bfloat16)
    seconds = timed(lambda: F.linear(a, b), device)
    return rate("mm", f"M{M} N{N} K{K}", seconds, flops=2 * M * N * K)


def grouped(device: str, tokens: int, experts: int, *, small: bool) -> Rate:
    """Measure a grouped product with equal groups, at an expert's size of DeepSeek V3."""
    N, K = (64, 256) if small else (4096, 7168)
    x = torch.randn(tokens, K, device=device, dtype=torch.bfloat16)
    weight = torch.randn(experts, N, K, device=device, dtype=torch.bfloat16)
    step = tokens // experts
    ends = torch.arange(step, tokens + 1, step, device=device, dtype=torch.int32)
    seconds = timed(lambda: grouped_mm(x, weight, ends), device)
    return rate("grouped_mm", f"T{tokens} E{experts} N{N} K{K}", seconds, flops=2 * tokens * N * K)


def attentions(device: str, *, small: bool) -> list[Rate]:
    """Measure attention forward and backward: MLA's widths, and a sliding window of Muse Spark."""
    S = 512 if small else 4096
    heads = 4 if small else 128
    kinds = {
        "mla": (heads, heads, 192, 128, 0),
        "gqa_window": (heads, max(heads // 8, 1), 64, 64, S // 2),
    }
    rates = []
    for name, (H, Hkv, Dqk, Dv, window) in kinds.items():
        q, k, v = (
            torch.randn(1, S, h, d, device=device, dtype=torch.bfloat16, requires_grad=True)
            for h, d in ((H, Dqk), (Hkv, Dqk), (Hkv, Dv))
        )
        positions = torch.arange(S, device=device)[None]

        def forward(
            q: torch.Tensor = q,
            k: torch.Tensor = k,
            v: torch.Tensor = v,
            positions: torch.Tensor = positions,
            window: int = window,
        ) -> torch.Tensor:
            return attention(q, k, v, positions, q.shape[-1] ** -0.5, window)[0]

        gradient = torch.randn_like(forward())

        def both(
            forward: Callable[[], torch.Tensor] = forward, gradient: torch.Tensor = gradient
        ) -> None:
            forward().backward(gradient)

        flops = 2 * S * H * (Dqk + Dv) * min(S // 2, window or S)
        shape = f"S{S} H{H} Hkv{Hkv} D{Dqk}/{Dv} window{window}"
        with torch.no_grad():
            rates.append(rate(f"attention_{name}", shape, timed(forward, device), flops=flops))
        rates.append(
            rate(f"attention_{name}_forward_backward", shape, timed(both, device), flops=3 * flops)
        )
    return rates


def memory_bound(device: str, tokens: int, width: int) -> list[Rate]:
    """Measure a norm, a SwiGLU and a copy; bytes are those read and written once."""
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    gain = torch.ones(width, device=device, dtype=torch.bfloat16)
    half = width // 2
    size = x.nbytes
    shape = f"T{tokens} D{width}"
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "rms_norm": (lambda: F.rms_norm(x, (width,), gain), 2 * size),
        "swiglu": (lambda: F.silu(x[:, :half]) * x[:, half:], 3 * size // 2),
        "copy": (lambda: x.clone(), 2 * size),
    }
    return [
        rate(name, shape, timed(call, device), num_bytes=num_bytes)
        for name, (call, num_bytes) in calls.items()
    ]


def rate(operator: str, shape: str, seconds: float, *, flops: int = 0, num_bytes: int = 0) -> Rate:
    """Return the row of one measurement."""
    return Rate(
        operator=operator,
        shape=shape,
        dtype="bfloat16",
        seconds=seconds,
        flops=flops,
        bytes=num_bytes,
    )


def timed(call: Callable[[], object], device: str) -> float:
    """Return the median seconds of a call, device included."""
    times = []
    for index in range(WARMUP + CALLS):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        if index >= WARMUP:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()

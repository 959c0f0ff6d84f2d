"""The doctor: what a run needs of this machine, what is there, and what to do about the rest."""

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from bench.env import cpu_model, memory_bytes, num_cores, package_versions
from bench.hardware import find_accelerator

REQUIRED = ("torch", "torchao", "torch_remat", "numpy", "msgspec")
FOR_REPORTS = ("matplotlib", "pandas", "HolisticTraceAnalysis")
LEAST_DISK_BYTES = 2 * 10**9
INSTALL = "run make install"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at; a run cannot work while one is ``missing``."""

    name: str
    status: Literal["ok", "warning", "missing"]
    detail: str
    hint: str = ""


def examine(out: Path) -> list[Check]:
    """Return all checks; those that need torch only where it is installed."""
    checks = [_python(), *_packages(), _compiler(), _machine(), _disk(out)]
    if importlib.util.find_spec("torch") is not None:
        checks += [_gloo(), *_devices()]
        checks += [_peak(threads) for threads in sorted({1, num_cores()})]
    return checks


def can_run(checks: list[Check]) -> bool:
    """Say whether a run can work."""
    return all(check.status != "missing" for check in checks)


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    fits = sys.version_info >= (3, 11)
    return Check(
        name="python",
        status="ok" if fits else "missing",
        detail=version,
        hint="" if fits else "Python 3.11 or newer is needed",
    )


def _packages() -> list[Check]:
    versions = package_versions()
    checks = []
    for name in (*REQUIRED, *FOR_REPORTS):
        if name in versions:
            checks.append(Check(name=name, status="ok", detail=versions[name]))
        else:
            checks.append(Check(name=name, status="missing", detail="not installed", hint=INSTALL))
    return checks


def _compiler() -> Check:
    path = shutil.which("g++") or shutil.which("c++")
    return Check(
        name="g++",
        status="ok" if path else "warning",
        detail=path or "not found",
        hint="" if path else "install g++: plan.compile needs it on a CPU",
    )


def _machine() -> Check:
    detail = f"{cpu_model()}, {num_cores()} cores, {memory_bytes() / 1024**3:.1f} GiB memory"
    return Check(name="machine", status="ok", detail=detail)


def _disk(out: Path) -> Check:
    existing = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    enough = free >= LEAST_DISK_BYTES
    return Check(
        name="disk",
        status="ok" if enough else "warning",
        detail=f"{free / 1024**3:.1f} GiB free for {out}",
        hint="" if enough else "make room: traces of a run may need more",
    )


def _attempt(name: str, action: Callable[[], str], hint: str) -> Check:
    """Return what ``action`` says, or that it does not work and why."""
    try:
        return Check(name=name, status="ok", detail=action())
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        return Check(name=name, status="missing", detail=detail, hint=hint)


def _gloo() -> Check:
    def join() -> str:
        import torch.distributed as dist

        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
            )
            dist.barrier()
            dist.destroy_process_group()
        return "a process group can be made"

    return _attempt("gloo", join, "the host's own name must resolve to an address of this machine")


def _devices() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        return [Check(name="cuda", status="ok", detail="no CUDA device: runs use the CPU")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [_device(name, names.count(name)) for name in sorted(set(names))]


def _device(name: str, count: int) -> Check:
    try:
        peaks = find_accelerator(name).peak_tflops
    except LookupError as error:
        detail = f"{count} x {name}: no known peak, MFU will be invalid"
        return Check(name="cuda", status="warning", detail=detail, hint=str(error))
    known = ", ".join(f"{dtype} {peak:g}" for dtype, peak in peaks.items())
    return Check(name="cuda", status="ok", detail=f"{count} x {name}: dense TFLOPS {known}")


def _peak(threads: int) -> Check:
    def peak() -> str:
        from bench.cpu_peak import measure_again

        found = measure_again(threads)
        return (
            f"threads={threads}: float32 {found.float32:.3g}, "
            f"bfloat16 {found.bfloat16:.3g} TFLOPS, measured"
        )

    return _attempt("cpu peak", peak, "the measured matmul peak is the denominator of a CPU's MFU")

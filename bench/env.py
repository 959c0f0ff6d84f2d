"""The environment: what surrounds a run and explains its numbers, and the ranks' variables.

Only this module and the worker read the process environment.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "torchao",
    "torch_remat",
    "numpy",
    "pandas",
    "matplotlib",
    "HolisticTraceAnalysis",
    "msgspec",
    "transformers",
    "triton",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Return the record's environment section for this process and machine."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": package_versions(),
        "cpu": {
            "model": cpu_model(),
            "cores": num_cores(),
            "memory_bytes": memory_bytes(),
            "load_average": list(os.getloadavg()),
        },
        "git": git_state(REPOSITORY),
        "command": sys.orig_argv,
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that matter and are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the machine's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it, or None outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def cache_folder() -> Path:
    """Return the user's cache folder for this product; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "titanbench"


def rank_environment(threads: int) -> dict[str, str]:
    """Return the variables of a rank: this process's own, with our code and ``threads`` threads."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(REPOSITORY)] + ([inherited] if inherited else [])
    return {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }

"""Which files of a list or a folder are traces of ranks."""

from collections.abc import Iterable
from pathlib import Path

from reports.traces.problems import TraceError

_ENDINGS = (".json", ".json.gz", ".json.tmp", ".json.gz.tmp", ".pickle", ".pkl")


def trace_files(paths: Iterable[Path | str]) -> list[Path]:
    """The given files, and of each folder those that end like traces or snapshots, by name.

    Raises TraceError when a path does not exist, or when nothing is found at all.
    """
    given = [Path(path) for path in paths]
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            found += sorted(file for file in path.iterdir() if _is_trace(file))
        elif path.exists():
            found.append(path)
        else:
            raise TraceError(f"{path}: no such file or folder")
    if not found:
        names = ", ".join(str(path) for path in given) or "no path"
        raise TraceError(
            f"no trace files (*.json, *.json.gz) and no memory snapshots (*.pickle) in {names}"
        )
    return list(dict.fromkeys(found))


def _is_trace(file: Path) -> bool:
    is_summary = file.name.endswith(".summary.json")  # what a rank made of its own trace
    return file.is_file() and file.name.endswith(_ENDINGS) and not is_summary

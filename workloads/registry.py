"""The registry: a workload is a public function without parameters that returns ``Workload``.

It lives in a module ``workloads/*.py``; nothing else has to know about it. The catalogue is read
from the sources, so that listing the workloads imports none of them (and no torch).
"""

import ast
import difflib
import importlib
from pathlib import Path

import msgspec

from workloads.workload import Workload

FOLDER = Path(__file__).parent


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload: its name, the module that defines it, and the first line of its docstring."""

    name: str
    module: str
    summary: str


def catalogue(folder: Path = FOLDER) -> dict[str, Entry]:
    """Return every workload by its name, in the order of modules and definitions.

    Raises:
        ValueError: if two modules define a workload of the same name.
    """
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.py")):
        for function in ast.parse(path.read_bytes()).body:
            if not isinstance(function, ast.FunctionDef) or not _defines_workload(function):
                continue
            if function.name in entries:
                modules = f"{entries[function.name].module} and {folder.name}.{path.stem}"
                raise ValueError(f"workload {function.name} is defined twice: in {modules}")
            entries[function.name] = Entry(
                name=function.name,
                module=f"{folder.name}.{path.stem}",
                summary=(ast.get_docstring(function) or "").partition("\n")[0],
            )
    return entries


def load(name: str) -> Workload:
    """Import the module that defines workload ``name`` and return the workload.

    Raises:
        ValueError: if there is none of this name; the nearest known name is given.
    """
    entries = catalogue()
    if name not in entries:
        close = difflib.get_close_matches(name, entries, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(entries)}"
        raise ValueError(f"unknown workload {name}; {hint}")
    workload = getattr(importlib.import_module(entries[name].module), name)()
    assert isinstance(workload, Workload) and workload.name == name, f"{name} is not its own name"
    return workload


def _defines_workload(function: ast.FunctionDef) -> bool:
    arguments = function.args
    takes_none = not (
        arguments.posonlyargs
        or arguments.args
        or arguments.vararg
        or arguments.kwonlyargs
        or arguments.kwarg
    )
    returns = function.returns
    returns_workload = isinstance(returns, ast.Name) and returns.id == "Workload"
    return takes_none and returns_workload and not function.name.startswith("_")

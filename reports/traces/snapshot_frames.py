"""What the Python frames of an allocation say: where it is in the user's code, and the phase.

Frames are lists of `{"filename", "line", "name"}`, the innermost first, as torch's memory history
records them.
"""

from collections.abc import Sequence
from typing import Any

from reports.traces.phases import BACKWARD, FORWARD, OPTIMIZER, OTHER, RECOMPUTE

NO_FRAMES = "no Python frame"
_LIBRARY = ("/torch/", "/site-packages/", "/dist-packages/")
_ENGINE_CALLS = ("_engine_run_backward", "backward")
_ENGINE = "torch::autograd::Engine"

Frames = Sequence[dict[str, Any]]


def label_of(frames: Frames) -> str:
    """The innermost frame outside of libraries, as `layers/moe.py:120 forward`."""
    if not frames:
        return NO_FRAMES
    python = [frame for frame in frames if _file(frame).endswith(".py")]
    own = [frame for frame in python if not any(part in _file(frame) for part in _LIBRARY)]
    frame = next(iter([*own, *python, *frames]))
    place = "/".join(_file(frame).split("/")[-2:])
    name = str(frame.get("name", ""))
    return f"{place}:{frame.get('line', 0)} {name}" if place else name


def phase_of(frames: Frames) -> int:
    """Number into PHASES, from the innermost frame that tells.

    A module call inside the backward pass is recomputation. Without any Python frame an
    allocation is the backward pass's: its operators run in threads of the autograd engine.
    """
    if not frames:
        return BACKWARD
    in_module = False
    for frame in frames:
        file, name = _file(frame), str(frame.get("name", ""))
        if "/optim/" in file or file.endswith("optimizer.py"):
            return OPTIMIZER
        if _is_backward(file, name):
            return RECOMPUTE if in_module else BACKWARD
        in_module |= name in ("_call_impl", "_wrapped_call_impl")
    outermost = frames[-1]
    if _file(outermost).endswith("autograd/function.py"):
        return RECOMPUTE if in_module else BACKWARD
    return FORWARD if in_module else OTHER


def _is_backward(file: str, name: str) -> bool:
    is_call = name in _ENGINE_CALLS and "/torch/" in file
    return is_call or name.startswith(_ENGINE)


def _file(frame: dict[str, Any]) -> str:
    name = str(frame.get("filename", "")).replace("\\", "/")
    return "" if name in ("none", "??") else name

"""Names that mean the same on another device, version or run, from the names in the trace."""

import re

_SIGNATURE = re.compile(r"\((?!anonymous namespace\)).*$", re.DOTALL)
_FUNCTOR = re.compile(r"\b(\w*(?:Functor|Ops?|_kernel_cuda|_kernel_impl))\b")
_GENERIC = re.compile(
    r"(elementwise|reduce|multi_tensor_apply|index|scatter|gather)\w*kernel", re.I
)
_COLLECTIVE = re.compile(
    r"(?:nccl|rccl|oneccl)\w*?_"
    r"(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AlltoAll|AllToAll)",
    re.I,
)
_TILES = re.compile(
    r"_(?:\d+x\d+\w*|tilesize.*|t\d+x\d+x\d+.*|MT\d+.*|bx\d.*|bt\d.*|off\d+|stages?_?\d+.*|align\d+.*)",
    re.I,
)
_PATTERNS = (
    (re.compile(r"^ProfilerStep#\d+$"), "ProfilerStep"),
    (re.compile(r"^(nn\.Module: .*?)_\d+$"), r"\1"),
    (re.compile(r"^(triton_\w*?)(?:_\d+)?(?:_kernel)?$"), r"\1"),
    (re.compile(r"^(Forward|Backward) \d+$"), r"\1"),
    (re.compile(r"^(Cijk_\w+?_\w+?_\w+?)_.*$"), r"\1"),
    (re.compile(r"^(nvjet)_.*$"), r"\1"),
    (re.compile(r"^_ZN\w*?(kernel_[a-z0-9_]+)I\w*$"), r"\1"),
    (re.compile(r"^(?:typename )?std::enable_if<.*?>::type ", re.DOTALL), ""),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "0x"),
)


def normalise(name: str) -> str:
    """One name for one piece of work: no return type, arguments, template values, tile sizes.

    What distinguishes generic kernels (the functor of an elementwise kernel) is kept in brackets.
    """
    collective = _COLLECTIVE.search(name)
    if collective:
        return f"ccl::{collective.group(1).lower()}"
    for pattern, replacement in _PATTERNS:
        name = pattern.sub(replacement, name)
    if "::" not in name and "<" not in name and "(" not in name:
        return _TILES.sub("", name)
    if name.startswith(("aten::", "autograd::", "c10d::", "nn.Module", "torch/", "<")):
        return name
    return _kernel_base(name)


def _kernel_base(name: str) -> str:
    base = _without_templates(name.removeprefix("void "))
    base = _SIGNATURE.sub("", base).replace("(anonymous namespace)::", "").strip() or name
    base = _TILES.sub("", base)
    if _GENERIC.search(base):
        functor = _FUNCTOR.search(name, name.find("<") + 1 if "<" in name else len(name))
        if functor and functor.group(1) not in base:
            return f"{base}[{functor.group(1)}]"
    return base


def _without_templates(name: str) -> str:
    kept, depth = [], 0
    for character in name:
        if character == "<":
            depth += 1
        elif character == ">":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(character)
    return "".join(kept)

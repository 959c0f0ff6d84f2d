"""What rematerialization keeps and recomputes, by region, for one block of each kind.

Prints a Markdown table for both proxies, from real passes: see bench.remat_table.
"""

import torch
from msgspec.structs import replace

from bench.remat_table import BlockTable, tabulate
from perf.paired import table
from workloads.registry import load

MIB = 2**20


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    for name in ("deepseek_v3_proxy", "muse_spark_proxy"):
        workload = load(name)
        blocks = tabulate(replace(workload, plan=workload.plan.resolve(1)))
        print(f"## Rematerialization of a block: {name}\n")
        header = ["blocks", "kept beside the input", "MiB", "MFLOPs recomputed", "FLOPs per byte"]
        rows = [row for names, block in grouped(blocks).items() for row in block_rows(names, block)]
        print(table(header, rows) + "\n")


def grouped(blocks: dict[str, BlockTable]) -> dict[str, BlockTable]:
    """Return the distinct tables, by the names of the blocks that share one."""
    names: dict[str, list[str]] = {}
    for name, block in blocks.items():
        names.setdefault(str(block), []).append(name)
    return {", ".join(same): blocks[same[0]] for same in names.values()}


def block_rows(names: str, block: BlockTable) -> list[list[str]]:
    """Return the rows of a block: FLOPs per byte say what is cheapest to recompute."""
    rows = [[names, "nothing (full)", _mib(block.full.kept_bytes), _m(block.recomputed_flops), ""]]
    for region, (kept, spared) in block.regions.items():
        left = _m(block.recomputed_flops - spared)
        rows.append(["", region, f"+{_mib(kept)}", left, f"{spared / kept:.0f}" if kept else ""])
    return [*rows, ["", "everything (none)", _mib(block.none.kept_bytes), "0.0", ""]]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.3f}"


def _m(flops: int) -> str:
    return f"{flops / 1e6:.1f}"


if __name__ == "__main__":
    main()

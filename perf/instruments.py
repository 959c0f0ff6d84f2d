"""What the instruments cost: measured steps with them on against bare steps, interleaved.

One rank trains the DeepSeek V3 proxy; every other step goes through the whole instrumented path
(timer, waits, reading the losses, the row in steps.jsonl). Prints a Markdown table.
"""

import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace

from bench.rank_report import RANKS_FOLDER
from bench.spec import RunSpec
from bench.trainer import Trainer
from bench.worker import Session
from perf.paired import interleave, ratio, table
from workloads.registry import load

ROUNDS = 40


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    (folder / RANKS_FOLDER).mkdir()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    rows = []
    for name in ("deepseek_v3_proxy", "muse_spark_proxy"):
        base = load(name)
        trainer = Trainer(replace(base, plan=base.plan.resolve(1)), torch.device("cpu"))
        session = Session(RunSpec(workload=name), trainer, folder, rank=0)
        times = interleave(
            {
                "instruments on": lambda session=session: session.run_step("measured"),
                "instruments off": lambda trainer=trainer: trainer.step(0),
            },
            rounds=ROUNDS,
        )
        on, off = (statistics.median(times[key]) for key in ("instruments on", "instruments off"))
        cost = 100 * (ratio(times, "instruments on", "instruments off") - 1)
        rows.append([name, f"{1e3 * on:.1f}", f"{1e3 * off:.1f}", f"{cost:+.2f} %"])
    print("## Cost of the instruments in a measured step\n")
    print(table(["workload", "on (ms)", "off (ms)", "median of paired ratios"], rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A rank without torch that does what the variable FAKE_RANKS says, action by action.

FAKE_RANKS is a JSON object: by rank, words to do in order. Each rank notes its process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.rank_report import RANKS_FOLDER, StepRow, append_step, write_error


def step(folder: Path, rank: int) -> None:
    """Hand in one step."""
    row = StepRow(
        step=0,
        phase="measured",
        step_time=0.5,
        loss=2.0,
        mtp_loss=None,
        grad_norm=1.0,
        tokens=8,
        padding=0,
        targets=8,
    )
    append_step(folder, rank, row)


def fail(folder: Path, rank: int, message: str) -> None:
    """Note an error as the worker does."""
    write_error(folder, rank, RuntimeError(message))


def hang() -> None:
    """Stay until ended."""
    time.sleep(600)


def act(folder: Path, rank: int, word: str) -> None:
    """Do one thing."""
    name, _, argument = word.partition(":")
    actions = {
        "step": lambda: step(folder, rank),
        "sleep": lambda: time.sleep(float(argument)),
        "hang": hang,
        "fail": lambda: fail(folder, rank, argument),
        "exit": lambda: sys.exit(int(argument)),
        "say": lambda: print(argument, flush=True),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stubborn": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        "child": lambda: note(folder, "child", subprocess.Popen(["sleep", "600"]).pid),
    }
    actions[name]()


def note(folder: Path, name: str, pid: int) -> None:
    """Write a process id where the test finds it."""
    (folder / RANKS_FOLDER / f"{name}.pid").write_text(str(pid))


def main() -> None:
    """Run as a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args()
    note(options.run_folder, f"rank{options.rank}", os.getpid())
    for word in json.loads(os.environ["FAKE_RANKS"])[str(options.rank)]:
        act(options.run_folder, options.rank, word)


if __name__ == "__main__":
    main()

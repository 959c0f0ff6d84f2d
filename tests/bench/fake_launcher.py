"""A launcher as a process of its own: FOLDER RANKS; it prints the outcome as JSON."""

import sys
from pathlib import Path

import msgspec

from bench.launch.local import launch

if __name__ == "__main__":
    outcome = launch(
        Path(sys.argv[1]),
        ranks=int(sys.argv[2]),
        threads=1,
        timeout=60,
        worker="tests.bench.fake_worker",
    )
    print(msgspec.json.encode(outcome).decode())

"""TitanBench's entry point: ``python run_bench.py VERB ...``."""

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())

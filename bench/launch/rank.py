"""The first thing that a rank runs: it ties the rank's life to the launcher's, then runs it.

``python -m bench.launch.rank LAUNCHER_PID MODULE ARGUMENT...``. A launcher that is killed hard
cannot end its ranks, so the kernel does it (on Linux). A rank that is told to end first writes
where it was to its log: that is how a hang is found.
"""

import ctypes
import faulthandler
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the module that the command line names as ``__main__``."""
    launcher = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit(f"launcher {launcher} has ended before this rank began")
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

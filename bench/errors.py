"""What can go wrong, as exceptions that say what, where and what to do, and the exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The process exit codes of every verb."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    FAILED = 3
    NOT_COMPARABLE = 4


class BenchError(Exception):
    """An error whose message is one line for the user: what happened and what to do about it."""

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what}; {hint}" if hint else what)


class UsageError(BenchError):
    """The command line, a specification or a configuration is wrong: nothing was started."""

    exit_code = ExitCode.USAGE


class RunFailedError(BenchError):
    """A run was started and failed, or its result is invalid."""

    exit_code = ExitCode.FAILED


class NotComparableError(BenchError):
    """There is nothing to compare, or the two sides do not describe the same thing."""

    exit_code = ExitCode.NOT_COMPARABLE

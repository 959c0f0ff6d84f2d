"""The command line: ``run_bench.py VERB ...``; each verb is a function that returns an exit code.

Everything heavy is imported by the verb that needs it; torch is never imported here.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec

from bench.errors import BenchError, ExitCode, UsageError
from bench.spec import Device, RunSpec, read_suite

SUITE_SUFFIXES = (".yaml", ".yml")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(message, hint=f"see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; an error is one line on stderr."""
    try:
        options = build_parser().parse_args(arguments)
        return int(options.verb(options))
    except BenchError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        return _fail(str(error), ExitCode.FAILED)
    except ModuleNotFoundError as error:
        return _fail(f"{error}; make install installs what is needed", ExitCode.FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.FAILED)


def _fail(message: str, code: ExitCode) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return int(code)


def build_parser() -> Parser:
    """Return the tree of verbs and their options."""
    parser = Parser(prog="run_bench.py", description="Benchmark LLM training on PyTorch.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_list(verbs)
    _add_run(verbs)
    _add_report(verbs)
    _add_analyze(verbs)
    _add_compare(verbs)
    _add_doctor(verbs)
    return parser


def _add_verb(verbs: Any, name: str, verb: Any, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=summary)
    parser.set_defaults(verb=verb)
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    return parser


def _add_list(verbs: Any) -> None:
    _add_verb(verbs, "list", list_verb, "name the workloads")


def _add_run(verbs: Any) -> None:
    parser = _add_verb(verbs, "run", run_verb, "measure workloads on this machine")
    add = parser.add_argument
    add("targets", nargs="+", metavar="WORKLOAD|SUITE.yaml", help="a workload or a suite file")
    add("--ranks", type=int, help="processes, one per device (default 1)")
    add("--set", action="append", metavar="K=V", help="override, as in --set plan.ep=2")
    add("--steps", type=int, help="measured steps (default 10)")
    add("--warmup", type=int, dest="warmup_steps", help="steps before them (default 3)")
    add("--device", choices=get_args(Device), help="default auto: cuda where there is one")
    add("--timeout", type=float, metavar="S", help="end a run after S seconds (default 1800)")
    add("--threads", type=int, help="threads per rank (default: cores divided by ranks)")
    no_profile = "no step under the profiler, no traces"
    add("--no-profile", dest="profile", action="store_false", default=None, help=no_profile)
    no_counters = "no step under the exact counters"
    add(
        "--no-instruments", dest="instruments", action="store_false", default=None, help=no_counters
    )
    add("-o", "--output", type=Path, default=Path("runs"), help="folder of runs (default runs)")


def _add_report(verbs: Any) -> None:
    parser = _add_verb(verbs, "report", report_verb, "write a report of runs")
    add = parser.add_argument
    add(
        "runs", nargs="+", type=Path, metavar="RUN_OR_FOLDER", help="run folders or folders of them"
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("report"),
        help="report.html, report.md, or without suffix for both",
    )


def _add_analyze(verbs: Any) -> None:
    parser = _add_verb(verbs, "analyze", analyze_verb, "say where the time of traces goes")
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE_DIR|FILE", help="Kineto traces, one a rank")
    add("-o", "--output", type=Path, help="report.html, report.md, or without suffix for both")
    add("--hta", action="store_true", help="add the analyses of HolisticTraceAnalysis")


def _add_compare(verbs: Any) -> None:
    parser = _add_verb(verbs, "compare", compare_verb, "say what differs between runs or traces")
    add = parser.add_argument
    add("sides", nargs="+", type=Path, metavar="RUN|TRACES", help="two or more; the first is A")
    add("-o", "--output", type=Path, help="report.html, report.md, or without suffix for both")


def _add_doctor(verbs: Any) -> None:
    _add_verb(verbs, "doctor", doctor_verb, "say what this machine can run and what it lacks")


def list_verb(options: argparse.Namespace) -> int:
    """Print every workload's name and summary."""
    from workloads.registry import catalogue

    entries = list(catalogue().values())
    if options.json:
        _print_json(entries)
    else:
        width = max(len(entry.name) for entry in entries)
        print("\n".join(f"{entry.name:{width}}  {entry.summary}" for entry in entries))
    return ExitCode.OK


def run_verb(options: argparse.Namespace) -> int:
    """Run every target one after the other and write their report."""
    from bench import runner
    from bench.progress import RunProgress
    from bench.summary import Finished, failure_line

    specs = runner.check(read_specs(options), options.output)
    finished: list[Finished] = []
    for spec in specs:
        with RunProgress(spec) as progress:
            record, folder = runner.run(spec, options.output, on_step=progress.on_step)
        finished.append((record, folder))
        if record.status != "ok":
            _fail(failure_line(record, folder), ExitCode.FAILED)
        if record.status == "interrupted":
            break
    reports = _write_reports([folder for _, folder in finished], options.output)
    _print_runs(finished, reports, as_json=options.json)
    return ExitCode.OK if all(record.status == "ok" for record, _ in finished) else ExitCode.FAILED


def read_specs(options: argparse.Namespace) -> list[RunSpec]:
    """Return the runs that the targets name; an option given is every run's.

    Raises:
        UsageError: if a suite cannot be read or a value is out of range.
    """
    names = set(RunSpec.__struct_fields__) - {"workload", "set"}
    given = {name: value for name, value in vars(options).items() if name in names}
    given = {name: value for name, value in given.items() if value is not None}
    specs: list[RunSpec] = []
    for target in options.targets:
        is_suite = target.endswith(SUITE_SUFFIXES)
        specs += read_suite(Path(target)).runs if is_suite else [RunSpec(workload=target)]
    try:
        return [
            msgspec.structs.replace(spec, **given, set=[*spec.set, *(options.set or [])])
            for spec in specs
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error


def _write_reports(paths: list[Path], output: Path) -> list[Path]:
    """Write the report of the runs at ``paths`` and return its files."""
    from bench.published import read_published
    from reports.load import find_records
    from reports.run_report import write_report

    found = find_records(paths)
    return write_report(
        [record for _, record in found],
        {record.workload.name: read_published(folder) for folder, record in found},
        {record.run_id: folder for folder, record in found},
        output,
    )


def _print_runs(finished: Any, reports: list[Path], *, as_json: bool) -> None:
    from bench.summary import summarize, summary_table

    files = [str(path) for path in reports]
    if as_json:
        _print_json({"runs": [summarize(run) for run in finished], "reports": files})
    else:
        print(summary_table(finished))
        print("\n".join(f"report: {file}" for file in files))


def report_verb(options: argparse.Namespace) -> int:
    """Write a report of runs that are on disk."""
    files = [str(path) for path in _write_reports(options.runs, options.output)]
    if options.json:
        _print_json({"reports": files})
    else:
        print("\n".join(f"report: {file}" for file in files))
    return ExitCode.OK


def analyze_verb(options: argparse.Namespace) -> int:
    """Analyse traces; print the answer or write its report."""
    from bench.progress import file_progress
    from reports.run_report import write_rendered
    from reports.run_traces import export_hta_tables, read_traces, read_traces_with_hta
    from reports.trace_report import analysis_json, analysis_report

    hta = None
    if options.hta:
        traces, hta = read_traces_with_hta(options.traces, progress=file_progress)
    else:
        traces = read_traces(options.traces, progress=file_progress)
    sources = [str(path) for path in options.traces]
    files = []
    if options.output:
        files = write_rendered(analysis_report(traces, sources, hta), options.output)
        files += export_hta_tables(hta, options.output)
    document = analysis_json(traces, hta)
    _print_answer(document, lambda: analysis_report(traces, sources, hta), files, options)
    return ExitCode.OK


def compare_verb(options: argparse.Namespace) -> int:
    """Compare runs or traces with the first of them; exit 4 if nothing is comparable."""
    from bench.progress import file_progress
    from reports.compare_report import compare_report, comparison_json, write_compare_report
    from reports.comparison import compare_all
    from reports.sides import read_sides

    if len(options.sides) < 2:
        raise UsageError("there is nothing to compare with", hint="give two or more runs or traces")
    sides = read_sides(options.sides, progress=file_progress)
    comparisons, reasons = compare_all(sides)
    found = (sides, comparisons, reasons)
    files = write_compare_report(*found, options.output) if options.output else []
    _print_answer(comparison_json(*found), lambda: compare_report(*found), files, options)
    return ExitCode.OK


def _print_answer(document: bytes, report: Any, files: list[Path], options: Any) -> None:
    """Print JSON if asked, the files if some were written, else the report as Markdown."""
    from reports.markdown import render_markdown

    if options.json:
        print(document.decode())
    elif files:
        print(report().subtitle)
        print("\n".join(f"report: {file}" for file in files))
    else:
        print(render_markdown(report()), end="")


def doctor_verb(options: argparse.Namespace) -> int:
    """Print what was found; exit 3 if a run could not work."""
    from bench.doctor import can_run, examine

    checks = examine(Path("runs"))
    if options.json:
        _print_json({"can_run": can_run(checks), "checks": checks})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            hint = f" -> {check.hint}" if check.hint else ""
            print(f"{check.status:7}  {check.name:{width}}  {check.detail}{hint}")
    return ExitCode.OK if can_run(checks) else ExitCode.FAILED


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())

"""The command `dist-sparse`: each subcommand parses, calls one function of the package and prints the result.

A subcommand is a function that adds its parser and sets `run`, which takes the parsed options and returns the exit
status. What it calls is imported when it runs, and torch with it: `--help` and `doctor` need no torch. What a user can
fix (a ValueError, a file that can't be read or written) is one line and status 1; other exceptions keep their
traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from dist_sparse.cli.arguments import (
    EntryError,
    model_and_batches,
    model_and_evaluate,
    parse_block,
    parse_budget,
    parse_count,
    parse_level,
    parse_share,
)
from dist_sparse.text import printable

if TYPE_CHECKING:
    from dist_sparse.planning.dry_run import DryRun
    from dist_sparse.planning.plan import Plan

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["main"]

_STATUS = "exit status: 0 success, 1 failure (one line says why), 2 invalid command line"

_DESCRIPTION = "Sparsifies the embedding tables of TorchRec models while they train."

_EXAMPLES = f"""examples:
  dist-sparse doctor                                  can this machine train?
  dist-sparse launch --help                           start a training script on several processes
  dist-sparse inspect runs/latest                     the tables and the config of a run
  dist-sparse report runs/latest                      charts of a run, as one HTML file
  dist-sparse plan model.py:trained --budget 10%      what can a budget of bytes hold of this model?
  dist-sparse frontier model.py:measured              what is this model worth at a few sizes?
  dist-sparse serve-check served/                     is this artifact whole, and what does it take?

{_STATUS}
"""

_INSPECT = f"""examples:
  dist-sparse inspect runs/latest
  dist-sparse inspect saved/step-00001000

RUN is a folder that RunLog wrote; runs/latest is the run in runs that was started last. A run that crashed or still
runs is shown as far as it went. A folder of Checkpoints is listed; of one step, every byte is
verified and each tensor is shown.

{_STATUS}
"""

_REPORT = f"""examples:
  dist-sparse report runs/latest
  dist-sparse report runs/latest --open
  dist-sparse report runs/a runs/b runs/c --out comparison.html --no-png

RUN is a folder that RunLog wrote; runs/latest is the run in runs that was started last. The first RUN is compared with
the others; one alone with the runs in folders inside its own. The page needs no network. A run that crashed or still
runs is shown as far as it went. PNGs need matplotlib.

{_STATUS}
"""

_COMPARISON = "comparison.html"

_PLAN = f"""examples:
  dist-sparse plan my.package:model --budget 10% --rotate user,item
  dist-sparse plan examples/dlrm/planned.py:trained_model --budget 512KiB --cold user_x_genre
  dist-sparse plan examples/dlrm/planned.py:measured --budget 10% --measure
  dist-sparse plan examples/dlrm/planned.py:trained_model --level 0.8 --block 1x4 --exclude 'small_*'

FUNCTION takes no arguments and returns (model, batches); batches may be None. The model is not changed. --budget shows
the dtypes, widths and rows that fit, what they take, and which to use; --rotate and --cold say what may be done to
which tables. --level shows which weights a sparsity level would prune, and how many lookups in the batches would read
them; --block, --norm and --batches belong to it. --measure tries what fits a budget on the trained model, for which
FUNCTION returns (model, evaluate), as for `dist-sparse frontier`; --metric, --less, --tolerance and --out belong to it.

{_STATUS}
"""

_FRONTIER = f"""examples:
  dist-sparse frontier examples/dlrm/planned.py:measured --out runs/frontier
  dist-sparse frontier my.package:measured --rotate user,item --budget 10% --budget 5%

FUNCTION takes no arguments and returns (model, evaluate); evaluate(model) returns metrics by name, on data that the
model was not trained on. If it has the parameters columns and rows, it is called again with fractions of them, and
returns a model trained with smaller tables, and one with hashed ids, to compare with. A run that is interrupted goes on
where it was if --out is the same. Bytes are those that would be served, indexes, scales and masks counted.

{_STATUS}
"""

_SERVE_CHECK = f"""example:
  dist-sparse serve-check served/

ARTIFACT is a folder that dist_sparse.export wrote. Every byte is verified by checksums; bitmaps, grids and weights are
checked to be valid, and that every table was compared with its model. Needs torch and safetensors, no model.

{_STATUS}
"""

_DOCTOR = """examples:
  dist-sparse doctor
  dist-sparse doctor --json

Checks Python, torch, TorchRec and FBGEMM, communication backends, addresses and environment variables, and prints what
is wrong and the command that fixes it. Changes nothing; takes as long as TorchRec needs to load.

exit status: 0 this machine can train, 1 something needed is missing or wrong, 2 invalid command line
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``words`` (``sys.argv[1:]`` by default) name; return the exit status.

    0 is success, 1 a failure that one line on stderr explains, 2 an invalid command line, 141 a closed pipe; `launch`
    has others.
    """
    try:
        return _main(words)
    except SystemExit:  # of argparse, which may have printed a help
        status = _flush()
        if status:
            return status
        raise


def _main(words: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="dist-sparse",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version of the package and exit")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for add in (_add_launch, _add_inspect, _add_report, _add_plan, _add_frontier, _add_serve_check, _add_doctor):
        add(commands)
    options = parser.parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version  # slow to load

        try:
            text = f"dist-sparse {version('dist_sparse')}"
        except PackageNotFoundError:
            text = "dist-sparse, not installed: its version is in pyproject.toml"
        parser.exit(_print(text))


def _add_launch(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.launch.cli import main as launch

        return launch(options.words, prog="dist-sparse launch")

    # The launcher parses for itself, `--help` included: with this prefix no word is an option here.
    parser = commands.add_parser(
        "launch",
        help="starts a training script on several processes, or writes files for Slurm and Kubeflow",
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def _add_inspect(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.checkpoint.folders import holds_steps
        from dist_sparse.checkpoint.inspection import summary
        from dist_sparse.report.run import read_run
        from dist_sparse.report.summary import inspect_json, inspect_text

        try:
            if holds_steps(options.folder) and not options.json:
                return _print(summary(options.folder))
            run = read_run(options.folder)
            text = json.dumps(inspect_json(run), indent=2, allow_nan=False) if options.json else inspect_text(run)
        except (RecursionError, MemoryError) as error:
            return _failed("inspect", _too_much(options.folder, error))
        except (ValueError, OSError) as error:
            return _failed("inspect", error)
        return _print(text)

    parser = _subcommand(commands, "inspect", "shows the tables and the config of a run, or a checkpoint", _INSPECT)
    parser.add_argument("folder", metavar="RUN", help="the folder of the run, or of checkpoints")
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_report(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        import webbrowser

        from dist_sparse.report.page import write_report
        from dist_sparse.report.run import read_runs
        from dist_sparse.report.summary import numbers, summary

        try:
            run = read_runs(options.folders)
            out = options.out or (None if len(options.folders) == 1 else run.folder / _COMPARISON)
            written = write_report(run, out, pngs=not options.no_png)
            text = json.dumps(numbers(run), indent=2, allow_nan=False) if options.json else summary(run, written)
        except (RecursionError, MemoryError) as error:
            return _failed("report", _too_much(", ".join(options.folders), error))
        except (ValueError, OSError, ImportError) as error:
            return _failed("report", error)
        shown = _print(text)
        if options.open and not webbrowser.open(written.resolve().as_uri()):
            return _failed("report", f"no browser was found to open {written.resolve().as_uri()}")
        return shown

    parser = _subcommand(commands, "report", "writes charts of runs as one HTML file, and PNGs beside it", _REPORT)
    parser.add_argument("folders", nargs="+", metavar="RUN", help="the folder of a run")
    default = f"RUN/report.html, of several runs {_COMPARISON} in the first"
    parser.add_argument("--out", metavar="FILE", help=f"the HTML file; default: {default}")
    parser.add_argument("--open", action="store_true", help="opens the page in the browser")
    parser.add_argument("--no-png", action="store_true", help="no PNGs; then matplotlib is not needed")
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_plan(commands: Commands) -> None:
    def measure(options: argparse.Namespace) -> int:
        from dist_sparse.planning.frontier import measure_plan
        from dist_sparse.planning.plan import plan

        if options.budget is None:
            return _failed("plan", "--measure is for --budget.")
        try:
            model, evaluate, _ = model_and_evaluate(options.function)
            how = {"rotate": options.rotate, "cold": options.cold}
            answer = plan(model, options.budget, **how, include=options.include, exclude=options.exclude)
            found = measure_plan(model, evaluate, answer, **_measuring(options))
        except (ValueError, OSError) as error:
            return _failed("plan", error)
        if options.json:
            return _print(json.dumps({"plan": answer.to_json(), "measured": found.to_json()}, indent=2))
        return _print(f"{answer}\n\n{found}")

    def run(options: argparse.Namespace) -> int:
        if options.measure:
            return measure(options)
        try:
            model, batches = model_and_batches(options.function)
        except EntryError as error:
            return _failed("plan", error)
        if batches is not None and not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            rule = f"returned {type(batches).__name__} for batches; must be iterable, or None"
            return _failed("plan", f"Invalid entry={options.function!r}: {rule}.")
        chosen = {"include": options.include, "exclude": options.exclude}
        answer: Plan | DryRun
        try:
            if options.budget is not None:
                from dist_sparse.planning.plan import plan

                answer = plan(model, options.budget, rotate=options.rotate, cold=options.cold, **chosen)
            else:
                from dist_sparse.planning.dry_run import dry_run

                some = None if batches is None else islice(batches, options.batches)
                how = {"block": options.block, "norm": options.norm}
                answer = dry_run(model, level=options.level, batches=some, **how, **chosen)
        except ValueError as error:
            return _failed("plan", error)
        return _print(json.dumps(answer.to_json(), indent=2) if options.json else str(answer))

    parser = _subcommand(commands, "plan", "shows what a budget of bytes can hold, or what a level would prune", _PLAN)
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function or file.py:function")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--budget", type=parse_budget, metavar="SIZE", help="bytes to serve, such as 10%% or 512MiB")
    target.add_argument("--level", type=parse_level, help="sparsity level of every table, 0 to 1")
    parser.add_argument(
        "--measure", action="store_true", help="tries what fits the budget; FUNCTION returns (model, evaluate)"
    )
    parser.add_argument(
        "--rotate",
        type=lambda names: names.split(","),
        action="append",
        metavar="A,B",
        help="tables that only dot products between them read; may be repeated",
    )
    parser.add_argument("--cold", action="append", metavar="GLOB", help="tables of cold crossed features")
    parser.add_argument("--block", type=parse_block, default=(1, "ROW"), help="such as 1x4, row or col; default: row")
    parser.add_argument("--norm", type=str.upper, choices=("L1", "L2"), default="L2", help="default: L2")
    parser.add_argument("--batches", type=parse_count, metavar="N", help="reads the first N; default: all")
    parser.add_argument("--include", action="append", metavar="GLOB", help="tables, all by default; may be repeated")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="tables to leave out; may be repeated")
    _add_measuring(parser)
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_frontier(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.planning.frontier import BUDGETS, frontier

        try:
            found = frontier(
                *model_and_evaluate(options.function),
                budgets=options.budget or BUDGETS,
                methods=options.method,
                dtypes=options.dtype or ("fp32", "int8", "int4"),
                rotate=options.rotate or "table",
                protect=options.protect,
                **_measuring(options),
            )
        except (ValueError, OSError) as error:
            return _failed("frontier", error)
        return _print(json.dumps(found.to_json(), indent=2) if options.json else str(found))

    parser = _subcommand(commands, "frontier", "measures what a trained model is worth at a few sizes", _FRONTIER)
    add = parser.add_argument
    add("function", metavar="FUNCTION", help="package.module:function or file.py:function")
    add(
        "--budget",
        type=parse_share,
        action="append",
        metavar="SHARE",
        help="of the bytes; default: 50%%, 20%%, 10%%, 5%%",
    )
    add(
        "--method",
        action="append",
        help="bits, untouched, small, columns, rotated, rows, blocks, elements, mix or hashed; default: all",
    )
    add(
        "--rotate",
        type=lambda names: names.split(","),
        action="append",
        metavar="A,B",
        help="tables that only dot products between them read; default: each by itself, turned back",
    )
    add("--dtype", action="append", help="fp32, fp16, int8 or int4, to store what is left in; default: all but fp16")
    add("--protect", action="append", metavar="GLOB", help="tables that keep all rows")
    _add_measuring(parser)
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_serve_check(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.serving.check import check_artifact
        from dist_sparse.serving.summary import summary

        try:
            manifest = check_artifact(options.folder).manifest
        except (ValueError, OSError, ImportError) as error:
            return _failed("serve-check", f"refused: {error}")
        return _print(manifest.to_text().rstrip() if options.json else f"{summary(manifest)}\nok")

    parser = _subcommand(commands, "serve-check", "verifies an artifact, and shows what its tables take", _SERVE_CHECK)
    parser.add_argument("folder", metavar="ARTIFACT", help="the folder that export wrote")
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_doctor(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.cli.doctor import examine

        found = examine()
        status = _print(json.dumps(found.to_json(), indent=2) if options.json else str(found))
        return status or (0 if found.can_train else 1)

    parser = _subcommand(commands, "doctor", "checks whether this machine can train, and prints fixes", _DOCTOR)
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--metric", help="by which they are compared; default: the first that evaluate returns")
    add("--less", action="append", metavar="METRIC", help="a metric of which less is better; default: ne, loss")
    add("--tolerance", type=float, metavar="X", help="smaller differences do not count; default: 0.002")
    add("--out", metavar="DIR", help="writes the table, a plot and trials.jsonl there, and goes on from the latter")


def _measuring(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of _add_measuring that were given."""
    given = {"metric": options.metric, "lower_is_better": options.less, "tolerance": options.tolerance}
    return {name: value for name, value in {**given, "out": options.out}.items() if value is not None}


def _subcommand(commands: Commands, name: str, purpose: str, epilog: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="prints JSON, sizes in bytes")


def _too_much(folder: str, error: BaseException) -> str:
    why = "its JSON is nested too deeply" if isinstance(error, RecursionError) else "there is not enough memory"
    return f"{folder} holds no run that can be read: {why}."


def _failed(command: str, why: Exception | str) -> int:
    lines = str(why).split("\n")  # which may hold names of a model or a log
    print(f"dist-sparse {command}: " + "\n".join(map(printable, lines)), file=sys.stderr)
    return 1


def _print(text: str) -> int:
    """Print, escaping what the encoding can't represent; return the exit status."""
    if sys.stdout is None:
        print("dist-sparse: can't write: standard output is closed", file=sys.stderr)
        return 1
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    except OSError as error:
        return _unwritten(error)
    return _flush()


def _flush() -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _unwritten(error)
    return 0


def _unwritten(error: OSError) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try again when it exits
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as other programs do when their reader closes the pipe
    print(f"dist-sparse: can't write to standard output: {error.strerror}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

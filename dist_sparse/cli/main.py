"""What does the command `dist-sparse` do? It parses, calls one function of the package and prints what that returns.

A subcommand is a function that adds its parser and sets `run`, which takes the parsed options and returns the exit
status. What it calls is imported when it runs, and torch with it: `--help` and `doctor` do without. What a user can put
right (a ValueError, a file that can't be read or written) is one line and status 1; other exceptions keep their
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

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["main"]

_STATUS = "exit status: 0 success, 1 failure (one line says why), 2 a wrong command line"

_DESCRIPTION = "Sparsifies the embedding tables of TorchRec models while they train."

_EXAMPLES = f"""examples:
  dist-sparse doctor                                  can this machine train?
  dist-sparse launch --help                           start a training script on several processes
  dist-sparse inspect runs/latest                     the tables and the config of a run
  dist-sparse report runs/latest                      charts of a run, as one HTML file
  dist-sparse plan model.py:trained --keep 512MiB     what would have to go from this model?

{_STATUS}
"""

_INSPECT = f"""example:
  dist-sparse inspect runs/latest

RUN is a folder that RunLog wrote. A run that has crashed or is still going is shown as far as it went.

{_STATUS}
"""

_REPORT = f"""examples:
  dist-sparse report runs/latest
  dist-sparse report runs/latest --out report.html --no-png

RUN is a folder that RunLog wrote; runs in folders inside it are what it is compared with. The page needs no network. A
run that has crashed or is still going is shown as far as it went. PNGs need matplotlib.

{_STATUS}
"""

_PLAN = f"""examples:
  dist-sparse plan examples/dlrm/planned.py:trained_model --level 0.8
  dist-sparse plan my.package:model --keep 512MiB --block 1x4 --exclude 'small_*'

FUNCTION takes no arguments and returns (model, batches); batches may be None. Nothing in the model is changed. --keep
finds the lowest level, common to all tables, at which their kept weights take no more; masks, and tables that are left
out, are not counted.

{_STATUS}
"""

_DOCTOR = """examples:
  dist-sparse doctor
  dist-sparse doctor --json

Looks at Python, torch, TorchRec and FBGEMM, what ranks talk through, addresses and variables, and says for each what is
wrong and which command mends it. Changes nothing; takes as long as TorchRec needs to load.

exit status: 0 this can train, 1 something needed is missing or wrong, 2 a wrong command line
"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the words (those of the process by default) name; returns the exit status.

    0 is success, 1 a failure that one line on stderr explains, 2 a wrong command line, 141 a reader of the output that
    has gone away; the rest is the subcommand's own.
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
    for add in (_add_launch, _add_inspect, _add_report, _add_plan, _add_doctor):
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
        from dist_sparse.report.inspect import inspect_json, inspect_text
        from dist_sparse.report.run import read_run

        try:
            found = read_run(options.folder)
        except RecursionError:
            return _failed("inspect", _too_deep(options.folder))
        except (ValueError, OSError) as error:
            return _failed("inspect", error)
        return _print(json.dumps(inspect_json(found), indent=2) if options.json else inspect_text(found))

    parser = _subcommand(commands, "inspect", "shows the tables and the config of a run", _INSPECT)
    parser.add_argument("folder", metavar="RUN", help="the folder of the run")
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_report(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.report.page import write_report
        from dist_sparse.report.run import read_run
        from dist_sparse.report.summary import numbers, summary

        try:
            found = read_run(options.folder)
            written = write_report(found, options.out, pngs=not options.no_png)
        except RecursionError:
            return _failed("report", _too_deep(options.folder))
        except (ValueError, OSError, ImportError) as error:
            return _failed("report", error)
        return _print(json.dumps(numbers(found), indent=2) if options.json else summary(found, written))

    parser = _subcommand(commands, "report", "writes charts of a run as one HTML file, and PNGs beside it", _REPORT)
    parser.add_argument("folder", metavar="RUN", help="the folder of the run")
    parser.add_argument("--out", metavar="FILE", help="the HTML file; default: RUN/report.html")
    parser.add_argument("--no-png", action="store_true", help="no PNGs; then matplotlib is not needed")
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_plan(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.report.entry import EntryError, model_and_batches
        from dist_sparse.report.plan import plan

        try:
            model, batches = model_and_batches(options.function)
        except EntryError as error:
            return _failed("plan", error)
        if batches is not None and not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            rule = f"returned {type(batches).__name__} for batches; must be iterable, or None"
            return _failed("plan", f"Invalid entry={options.function!r}: {rule}.")
        try:
            made = plan(
                model,
                level=options.level,
                byte_budget=options.keep,
                batches=None if batches is None else islice(batches, options.batches),
                block=options.block,
                norm=options.norm,
                include=options.include,
                exclude=options.exclude,
            )
        except ValueError as error:
            return _failed("plan", error)
        return _print(json.dumps(made.to_json(), indent=2) if options.json else str(made))

    parser = _subcommand(commands, "plan", "says what a level or a byte budget would remove: a dry run", _PLAN)
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function or file.py:function")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--level", type=_typed("parse_level"), help="sparsity level of every table, 0 to 1")
    asked.add_argument("--keep", type=_typed("parse_bytes"), metavar="SIZE", help="bytes to keep, such as 512MiB")
    parser.add_argument("--block", type=_typed("parse_block"), default=(1, "ROW"), help="such as 1x4; default: 1xROW")
    parser.add_argument("--norm", choices=("L1", "L2"), default="L2", help="default: L2")
    parser.add_argument("--batches", type=_typed("parse_count"), metavar="N", help="reads the first N; default: all")
    parser.add_argument("--include", action="append", metavar="GLOB", help="tables, all by default; may be repeated")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="tables to leave out; may be repeated")
    _add_json(parser)
    parser.set_defaults(run=run)


def _add_doctor(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.cli.doctor import examine

        found = examine()
        status = _print(json.dumps(found.to_json(), indent=2) if options.json else str(found))
        return status or (0 if found.can_train else 1)

    parser = _subcommand(commands, "doctor", "says whether this machine can train, and what mends it", _DOCTOR)
    _add_json(parser)
    parser.set_defaults(run=run)


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


def _typed(parse: str) -> Callable[[str], Any]:
    """A type for argparse, by a function of `text`, whose message is that of the ValueError."""

    def typed(word: str) -> Any:
        from dist_sparse import text

        try:
            return getattr(text, parse)(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def _too_deep(folder: str) -> str:
    return f"{folder} holds no run that can be read: its JSON is nested too deeply."


def _failed(command: str, why: Exception | str) -> int:
    from dist_sparse.text import printable

    lines = str(why).split("\n")  # names in it may come from a model or a log
    print(f"dist-sparse {command}: " + "\n".join(map(printable, lines)), file=sys.stderr)
    return 1


def _print(text: str) -> int:
    """Prints; returns the exit status. What the encoding of the output has no place for is escaped."""
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try once more when it ends
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as other programs end whose reader goes away
    print(f"dist-sparse: can't write to standard output: {error.strerror}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""The command `dist-sparse`: each subcommand parses, calls one function of the package and prints
the result.

A subcommand is a function that adds its parser and sets `run`, which takes the parsed options and
returns the exit status. What it calls is imported when it runs, and torch with it: `--help` and
`doctor` need no torch. Status 2 is for a command line that has to be changed, FUNCTION included;
status 1 for what else a user can fix (a ValueError, a file that can't be read or written, a package
that is missing). Both are a sentence or two; other exceptions keep their traceback.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Final

import dist_sparse
from dist_sparse.cli.arguments import EntryError
from dist_sparse.cli.output import fail, flush, interrupted, progress, show
from dist_sparse.cli.parsing import (
    STATUS,
    Commands,
    Parser,
    Subcommand,
    add_json,
    subcommand,
)
from dist_sparse.cli.planning import add_frontier, add_plan
from dist_sparse.cli.runs import add_inspect, add_report
from dist_sparse.cli.selftest import add_selftest
from dist_sparse.launch.parsing import closest

_DESCRIPTION = "Sparsifies the embedding tables of TorchRec models while they train."

_EXAMPLES = f"""examples:
  dist-sparse doctor                              can this machine train?
  dist-sparse launch --nproc 2 train.py           train on two processes
  dist-sparse inspect runs/latest                 tables and config of a run
  dist-sparse report runs/latest                  its charts, as one HTML file
  dist-sparse plan model.py:trained --budget 10%  what 10% of the bytes can hold
  dist-sparse frontier model.py:measured          its metrics at a few sizes
  dist-sparse serve-check served/                 is this artifact whole?
  dist-sparse selftest                            does it work on these GPUs?

{STATUS}
Options of a command: dist-sparse COMMAND --help
"""

_SERVE_CHECK = f"""examples:
  dist-sparse serve-check served/
  dist-sparse serve-check served/ monday/ tuesday/

ARTIFACT is a folder that dist_sparse.export wrote, DELTA one of export(since=).
Every byte is verified, and what the deltas add up to. Needs torch, no model.

{STATUS}
"""

_MERGE = f"""examples:
  dist-sparse merge served/ monday/ tuesday/ --out base/

ARTIFACT is a folder that dist_sparse.export wrote, DELTA one of export(since=),
in order. The new folder equals a full export at the last delta, byte for byte.
Needs torch, no model.

{STATUS}
"""

_DOCTOR = """examples:
  dist-sparse doctor
  dist-sparse doctor --json
  dist-sparse doctor --verbose

Prints the verdict, what is wrong and the commands that fix it. Changes
nothing; takes as long as TorchRec needs to load.

exit status: 0 this machine can train TorchRec models, 1 something needed is
missing or wrong, 2 invalid command line
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``words`` (``sys.argv[1:]`` by default) name; return the exit status.

    0 is success, 1 a failure that stderr explains, 2 an invalid command line, 130
    Ctrl-C, 141 a closed pipe; `launch` has others.
    """
    # None: closed by the shell (>&-).
    if sys.stdout is None:
        sys.exit("dist-sparse: standard output is closed")
    # In a C locale a name may have no encoding.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _main(words)
    except SystemExit:  # of argparse, which may have printed a help
        # A closed pipe or a full disk counts more than the status of the help.
        status = flush()
        if status:
            return status
        raise
    except KeyboardInterrupt:
        return interrupted()


def parser() -> Parser:
    """Return the parser of `dist-sparse`, for tools that complete commands in a shell."""
    parser = Parser(
        prog="dist-sparse",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-V", "--version", action="store_true", help="show the version of the package and exit"
    )
    commands = parser.add_subparsers(
        metavar="COMMAND", title="commands", required=True, parser_class=Subcommand
    )
    for add in _COMMANDS.values():
        add(commands)
    return parser


def _main(words: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    if not words:
        return show(parser().format_help().rstrip())
    # argparse would list all commands, and name no close one.
    if words[0] not in (*_COMMANDS, "-h", "--help", "-V", "--version"):
        kind = "option" if words[0].startswith("-") else "command"
        meant = closest(words[0], [*_COMMANDS, "--help", "--version"])
        parser().error(f"there is no {kind} {words[0]}{meant}")
    try:
        if words[0] in ("-V", "--version"):
            return show(f"dist-sparse {dist_sparse.__version__}")
        options = parser().parse_args(words)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except EntryError as error:
        fail(words[0], f"{error}\nUsage and options: dist-sparse {words[0]} --help")
        return 2
    except ModuleNotFoundError as error:
        # Commands load what they need when they run: most of them need no torch.
        how = "; dist-sparse doctor prints how to install it." if error.name == "torch" else "."
        return fail(words[0], f"needs {error.name}, which is not installed{how}")
    except (ValueError, OSError, ImportError) as error:
        return fail(words[0], error)


def _add_launch(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.launch.cli import main as launch

        return launch(options.words, prog="dist-sparse launch")

    # The launcher parses for itself, `--help` included: with this prefix no word is an option here.
    parser = commands.add_parser(
        "launch",
        help=(
            "starts a training script on several processes, or writes files for Slurm and Kubeflow"
        ),
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def _add_serve_check(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.serving.chain import check_artifact
        from dist_sparse.serving.manifest import summary

        manifest = check_artifact(options.folder, *options.deltas).manifest
        return show(manifest.to_text().rstrip() if options.json else f"{summary(manifest)}\nok")

    parser = subcommand(
        commands,
        "serve-check",
        "verifies an artifact, and shows what its tables take",
        _SERVE_CHECK,
    )
    _add_chain(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _add_chain(parser: Parser) -> None:
    parser.add_argument("folder", metavar="ARTIFACT", help="the folder that export wrote")
    parser.add_argument("deltas", nargs="*", metavar="DELTA", help="deltas after it, in order")


def _add_merge(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.serving.chain import merge
        from dist_sparse.serving.manifest import summary

        manifest = merge(options.folder, *options.deltas, out=options.out)
        return show(f"{options.out}\n{summary(manifest)}")

    parser = subcommand(
        commands, "merge", "writes an artifact and its deltas as one artifact", _MERGE
    )
    _add_chain(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="the new folder")
    parser.set_defaults(run=run)


def _add_doctor(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from dist_sparse.cli.doctor import examine

        found = examine(progress=progress)
        progress("")
        text = found.text(options.verbose)
        status = show(json.dumps(found.to_json(), indent=2) if options.json else text)
        # Output that could not be written comes first.
        return status or int(bool(found.broken))

    parser = subcommand(
        commands, "doctor", "checks whether this machine can train, and prints fixes", _DOCTOR
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="shows every finding")
    add_json(parser)
    parser.set_defaults(run=run)


_COMMANDS: Final = {
    "launch": _add_launch,
    "inspect": add_inspect,
    "report": add_report,
    "plan": add_plan,
    "frontier": add_frontier,
    "serve-check": _add_serve_check,
    "merge": _add_merge,
    "doctor": _add_doctor,
    "selftest": add_selftest,
}
"""What adds the parser of each subcommand, in the order of the help."""

"""The command `dist-sparse`: each subcommand parses, calls one function of the package and prints
the result.

A subcommand imports its function, and torch with it, when it runs: `--help` and `doctor` need no
torch. Exit status 2 means that the command line is wrong, whatever the model and the files hold: an
option, a path that does not exist, or FUNCTION. 1 is any other failure that a user can fix (a
FUNCTION that raises, a ValueError, a file that can't be read or written, a missing package). Both
print a sentence or two; other exceptions keep their traceback.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import TextIOWrapper

import dist_sparse
from dist_sparse.cli.arguments import (
    EntryError,
    UsageError,
    budget_argument,
    entry_argument,
    existing_path,
    model_and_optimizer,
    user_batches,
)
from dist_sparse.cli.commands import (
    FUNCTION,
    JSON,
    ROTATE,
    TOPICS,
    Command,
    print_failure,
    print_result,
    print_text,
    show_progress,
    silence_torchrec,
)
from dist_sparse.doors import offered
from dist_sparse.launch.__main__ import Parser, as_typed, option
from dist_sparse.launch.__main__ import main as launch

_DESCRIPTION = "Plans what embedding tables can lose; launches, reports on and checks training."

_STATUS = "exit status: 0 success, 1 failure, 2 wrong command line"

_EXAMPLES = f"""examples:
  dist-sparse doctor                              can this machine train?
  dist-sparse plan model.py:trained --budget 10%  what 10% of the bytes can hold
  dist-sparse launch --nproc 2 train.py           train on two processes

{_STATUS}
Options of a command: dist-sparse COMMAND --help
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``words`` (``sys.argv[1:]`` by default) name; return the exit status.

    0 is success, 1 a failure that stderr explains, 2 an invalid command line, 130
    Ctrl-C, 141 a closed pipe; `launch` has others.
    """
    # The C locale is ASCII: print() would raise on other names of tables.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run_command(list(sys.argv[1:] if words is None else words))
    except SystemExit:
        # argparse exits after --help, whose text may still be buffered: flush it here, so that a
        # full disk or a closed pipe is reported like any other.
        if status := print_text("", end=""):
            return status
        raise
    except KeyboardInterrupt:
        print("dist-sparse: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run_command(words: list[str]) -> int:
    if words == ["help"]:
        return print_text(parser().format_help().rstrip())
    if not words:
        # A script whose COMMAND is an empty variable must not succeed.
        print(parser().format_help().rstrip(), file=sys.stderr)
        return 2
    if words[0] in ("-V", "--version"):
        return print_text(f"dist-sparse {dist_sparse.__version__}")
    if words[0] == "launch":
        # It parses for itself, `--help` included.
        return launch(words[1:], prog="dist-sparse launch")
    if words[0].startswith("-") and words[0] != "--":
        # Options follow COMMAND. argparse would take the value of this one for COMMAND.
        words = words[:1]
    options = parser().parse_args(words)
    name = options.command
    try:
        return _commands()[name].run(options)
    except EntryError as error:
        what = f"FUNCTION={options.function!r}: {error}"
        if error.status == 2:
            what = f"Invalid {what}\nUsage and options: dist-sparse {name} --help"
        print_failure(name, what)
        return error.status
    except UsageError as error:
        print_failure(name, str(error))
        return error.status
    except ModuleNotFoundError as error:
        # Subcommands import lazily: this is the first time that the package was needed.
        how = "; dist-sparse doctor prints how to install it." if error.name == "torch" else "."
        return print_failure(name, f"needs {error.name}, which is not installed{how}")
    except (ValueError, OSError, ImportError) as error:
        return print_failure(name, as_typed(str(error), _TYPED))


# Options by the names of their Python arguments.
_TYPED = {"path": "--out", "methods": "--method"}
_TYPED |= {name: f"--{name}" for name in ("out", "metric", "rotate")}


def parser() -> Parser:
    """Return the parser of `dist-sparse`, for tools that complete commands in a shell."""
    raw = argparse.RawDescriptionHelpFormatter
    whole = Parser(
        prog="dist-sparse", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    whole.add_argument("-V", "--version", action="store_true", help="shows the version")
    subparsers = whole.add_subparsers(
        metavar="COMMAND", title="commands", dest="command", required=True
    )
    for name, command in _commands().items():
        subparser = subparsers.add_parser(
            name,
            help=command.purpose,
            description=f"{command.purpose[0].upper()}{command.purpose[1:]}.",
            epilog=f"examples:\n{command.epilog}\n{_STATUS}\n",
            formatter_class=raw,
            # A new option could make an abbreviation in a user's script ambiguous.
            allow_abbrev=False,
        )
        for flags, settings in command.options:
            subparser.add_argument(*flags, **settings)
    return whole


def _commands() -> dict[str, Command]:
    """Return all commands by name, including the extras' commands, in the order of ``--help``."""
    found = [*_CORE]
    for commands in offered("commands"):
        found += commands()
    # The sort is stable: within a topic, commands of the core come first.
    found.sort(key=lambda command: TOPICS.index(command.topic))
    return {command.name: command for command in found}


# Commands of the core: each takes the parsed options and returns the exit status.


def _launch(options: argparse.Namespace) -> int:
    # Only as `dist-sparse -- launch`: the launcher says what is missing.
    return launch([], prog="dist-sparse launch")


def _plan(options: argparse.Namespace) -> int:
    from dist_sparse.planning.plan import plan

    silence_torchrec()
    model, optimizer = model_and_optimizer(options.function)
    planned = plan(
        model,
        options.budget,
        rotate=options.rotate,
        optimizer=optimizer,
        record=options.record,
        batches=user_batches(options.batches),
    )
    return print_result(options, planned.to_json(), str(planned))


def _serve_check(options: argparse.Namespace) -> int:
    from dist_sparse.serving.chain import check_artifact
    from dist_sparse.serving.manifest import artifact_summary, delta_summary

    chain = check_artifact(options.folder, *options.deltas)
    manifest = chain.manifest
    lines = [delta_summary(delta.manifest) for delta in chain.deltas]
    # Deltas and served.metrics() name an artifact by its hash.
    lines += [artifact_summary(manifest, "once merged") if lines else artifact_summary(manifest)]
    text = "\n".join([*lines, f"artifact {manifest.hash[:12]}", "ok"])
    sizes = {name: asdict(table.bytes) for name, table in manifest.tables.items()}
    found = {"hash": manifest.hash, "sizes": sizes, **json.loads(manifest.to_text())}
    return print_result(options, found, text)


def _merge(options: argparse.Namespace) -> int:
    from dist_sparse.serving.chain import merge
    from dist_sparse.serving.manifest import artifact_summary

    manifest = merge(options.folder, *options.deltas, out=options.out)
    text = f"{options.out}\n{artifact_summary(manifest)}"
    return print_result(options, json.loads(manifest.to_text()), text)


def _doctor(options: argparse.Namespace) -> int:
    from dist_sparse.cli.doctor import examine

    diagnosis = examine(progress=show_progress)
    show_progress("")
    status = print_result(options, diagnosis.to_json(), diagnosis.text(options.verbose))
    # The status of a failed print() is larger than 1 for a closed pipe, and wins.
    return max(status, 1) if diagnosis.broken else status


_ARTIFACT = option(
    "folder", help="the folder that export wrote", type=existing_path, metavar="ARTIFACT"
)
_DELTAS = option(
    "deltas",
    help="deltas after it, in order",
    nargs="*",
    type=existing_path,
    # Without a default, argparse would list it among the arguments that are required.
    default=[],
    metavar="DELTA",
)

_CORE = [
    Command(
        name="doctor",
        topic="machine",
        purpose="checks whether this machine can train, and prints fixes",
        run=_doctor,
        epilog="""\
  dist-sparse doctor
  dist-sparse doctor --verbose

Changes nothing.
""",
        options=[option("-v", "--verbose", help="shows every finding", action="store_true"), JSON],
    ),
    Command(
        name="plan",
        topic="size",
        purpose="shows what a budget of bytes can hold",
        run=_plan,
        epilog="""\
  dist-sparse plan my.package:model --budget 10% --rotate user,item
  dist-sparse plan model.py:trained --budget 512KiB --batches model.py:test_days

FUNCTION takes no arguments and returns a trained model, which is not changed,
or (model, optimizer), if the tables are not fused.
""",
        options=[
            option(
                "--budget",
                help="bytes to serve, such as 10%%, 0.1 or 512MiB",
                type=budget_argument,
                metavar="SIZE",
                required=True,
            ),
            FUNCTION,
            ROTATE,
            option(
                "--record",
                help="instead of optimizer state, the folder of a record of lookups",
                type=existing_path,
                metavar="DIR",
            ),
            option(
                "--batches",
                help="like FUNCTION; returns lookups that must be answered",
                type=entry_argument,
                metavar="FUNCTION",
            ),
            JSON,
        ],
    ),
    Command(
        name="launch",
        topic="training",
        purpose="starts a script on several processes",
        run=_launch,
    ),
    Command(
        name="serve-check",
        topic="serving",
        purpose="verifies an artifact, and shows what its tables take",
        run=_serve_check,
        epilog="""\
  dist-sparse serve-check served/
  dist-sparse serve-check served/ monday/ tuesday/

Every byte is verified. Needs torch, no model.
""",
        options=[_ARTIFACT, _DELTAS, JSON],
    ),
    Command(
        name="merge",
        topic="serving",
        purpose="writes an artifact and its deltas as one artifact",
        run=_merge,
        epilog="""\
  dist-sparse merge served/ monday/ tuesday/ --out base/

The new folder equals a full export at the last delta, byte for byte.
Needs torch, no model.
""",
        options=[
            _ARTIFACT,
            _DELTAS,
            option("--out", help="the new folder", metavar="DIR", required=True),
            JSON,
        ],
    ),
]

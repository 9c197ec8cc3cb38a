"""Command line of the launcher. Wrong arguments are refused before any process starts."""

import argparse
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from dist_sparse.launch.run import run
from dist_sparse.launch.spec import LaunchSpec, additions, argv

# Flags, and what argparse gets with them.
Option = tuple[tuple[str, ...], dict[str, Any]]

_EXAMPLES = """\
  {prog} --nproc 2 train.py -- --epochs 1
  {prog} torchrun --nnodes 2 --nproc 8 \\
      --rdzv-endpoint node1:29400 --rdzv-id ID train.py

exit status: the job's, or 2: wrong command line
"""


def main(words: Sequence[str], *, prog: str = "python -m launch") -> int:
    """Run the command line `words` and return the exit code of the job.

    A wrong command line is 2. An interpreter that can't be started, or output that can't be
    written, is 1, with one line on stderr.
    """
    words = list(words)
    # `launch train.py` is `launch local train.py`.
    command = "local"
    if words and words[0] in _COMMANDS:
        command = words.pop(0)
    parser = _parser(prog, command)
    options = parser.parse_args(words)
    try:
        return _run(options)
    except ValueError as error:
        parser.error(as_typed(str(error), _TYPED))
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    spec = _spec(options)
    if not options.print:
        return run(spec, ranks=options.ranks)
    added = additions(spec, os.environ)
    assignments = [f"{key}={value}" for key, value in added.items()]
    # The shell must read the bytes that it passed: file names need not be UTF-8.
    if isinstance(sys.stdout, TextIOWrapper):
        encoding, errors = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
        sys.stdout.reconfigure(encoding=encoding, errors=errors)
    # `env`: a shell itself assigns neither UID nor PPID.
    print(shlex.join(["env", *assignments, *argv(spec)]), flush=True)
    return 0


# The purpose of each command.
_COMMANDS = {
    "local": "runs a job on this machine (the command when none is given)",
    "torchrun": "runs this machine's part of a job on several; the same words on each",
}


# The words on the command line for arguments of LaunchSpec and `run`.
_TYPED = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(LaunchSpec)}
_TYPED |= {"nproc_per_node": "--nproc", "rank": "--ranks", "script": "SCRIPT", "module": "SCRIPT"}


def as_typed(message: str, typed: Mapping[str, str]) -> str:
    """Return the message of an error, `Invalid argument=...`, with the option as the user typed it.

    Args:
        message: the error of a Python function, which knows its arguments only.
        typed: options by the names of these arguments.
    """
    argument = message.removeprefix("Invalid ").partition("=")[0]
    return message.replace(f"{argument}=", f"{typed.get(argument, argument)}=", 1)


def _spec(options: argparse.Namespace) -> LaunchSpec:
    # The parser has no defaults for these: an option that was not given keeps LaunchSpec's.
    given = {name: value for name, value in vars(options).items() if name in _TYPED}
    given["module" if options.is_module else "script"] = options.target
    if options.args[:1] == ["--"]:
        given["args"] = options.args[1:]
    if hasattr(options, "rdzv_host_env"):
        # Some schedulers do not set the variable on the node that it names.
        host = os.environ.get(options.rdzv_host_env) or "localhost"
        given["rdzv_endpoint"] = f"{host}:{options.rdzv_port}"
    return LaunchSpec(**{"name": _job_name(options.target), **given, "env": dict(options.env)})


def _job_name(target: str) -> str:
    """Derive the name of a job from its script or module."""
    stem = Path(target).name.removesuffix(".py").rpartition(".")[2]
    # A name begins with a letter.
    name = re.sub("[^a-z0-9]+", "-", stem.lower()).lstrip("0123456789-")
    return name[:53].rstrip("-") or "train"


# Parsers


class Parser(argparse.ArgumentParser):
    """Parser whose errors are two lines: the mistake, and the command that shows the options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # As from Python 3.14 on: "-5%" is a value, which its option can refuse with its own rule.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if {"-h", "--help"}.isdisjoint(words):
            self._refuse_unknown(words)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown(self, words: list[str]) -> None:
        """Refuse unknown words. argparse would report missing arguments first, and `--budgt 5%` is
        a missing `--budget` to it: this pass misses none."""
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        try:
            found, unknown = super().parse_known_args(words)
        finally:
            for action in required:
                action.required = True
        # A subcommand refuses its own unknown words. argparse passes them up to the main parser,
        # whose error could only suggest the main parser's options.
        if unknown:
            hint = closest(unknown[0].partition("=")[0], self._option_string_actions)
            missing = [
                action.option_strings[0]
                for action in required
                if action.option_strings and getattr(found, action.dest, None) is None
            ]
            # A value without the option to which it belongs.
            if len(missing) == 1 and not unknown[0].startswith("-"):
                hint = f"; did you mean {missing[0]} {unknown[0]}?"
            self.error(f"unrecognized arguments: {unknown[0]}{hint}")

    # From Python 3.14 on, `suggest_on_error=True` does the same.
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            assert action.choices is not None
            error.message += closest(str(value), map(str, action.choices))
            raise

    def error(self, message: str) -> NoReturn:
        text = f"{self.prog}: error: {message}"
        # Whole words: a reader copies options, names and paths from it.
        text = textwrap.fill(
            text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        self.exit(2, f"{text}\nUsage and options: {self.prog} --help\n")


def closest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error that names the closest known word; empty if none is close."""
    return "".join(f"; did you mean {close}?" for close in get_close_matches(word, known, 1, 0.7))


def option(*flags: str, **settings: Any) -> Option:
    """Return an entry of a table of options."""
    return flags, settings


# argparse prints the name of this function: "--ranks: invalid local_ranks value: 'x'".


def local_ranks(text: str) -> list[int]:
    """Return ``0,1`` as numbers."""
    return list(map(int, text.split(",")))


def key_value(text: str) -> tuple[str, str]:
    """Return ``KEY=VALUE`` as a pair."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE")
    return key, value


_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}

# The parser suppresses defaults: an option without one here is absent from the namespace if it was
# not given.
_OPTIONS: list[Option] = [
    option(
        *("-m", "--module"),
        help="SCRIPT is the name of a module, as in `python -m`",
        action="store_true",
        default=False,
        dest="is_module",
    ),
    option(
        "--nproc",
        help="processes on each node: a number, or gpu, cpu, auto (default: 1)",
        dest="nproc_per_node",
        metavar="N",
    ),
    option(
        "--env",
        help="variable for the ranks; may be repeated",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
    ),
    option("--max-restarts", help="restarts after a rank has failed (default: 0)", **_NUMBER),
    option("--grace", help="seconds between a signal and SIGKILL (default: 30)", **_NUMBER),
    option("--name", help="name of the job, of a-z 0-9 - (default: from SCRIPT)"),
    option("--python", help="the interpreter (default: this one)"),
    option(
        "--ranks",
        help="local ranks whose output is shown, such as 0 or 0,1 (default: all); one has no"
        " prefix",
        type=local_ranks,
        default=[],
        metavar="LIST",
    ),
    option(
        "--print",
        help="only print the torchrun command; see docs/launching.md",
        action="store_true",
        default=False,
    ),
]

# Options of the command `torchrun` alone.
_OF_TORCHRUN: list[Option] = [
    option("--nnodes", help="nodes (default: 1)", metavar="N|MIN:MAX"),
    option("--rdzv-id", help="id of this job, the same on all nodes; long and random is best"),
    option("--local-addr", help="address of this node for the others (default: its host name)"),
    option(
        "--rdzv-port",
        help="where nodes meet, with --rdzv-host-env (default: 29400)",
        default=29400,
        **_NUMBER,
    ),
]


def _parser(prog: str, command: str) -> Parser:
    purpose = _COMMANDS[command]
    known = "\n".join(f"  {name:10}{what}" for name, what in _COMMANDS.items())
    parser = Parser(
        # `local` may be left out, and is left out of messages too.
        prog=f"{prog} {command}".removesuffix(" local"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"commands:\n{known}\n\nexamples:\n{_EXAMPLES.format(prog=prog)}",
        usage=f"{prog} [COMMAND] [OPTIONS] SCRIPT [-- ARGS]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    script = "what every rank runs; its ARGS follow it, optionally after `--`"
    add("target", metavar="SCRIPT", help=script)
    add("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    for flags, settings in _OPTIONS:
        add(*flags, **settings)
    if command == "torchrun":
        for flags, settings in _OF_TORCHRUN:
            add(*flags, **settings)
        add_either = parser.add_mutually_exclusive_group().add_argument
        add_either("--rdzv-endpoint", help="where the nodes meet: HOST:PORT of one of them")
        host = "instead: the variable that holds HOST; localhost if it is empty"
        add_either("--rdzv-host-env", help=host)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m dist_sparse.launch"))

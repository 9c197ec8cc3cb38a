"""The launcher's command line: what is wrong in it is refused before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from dist_sparse.launch import kubeflow, sbatch
from dist_sparse.launch.run import run
from dist_sparse.launch.spec import LaunchSpec, additions, argv

# Flags, and what argparse gets with them.
Option = tuple[tuple[str, ...], dict[str, Any]]

_COMMANDS = {
    "local": "run a job on this machine (the command when none is given)",
    "torchrun": "run this machine's part of a job on several; the same words on each",
    "sbatch": "write a script for Slurm's sbatch",
    "kubeflow": "write a TrainJob for Kubeflow Trainer v2",
}

_EXAMPLES = """\
  {prog} --nproc 2 train.py -- --epochs 1
  {prog} --nproc gpu -m my.training -- --lr 0.1
  {prog} torchrun --nnodes 2 --nproc 8 \\
      --rdzv-endpoint node1:29400 --rdzv-id ID train.py
  {prog} sbatch --nnodes 2 --nproc 8 --gpus 8 --cpus 64 \\
      --time 02:00:00 train.py > job.sh
"""


def main(words: Sequence[str], *, prog: str = "python -m launch") -> int:
    """Run the command line `words` and return the exit code of the job.

    It is 2 for wrong words, and 1 with one line of error where something can't be written or
    started.
    """
    words = list(words)
    # `launch train.py` is `launch local train.py`.
    command = words.pop(0) if words and words[0] in _COMMANDS else "local"
    parser = _parser(prog, command)
    options = parser.parse_args(words)
    try:
        return _do(options, command)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace, command: str) -> int:
    spec = _spec(options, "python" if command == "kubeflow" else sys.executable)
    path = None
    if command == "sbatch":
        text, path = sbatch.render(spec, port=options.rdzv_port), options.output
    elif command == "kubeflow":
        text, path = kubeflow.render(spec, runtime=options.runtime), options.output
    elif options.print:
        added = additions(spec, os.environ)
        assignments = [f"{key}={shlex.quote(value)}" for key, value in added.items()]
        text = " ".join([*assignments, shlex.join(argv(spec))]) + "\n"
    else:
        return run(spec, ranks=options.ranks)
    if path is None:
        print(text, end="", flush=True)
        return 0
    # A new file is for its owner alone: it may hold secrets of --env.
    with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as out:
        out.write(text)
    return 0


def _spec(options: argparse.Namespace, python: str) -> LaunchSpec:
    # Options that were not given, or that the command lacks, have the defaults of LaunchSpec.
    names = {field.name for field in dataclasses.fields(LaunchSpec)} - {"module"}
    given = {name: value for name, value in vars(options).items() if name in names}
    given.setdefault("name", _name(options.script))
    if options.module:
        given["module"] = given.pop("script")
    if options.args[:1] == ["--"]:
        given["args"] = options.args[1:]
    if hasattr(options, "rdzv_host_env"):
        # Some schedulers leave the variable out on the very node that it would name.
        host = os.environ.get(options.rdzv_host_env) or "localhost"
        given["rdzv_endpoint"] = f"{host}:{options.rdzv_port}"
    return LaunchSpec(**{"python": python, **given, "env": dict(options.env)})


def _name(target: str) -> str:
    """A job's name from its script or module."""
    stem = Path(target).name.removesuffix(".py").rpartition(".")[2]
    # A name begins with a letter.
    name = re.sub("[^a-z0-9]+", "-", stem.lower()).lstrip("0123456789-")
    return name[:53].rstrip("-") or "train"


# Parsers


class Parser(argparse.ArgumentParser):
    """Parser whose errors are two lines: what is wrong, and which command shows the options."""

    def error(self, message: str) -> NoReturn:
        text = f"{self.prog}: error: {message}"
        text = textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False)
        self.exit(2, f"{text}\nUsage and options: {self.prog} --help\n")


def option(*flags: str, **settings: Any) -> Option:
    """Return an entry of a table of options."""
    return flags, settings


# argparse's refusals show the names of these two.


def local_ranks(text: str) -> list[int]:
    """Return ``0,1`` as numbers."""
    return [int(number) for number in text.split(",")]


def key_value(text: str) -> tuple[str, str]:
    """Return ``KEY=VALUE`` as a pair."""
    key, value = text.split("=", 1)
    return key, value


_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}

# The options of commands. One that is not given has no value, unless it has a default here.
_OPTIONS: dict[str, list[Option]] = {
    "local torchrun sbatch kubeflow": [
        option(
            *("-m", "--module"),
            help="SCRIPT is the name of a module, as in `python -m`",
            action="store_true",
            default=False,
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
        option("--python", help="the interpreter (default: this one; for kubeflow `python`)"),
    ],
    "torchrun sbatch kubeflow": [
        option("--nnodes", help="nodes (default: 1)", metavar="N|MIN:MAX"),
    ],
    "local torchrun": [
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
    ],
    "torchrun": [
        option("--rdzv-id", help="id of this job, the same on all nodes; long and random is best"),
        option("--local-addr", help="address of this node for the others (default: its host name)"),
    ],
    "torchrun sbatch": [
        option(
            "--rdzv-port",
            help="where nodes meet; for torchrun with --rdzv-host-env (default: 29400)",
            default=29400,
            **_NUMBER,
        ),
    ],
    "sbatch kubeflow": [
        option("--cpus", help="cores of a node", **_NUMBER),
        option("--gpus", help="GPUs of a node", **_NUMBER),
        option("--memory-gib", help="memory of a node", **_NUMBER),
        option(
            "--output", help="file to write (default: standard output)", type=Path, default=None
        ),
    ],
    "sbatch": [option("--time", help="time limit of the job", metavar="[D-]HH:MM:SS")],
    "kubeflow": [
        option("--image", help="the container image (default: the runtime's)"),
        option(
            "--runtime",
            help="ClusterTrainingRuntime (default: torch-distributed)",
            default="torch-distributed",
        ),
    ],
}


def _parser(prog: str, command: str) -> Parser:
    commands = "\n".join(f"  {name:10}{what}" for name, what in _COMMANDS.items())
    parser = Parser(
        # The command that is meant when none is given is shown as it is typed.
        prog=prog if command == "local" else f"{prog} {command}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_COMMANDS[command],
        epilog=f"commands:\n{commands}\n\nexamples:\n{_EXAMPLES.format(prog=prog)}",
        usage=f"{prog} [COMMAND] [OPTIONS] SCRIPT [-- ARGS]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    script = "what every rank runs; its ARGS follow it, optionally after `--`"
    add("script", metavar="SCRIPT", help=script)
    add("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    tables = [table for commands, table in _OPTIONS.items() if command in commands.split()]
    for flags, settings in chain.from_iterable(tables):
        add(*flags, **settings)
    if command == "torchrun":
        either = parser.add_mutually_exclusive_group().add_argument
        either("--rdzv-endpoint", help="where the nodes meet: HOST:PORT of one of them")
        host = "instead: the variable that holds HOST; localhost if it is empty"
        either("--rdzv-host-env", help=host)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m dist_sparse.launch"))

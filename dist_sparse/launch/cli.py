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
from pathlib import Path
from typing import Any, NoReturn

from dist_sparse.launch import kubeflow, sbatch
from dist_sparse.launch.command import additions, argv
from dist_sparse.launch.parsing import refuse_option
from dist_sparse.launch.run import run
from dist_sparse.launch.spec import LaunchSpec

_COMMANDS = {
    "local": "run a job on this machine (the command when none is given)",
    "torchrun": "run this machine's part of a job on several; the same words on each",
    "sbatch": "write a script for Slurm's sbatch",
    "kubeflow": "write a TrainJob for Kubeflow Trainer v2",
}

_TYPED = {"script": "SCRIPT", "module": "MODULE", "nproc_per_node": "--nproc", "rank": "--ranks"}
"""What a user types for a field that a message names, where the option has another name."""

_EXAMPLES = """\
  {prog} --nproc 2 train.py -- --epochs 1
  {prog} --nproc gpu -m my.training -- --lr 0.1
  {prog} torchrun --nnodes 2 --nproc 8 \\
      --rdzv-endpoint node1:29400 --rdzv-id ID train.py
  {prog} sbatch --nnodes 2 --nproc 8 --gpus 8 --cpus 64 \\
      --time 02:00:00 train.py > job.sh
"""


def main(words: Sequence[str] | None = None, *, prog: str = "python -m launch") -> int:
    """Run the command line `words` (the process's own by default) and return the exit code of the
    job.

    It is 2 for wrong words, and 1 with one line of error where something can't be written or
    started.
    """
    words = list(sys.argv[1:] if words is None else words)
    # `launch train.py` is `launch local train.py`.
    command = words.pop(0) if words and words[0] in _COMMANDS else "local"
    parser = _parser(prog, command)
    options = parser.parse_args(words)
    try:
        return _do(options, command)
    except ValueError as error:
        parser.error(re.sub(r"(?<=^Invalid )[a-z_]+(?==)", _typed, str(error)))
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace, command: str) -> int:
    spec = _spec(options, "python" if command == "kubeflow" else sys.executable)
    if command == "sbatch":
        _write(sbatch.render(spec, port=options.rdzv_port), options.output)
    elif command == "kubeflow":
        _write(kubeflow.render(spec, runtime=options.runtime), options.output)
    elif options.print:
        added = additions(spec, os.environ)
        assignments = [f"{key}={shlex.quote(value)}" for key, value in added.items()]
        _write(" ".join([*assignments, shlex.join(argv(spec))]) + "\n", None)
    else:
        return run(spec, ranks=options.ranks)
    return 0


def _write(text: str, path: Path | None) -> None:
    if path is None:
        print(text, end="", flush=True)
        return
    # A new file is for its owner alone: it may hold secrets of --env.
    with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as out:
        out.write(text)


def _typed(field: re.Match[str]) -> str:
    return _TYPED.get(field[0], f"--{field[0].replace('_', '-')}")


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
    stem = target.removesuffix(".py").rpartition("/" if target.endswith(".py") else ".")[2]
    # A name begins with a letter.
    name = re.sub("[^a-z0-9]+", "-", stem.lower()).lstrip("0123456789-")
    return name[:53].rstrip("-") or "train"


def _variable(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    # The value may be a secret, but without a = nothing is known of it.
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE")
    return key, value


def _ranks(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be local ranks, such as 0 or 0,1"
        ) from None


def _option(flag: str, meaning: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return flag, {"help": meaning, **settings}


def _number(flag: str, meaning: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return _option(flag, meaning, type=int, metavar="N", **settings)


def _switch(flag: str, meaning: str) -> tuple[str, dict[str, Any]]:
    return _option(flag, meaning, action="store_true", default=False)


_RUNS = {"local", "torchrun"}
_FILES = {"sbatch", "kubeflow"}
_MODULE = "SCRIPT is the name of a module, as in `python -m`"
_NPROC = "processes on each node: a number, or gpu, cpu, auto (default: 1)"
_SHOWN = "local ranks whose output is shown, such as 0 or 0,1 (default: all); one has no prefix"
_PORT = "where nodes meet; for torchrun with --rdzv-host-env (default: 29400)"
_RUNTIME = "ClusterTrainingRuntime (default: torch-distributed)"

# The options of sets of commands. One that is not given has no value, unless it has a default here.
_OPTIONS = [
    (
        set(_COMMANDS),
        [
            _option("--nproc", _NPROC, dest="nproc_per_node", metavar="N"),
            _option(
                "--env",
                "variable for the ranks; may be repeated",
                type=_variable,
                action="append",
                default=[],
                metavar="KEY=VALUE",
            ),
            _number("--max-restarts", "restarts after a rank has failed (default: 0)"),
            _number("--grace", "seconds between a signal and SIGKILL (default: 30)"),
            _option("--name", "name of the job, of a-z 0-9 - (default: from SCRIPT)"),
            _option("--python", "the interpreter (default: this one; for kubeflow `python`)"),
        ],
    ),
    (_FILES | {"torchrun"}, [_option("--nnodes", "nodes (default: 1)", metavar="N|MIN:MAX")]),
    (
        _RUNS,
        [
            _option("--ranks", _SHOWN, type=_ranks, default=[], metavar="LIST"),
            _switch("--print", "only print the torchrun command; see docs/launching.md"),
        ],
    ),
    (
        {"torchrun"},
        [
            _option("--rdzv-id", "id of this job, the same on all nodes; long and random is best"),
            _option("--local-addr", "address of this node for the others (default: its host name)"),
        ],
    ),
    ({"torchrun", "sbatch"}, [_number("--rdzv-port", _PORT, default=29400)]),
    (
        _FILES,
        [
            _number("--cpus", "cores of a node"),
            _number("--gpus", "GPUs of a node"),
            _number("--memory-gib", "memory of a node"),
            _option(
                "--output", "file to write (default: standard output)", type=Path, default=None
            ),
        ],
    ),
    ({"sbatch"}, [_option("--time", "time limit of the job", metavar="[D-]HH:MM:SS")]),
    (
        {"kubeflow"},
        [
            _option("--image", "the container image (default: the runtime's)"),
            _option("--runtime", _RUNTIME, default="torch-distributed"),
        ],
    ),
]
_MEETINGS = [
    _option("--rdzv-endpoint", "where the nodes meet: HOST:PORT of one of them"),
    _option("--rdzv-host-env", "instead: the variable that holds HOST; localhost if it is empty"),
]


class _Command(argparse.ArgumentParser):
    """Parser of one command: an unknown option is reported with the closest known one."""

    def error(self, message: str) -> NoReturn:
        text = f"{self.prog}: error: {message}"
        lines = textwrap.wrap(text, 80, subsequent_indent="  ", break_long_words=False)
        self.print_usage(sys.stderr)
        self.exit(2, "\n".join(lines) + "\n")

    def parse_known_args(  # type: ignore[override]  # which has four overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, left = super().parse_known_args(args, namespace)
        if left:
            # Not before: words after SCRIPT are the script's own.
            refuse_option(self, left[0].partition("=")[0])
        return found, left


def _parser(prog: str, command: str) -> _Command:
    commands = "\n".join(f"  {name:10}{what}" for name, what in _COMMANDS.items())
    parser = _Command(
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
    # Not in the table: its short form is Python's own.
    add("-m", "--module", action="store_true", default=False, help=_MODULE)
    for known, options in _OPTIONS:
        if command in known:
            for flag, settings in options:
                add(flag, **settings)
    if command == "torchrun":
        either = parser.add_mutually_exclusive_group()
        for flag, settings in _MEETINGS:
            either.add_argument(flag, **settings)
    return parser

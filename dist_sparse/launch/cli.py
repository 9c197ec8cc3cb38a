"""The launcher's command line: what is wrong in it is refused before anything is started."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dist_sparse.launch import kubeflow, sbatch
from dist_sparse.launch.command import additions, argv
from dist_sparse.launch.parsing import refuse_option
from dist_sparse.launch.run import run
from dist_sparse.launch.spec import LaunchSpec, Rendezvous, Resources

_COMMANDS = {
    "local": "run a job on this machine (the command when none is given)",
    "torchrun": "run this machine's part of a job on several; the same command on each of them",
    "sbatch": "write a script for Slurm's sbatch",
    "kubeflow": "write a TrainJob for Kubeflow Trainer v2",
}

_TYPED = {
    "script": "SCRIPT",
    "nproc_per_node": "--nproc",
    "rank": "--ranks",
    "walltime": "--time",
    "rendezvous.endpoint": "--rdzv-endpoint",
    "rendezvous.id": "--rdzv-id",
}
"""What a user types for a field that a message names, where the option has another name."""

_EXAMPLES = """\
  {prog} --nproc 2 train.py -- --epochs 1
  {prog} --nproc gpu -m my.training -- --lr 0.1
  {prog} --print --nproc 2 train.py
  {prog} torchrun --nnodes 2 --nproc 8 \\
      --rdzv-endpoint node1:29400 --rdzv-id ID train.py
  {prog} sbatch --nnodes 2 --nproc 8 --gpus 8 --cpus 64 \\
      --time 02:00:00 train.py > job.sh
  {prog} kubeflow --nnodes 2 --nproc 8 --gpus 8 \\
      --image registry/me/train:1 train.py > job.json
"""


def main(words: Sequence[str] | None = None, *, prog: str = "python -m launch") -> int:
    """Run the command line `words` (the process's own by default) and return the exit code of the
    job.

    It is 2 for wrong words, and 1 with one line of error where something can't be written or
    started.
    """
    words = list(sys.argv[1:] if words is None else words)
    # `launch train.py` is `launch local train.py`.
    if not words or words[0] not in (*_COMMANDS, "-h", "--help"):
        words.insert(0, "local")
    parser, of_command = _parsers(prog)
    options = parser.parse_args(words)
    try:
        return _do(options)
    except ValueError as error:
        message = re.sub(r"(?<=^Invalid )[a-z_.]+(?==)", _typed, str(error))
        of_command[options.command].error(message)
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace) -> int:
    spec = _spec(options)
    if options.command in ("local", "torchrun"):
        if not options.print:
            return run(spec, ranks=options.ranks)
        added = additions(spec, os.environ)
        assignments = [f"{key}={shlex.quote(value)}" for key, value in added.items()]
        print(" ".join([*assignments, shlex.join(argv(spec))]), flush=True)
        return 0
    if options.command == "sbatch":
        text = sbatch.render(spec, port=options.rdzv_port)
    else:
        text = kubeflow.render(spec, runtime=options.runtime)
    if options.output is None:
        print(text, end="", flush=True)
    else:
        # A new file is for its owner alone: it may hold secrets of --env.
        with open(
            options.output, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)
        ) as out:
            out.write(text)
    return 0


def _typed(field: re.Match[str]) -> str:
    return _TYPED.get(field[0], f"--{field[0].replace('_', '-')}")


def _spec(options: argparse.Namespace) -> LaunchSpec:
    # Options that a command does not have are as if they were not given.
    given = defaultdict(lambda: None, vars(options))
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    this = "python" if options.command == "kubeflow" else sys.executable
    needs = ("cpu", "gpu", "memory_gib", "walltime", "image")
    return LaunchSpec(
        **{"module" if options.module else "script": options.script},
        args=tuple(args),
        name=options.name or _name(options.script),
        nnodes=given["nnodes"] or "1",
        nproc_per_node=int(options.nproc) if options.nproc.isdecimal() else options.nproc,
        rendezvous=Rendezvous(
            endpoint=_endpoint(given), id=given["rdzv_id"], local_addr=given["local_addr"]
        ),
        env=_env(options.env),
        max_restarts=options.max_restarts,
        grace=options.grace,
        resources=Resources(**{name: given[name] for name in needs}),
        python=options.python or this,
    )


def _endpoint(given: Mapping[str, Any]) -> str | None:
    variable = given["rdzv_host_env"]
    if variable is None:
        endpoint: str | None = given["rdzv_endpoint"]
        return endpoint
    # Some schedulers leave the variable out on the very node that it would name.
    return f"{os.environ.get(variable) or 'localhost'}:{given['rdzv_port']}"


def _name(target: str) -> str:
    """A job's name from its script or module."""
    stem = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
    # A name begins with a letter.
    name = re.sub("[^a-z0-9]+", "-", stem.lower()).lstrip("0123456789-")
    return name[:53].rstrip("-") or "train"


def _env(pairs: Sequence[str]) -> dict[str, str]:
    # The value may be a secret, but without a = nothing is known of it.
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"Invalid --env {pair!r}: must be KEY=VALUE.")
    return dict(pair.split("=", 1) for pair in pairs)


def _ranks(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be local ranks, such as 0 or 0,1"
        ) from None


class _Command(argparse.ArgumentParser):
    """Parser of one command: an unknown option is reported with the closest known one."""

    def parse_known_args(  # type: ignore[override]  # which has four overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, left = super().parse_known_args(args, namespace)
        if left:
            # Not before: words after SCRIPT are the script's own.
            refuse_option(self, left[0].partition("=")[0])
        return found, left


def _parsers(prog: str) -> tuple[argparse.ArgumentParser, dict[str, _Command]]:
    epilog = f"examples:\n{_EXAMPLES.format(prog=prog)}"
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Start a training script on several processes, or write the file that a\ncluster runs."
        ),
        epilog=f"{epilog}\nOptions of a command: {prog} COMMAND --help",
        usage=f"{prog} [COMMAND] [OPTIONS] SCRIPT [-- ARGS]",
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True, parser_class=_Command
    )
    of_command = {}
    for command, what in _COMMANDS.items():
        # The command that is meant when none is given is shown as it is typed.
        typed = prog if command == "local" else f"{prog} {command}"
        of_command[command] = commands.add_parser(
            command,
            prog=typed,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"{typed} [OPTIONS] SCRIPT [-- ARGS]",
            allow_abbrev=False,
        )
        add_options(of_command[command], command)
    return parser, of_command


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command to its parser."""
    add = parser.add_argument
    add(
        "script",
        metavar="SCRIPT",
        help="what every rank runs; its ARGS follow it, optionally after `--`",
    )
    add("args", nargs=argparse.REMAINDER, metavar="ARGS", help=argparse.SUPPRESS).required = False
    add(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is the name of a module, as in `python -m`",
    )
    add(
        "--nproc",
        default="1",
        metavar="N",
        help="processes on each node: a number, or gpu, cpu, auto (default: 1)",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="variable for the ranks; may be repeated",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="restarts after a rank has failed (default: 0)",
    )
    add(
        "--grace",
        type=int,
        default=30,
        metavar="S",
        help="seconds between a signal and SIGKILL (default: 30)",
    )
    add("--name", help="name of the job, of a-z 0-9 - (default: from SCRIPT)")
    add(
        "--python",
        metavar="PATH",
        help="the interpreter (default: this one; for kubeflow `python`)",
    )
    if command != "local":
        add("--nnodes", default="1", metavar="N|MIN:MAX", help="nodes (default: 1)")
    # What runs here, and can show or print something.
    if command in ("local", "torchrun"):
        shown = (
            "local ranks whose output is shown, such as 0 or 0,1 (default: all); a single one is"
            " not prefixed"
        )
        add("--ranks", type=_ranks, default=[], metavar="LIST", help=shown)
        add(
            "--print",
            action="store_true",
            help="only print the torchrun command; see docs/launching.md",
        )
    if command == "torchrun":
        meet = parser.add_mutually_exclusive_group().add_argument
        meet(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="where the nodes meet: one of them, and a free port there",
        )
        meet(
            "--rdzv-host-env",
            metavar="KEY",
            help="instead: the variable that holds HOST; localhost if it is empty",
        )
        add(
            "--rdzv-id",
            metavar="ID",
            help="id of this job, the same on all nodes; long and random is best",
        )
        add(
            "--local-addr",
            metavar="ADDRESS",
            help="address of this node for the others (default: its host name)",
        )
    if command in ("torchrun", "sbatch"):
        where = "where nodes meet" + (", with --rdzv-host-env" if command == "torchrun" else "")
        add(
            "--rdzv-port", type=int, default=29400, metavar="PORT", help=f"{where} (default: 29400)"
        )
    if command in ("sbatch", "kubeflow"):
        add("--cpus", dest="cpu", type=int, metavar="N", help="cores of a node")
        add("--gpus", dest="gpu", type=int, metavar="N", help="GPUs of a node")
        add("--memory-gib", type=int, metavar="N", help="memory of a node")
        add("--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    if command == "sbatch":
        add("--time", dest="walltime", metavar="[D-]HH:MM:SS", help="time limit of the job")
    if command == "kubeflow":
        add("--image", help="the container image (default: the runtime's)")
        add(
            "--runtime",
            default="torch-distributed",
            help="ClusterTrainingRuntime (default: torch-distributed)",
        )

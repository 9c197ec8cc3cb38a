"""What can be asked of the launcher on a command line, and what is refused before anything is started?"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dist_sparse.launch import kubeflow, sbatch
from dist_sparse.launch.command import additions, argv, plain_variables
from dist_sparse.launch.run import refuse_closed, run
from dist_sparse.launch.spec import LaunchSpec, Rendezvous, Resources

__all__ = ["main"]

_COMMANDS = {
    "local": "runs a job on this machine (the command when none is given)",
    "torchrun": "runs this machine's part of a job on several; the same on each of them",
    "sbatch": "writes a script for Slurm's sbatch",
    "kubeflow": "writes a TrainJob for Kubeflow Trainer v2",
}

_EXAMPLES = """\
{prog} --nproc 2 examples/dlrm/main.py -- --epochs 1
{prog} --nproc gpu -m my.training -- --lr 0.1
{prog} --print --nproc 2 train.py
{prog} torchrun --nnodes 2 --nproc 8 --rdzv-endpoint node1:29400 --rdzv-id ID train.py
{prog} sbatch --nnodes 2 --nproc 8 --gpus 8 --cpus 64 --time 02:00:00 train.py > job.sh
{prog} kubeflow --nnodes 2 --nproc 8 --gpus 8 --image registry/me/train:1 train.py > job.yaml
"""

_ENVIRONMENT = """\
Ranks inherit the environment. Where it does not say otherwise they get PYTHONHASHSEED=0 and, where the number of
processes is given as one, OMP_NUM_THREADS = the machine's cores / processes, at least 1 (torchrun alone sets 1);
on one node also GLOO_SOCKET_IFNAME=lo. PET_ variables, which torchrun would take options from, are not passed on.
"""


def main(words: Sequence[str] | None = None, *, prog: str = "python -m launch") -> int:
    """Does what the words (those of the process by default) say; returns the job's exit status, or 2 for bad words.

    It is 1, and one line says why, where a file or an output can't be written, and 141 where nobody reads the output.
    """
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] not in (*_COMMANDS, "-h", "--help"):
        words.insert(0, "local")
    parser, of_command = _parsers(prog)
    options = parser.parse_args(words)
    try:
        return _do(options)
    except (ValueError, ImportError) as error:
        of_command[options.command].error(str(error))
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # as other programs end whose reader goes away
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace) -> int:
    spec = _spec(options)
    if options.command in ("local", "torchrun"):
        if not options.print:
            return run(spec, colour=options.color)
        variables = plain_variables(spec) | additions(spec, os.environ)
        assignments = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
        text = " ".join([*assignments, shlex.join(argv(spec))]) + "\n"
        _write(text, _as_given(text))
    elif options.command == "sbatch":
        text = sbatch.render(spec, port=options.rdzv_port)
        _write(text, _as_given(text), options.output)
    else:
        text = kubeflow.render(spec, runtime=options.runtime, namespace=options.namespace)
        _write(text, text.encode("utf-8"), options.output)  # YAML is that in every locale
    return 0


def _as_given(text: str) -> bytes:
    """With words in the bytes in which a shell gave them; UTF-8 for those from Python that the locale has none for."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


def _write(text: str, data: bytes, file: Path | None = None) -> None:
    if file is not None:
        file.write_bytes(data)
        return
    refuse_closed()
    try:
        sys.stdout.flush()  # what was printed before comes before
        buffer = getattr(sys.stdout, "buffer", None)
        if buffer is None:  # an io.StringIO, or a notebook
            sys.stdout.write(text)
        else:
            buffer.write(data)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try once more when it ends
        raise


def _spec(options: argparse.Namespace) -> LaunchSpec:
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    given = vars(options)
    return LaunchSpec(
        script=None if options.module else options.script,
        module=options.script if options.module else None,
        args=tuple(args),
        name=options.name or _name(options.script),
        nnodes=given.get("nnodes", "1"),
        nproc_per_node=int(options.nproc) if options.nproc.isdecimal() else options.nproc,
        rendezvous=Rendezvous(endpoint=_endpoint(given), id=given.get("rdzv_id"), local_addr=given.get("local_addr")),
        env=_env(options.env),
        max_restarts=options.max_restarts,
        grace=options.grace,
        resources=Resources(
            **{key: given.get(key) for key in ("cpu", "gpu", "memory_gib", "walltime", "partition", "account", "image")}
        ),
        python=options.python or ("python" if options.command == "kubeflow" else sys.executable),
    )


def _endpoint(given: dict[str, str | None]) -> str | None:
    variable = given.get("rdzv_host_env")
    if variable is None:
        return given.get("rdzv_endpoint")
    # Some schedulers leave the variable out on the very node that it would name.
    return f"{os.environ.get(variable) or 'localhost'}:{given['rdzv_port']}"


def _name(target: str) -> str:
    """A job's name from its script or module."""
    stem = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
    return re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-")[:53].rstrip("-") or "train"


def _env(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"Invalid --env {pair!r}: must be KEY=VALUE.")
    return dict(pair.split("=", 1) for pair in pairs)


def _parsers(prog: str) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=raw,
        description="Starts training scripts on several processes, or writes the file that makes a cluster do so.",
        epilog=f"{_ENVIRONMENT}\nexamples:\n{_EXAMPLES.format(prog=prog)}\nOptions of a command: {prog} COMMAND --help",
        usage=f"{prog} [COMMAND] [OPTIONS] SCRIPT [-- ARGS]",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    of_command = {}
    for command, what in _COMMANDS.items():
        own = commands.add_parser(
            command,
            prog=f"{prog} {command}",
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"{_ENVIRONMENT}\nexamples:\n{_EXAMPLES.format(prog=prog)}",
            formatter_class=raw,
            usage=f"{prog} {command} [OPTIONS] SCRIPT [-- ARGS]",
            allow_abbrev=False,
        )
        _add_options(own, command)
        of_command[command] = own
    return parser, of_command


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="what every rank runs; its ARGS follow it, after `--` if you like")
    add("args", nargs=argparse.REMAINDER, metavar="ARGS", help=argparse.SUPPRESS)
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in `python -m`")
    add("--nproc", default="1", metavar="N", help="processes on each node: a number, or gpu, cpu, auto (default: 1)")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="variable for the ranks; again for more")
    add("--max-restarts", type=int, default=0, metavar="N", help="starts after a rank has failed (default: 0)")
    add("--grace", type=int, default=30, metavar="S", help="seconds between a signal and SIGKILL (default: 30)")
    add("--name", help="of the job, of a-z 0-9 - (default: from SCRIPT)")
    add("--python", metavar="PATH", help="the interpreter (default: this one; for kubeflow `python`)")
    if command != "local":
        add("--nnodes", default="1", metavar="N|MIN:MAX", help="nodes (default: 1)")
    if command in ("local", "torchrun"):
        add("--color", choices=("auto", "always", "never"), default="auto", help="of the ranks' labels (default: auto)")
        add("--print", action="store_true", help="only prints the torchrun command; see docs/launching.md")
    if command == "torchrun":
        meet = parser.add_mutually_exclusive_group().add_argument
        meet("--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet: one of them, and a free port there")
        meet("--rdzv-host-env", metavar="KEY", help="instead: the variable that holds HOST; localhost if it is empty")
        add("--rdzv-id", metavar="ID", help="of this job, the same on all nodes; long and random is best")
        add("--local-addr", metavar="ADDRESS", help="under which the others reach this node (default: its host name)")
    if command in ("torchrun", "sbatch"):
        where = "where nodes meet" + (", with --rdzv-host-env" if command == "torchrun" else "")
        add("--rdzv-port", type=int, default=29400, metavar="PORT", help=f"{where} (default: 29400)")
    if command in ("sbatch", "kubeflow"):
        add("--cpus", dest="cpu", type=int, metavar="N", help="cores of a node")
        add("--gpus", dest="gpu", type=int, metavar="N", help="GPUs of a node")
        add("--memory-gib", type=int, metavar="N", help="memory of a node")
        add("--time", dest="walltime", metavar="[D-]HH:MM:SS", help="limit on the run")
        add("--output", type=Path, metavar="FILE", help="where to write (default: standard output)")
    if command == "sbatch":
        add("--partition", help="Slurm's")
        add("--account", help="Slurm's")
    if command == "kubeflow":
        add("--image", help="the container image (default: the runtime's)")
        add("--runtime", default="torch-distributed", help="ClusterTrainingRuntime (default: torch-distributed)")
        add("--namespace", help="(default: kubectl's)")

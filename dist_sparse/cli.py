"""What does the command `dist-sparse` do? It parses, calls one function of the package and prints what that returns.

A subcommand is a function that adds its parser and sets `run`, which takes the parsed options and returns the exit
status. What it calls is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the words (those of the process by default) name; returns the exit status.

    0 is success, 2 a wrong command line; the rest is the subcommand's own.
    """
    parser = argparse.ArgumentParser(prog="dist-sparse", description="Command line of dist_sparse.")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    _add_launch(commands)
    options = parser.parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _add_launch(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        try:
            from dist_sparse.launch.cli import main as launch
        except ModuleNotFoundError as error:
            if error.name != "dist_sparse.launch":
                raise
            print("dist-sparse launch: is not installed; in a clone there is `python -m launch`", file=sys.stderr)
            return 2
        return int(launch(options.words, prog="dist-sparse launch"))

    # The launcher parses for itself, `--help` included: with this prefix no word is an option here.
    parser = commands.add_parser(
        "launch",
        help="starts a training script on several processes, or writes files for Slurm and Kubeflow",
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())

"""Subcommand `completion`: the script with which a shell completes `dist-sparse`, written by shtab.

The script is static: no Python starts when a user presses the tab key.
"""

from __future__ import annotations

import argparse

from dist_sparse.cli.output import fail, show
from dist_sparse.cli.parsing import STATUS, Commands, Subcommand, subcommand

__all__ = ["add_completion"]

_COMPLETION = f"""examples:
  eval "$(dist-sparse completion bash)"       for this shell; bash or zsh
  dist-sparse completion fish | source        for this shell; fish
  dist-sparse completion bash > ~/.local/share/bash-completion/completions/dist-sparse
  dist-sparse completion zsh > DIR/_dist-sparse      DIR is in $fpath
  dist-sparse completion fish > ~/.config/fish/completions/dist-sparse.fish

Completes commands, options, their values and files, without starting Python.
Needs shtab: pip install shtab.

{STATUS}
"""


def add_completion(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Add the subcommand; ``parser`` is that of `dist-sparse`, with all of its subcommands when it
    runs."""

    def run(options: argparse.Namespace) -> int:
        # An extra: nothing else needs it.
        try:
            import shtab
        except ImportError:
            return fail("completion", "needs shtab: pip install shtab.")
        from dist_sparse.launch.cli import add_options

        # Whose words are parsed by the launcher, not here.
        launch = Subcommand(prog="dist-sparse launch")
        add_options(launch, "local")
        commands.choices["launch"] = launch
        for each in commands.choices.values():
            for action in each.paths:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
        return show(shtab.complete(parser, shell=options.shell).rstrip())

    added = subcommand(
        commands, "completion", "prints a script with which a shell completes commands", _COMPLETION
    )
    added.add_argument(
        "shell",
        metavar="SHELL",
        choices=("bash", "zsh", "fish"),
        help="the shell that reads it: bash, zsh or fish",
    )
    added.set_defaults(run=run)

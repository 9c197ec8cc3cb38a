"""Parsers of subcommands, and the options that several of them have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from dist_sparse.cli.output import complain
from dist_sparse.launch.parsing import options_of, refuse_option

Commands: TypeAlias = "argparse._SubParsersAction[Subcommand]"

STATUS = "exit status: 0 success, 1 failure (stderr says why), 2 wrong command line"


class Parser(argparse.ArgumentParser):
    """Parser whose errors are two lines: what is wrong, and which command shows the options."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: error: {message}\nUsage and options: {self.prog} --help")
        self.exit(2)


class Subcommand(Parser):
    """Parser of one subcommand. An unknown option is reported first, with the closest known one:
    argparse alone reports it last, with the usage of `dist-sparse`. Options are not abbreviated,
    since more options would change what they stand for.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]  # which has four overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if "-" in self.prefix_chars:  # `launch` parses its words itself
            self._refuse_unknown(words)
        found, left = super().parse_known_args(words, namespace)
        # Short options and words too many; long ones were refused above.
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _refuse_unknown(self, words: list[str]) -> None:
        known = options_of(self)
        for word in words:
            option = word.partition("=")[0]
            if option == "--":
                break  # what follows is no option
            if option.startswith("--") and option not in known:
                refuse_option(self, option)


def subcommand(commands: Commands, name: str, purpose: str, epilog: str) -> Subcommand:
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="prints JSON, sizes in bytes")

"""Parsers of subcommands, and the options that several of them have."""

from __future__ import annotations

import argparse
from typing import TypeAlias

__all__ = ["STATUS", "Commands", "add_json", "subcommand"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

STATUS = "exit status: 0 success, 1 failure (one line says why), 2 invalid command line"


def subcommand(commands: Commands, name: str, purpose: str, epilog: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="prints JSON, sizes in bytes")

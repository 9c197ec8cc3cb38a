"""Unknown words on a command line, refused with the closest known one."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a parser."""
    # argparse has no public list of them: in its help each begins a line, after a short form.
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", parser.format_help(), re.MULTILINE)


def refuse_option(parser: argparse.ArgumentParser, option: str) -> NoReturn:
    """End with status 2 and the closest option of the parser."""
    parser.error(f"there is no option {option}{closest(option, options_of(parser))}")


def closest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: a full stop, and a question that has the closest of ``known``,
    if one is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f". Did you mean {close[0]}?" if close else "."

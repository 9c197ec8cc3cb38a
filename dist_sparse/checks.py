"""Checks of arguments: integers, numbers, levels, choices, block shapes, names and globs, by one
rule each.

NumPy scalars are accepted, bools are not numbers. Every error reads
``Invalid {name}={value!r}: must be ...``.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Collection, Iterable, Mapping

__all__ = ["choice", "integer", "level", "name_list", "number", "parse_block"]


def integer(
    name: str,
    value: object,
    *,
    least: int | None = None,
    most: int | None = None,
    of: str | None = None,
) -> int:
    """Return ``value`` as an int.

    Args:
        name: of the argument, for the message.
        least, most: the bounds, themselves allowed; None is no bound.
        of: the table whose configuration it is, for the message.

    Raises:
        ValueError: it is no integer (a bool or an integral float is none), or out of bounds.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        found = int(value)
        if (least is None or found >= least) and (most is None or found <= most):
            return found
    raise ValueError(f"Invalid {name}={value!r}{_of(of)}: must be an int{_bounds(least, most)}.")


def number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    most: float | None = None,
    of: str | None = None,
) -> float:
    """Return ``value`` as an int if it is one, else as a float.

    Args:
        name: of the argument, for the message.
        least, most: the bounds, themselves allowed; None is no bound.
        of: the table whose configuration it is, for the message.

    Raises:
        ValueError: it is no real number, not finite as a float, or out of bounds.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real) and _finite(value):
        found = int(value) if isinstance(value, numbers.Integral) else float(value)
        if (least is None or found >= least) and (most is None or found <= most):
            return found
    raise ValueError(
        f"Invalid {name}={value!r}{_of(of)}: must be a finite number{_bounds(least, most)}."
    )


def level(name: str, value: object) -> float:
    """Return a sparsity level as a float.

    Raises:
        ValueError: it is no number in [0, 1].
    """
    if (
        not isinstance(value, bool)
        and isinstance(value, numbers.Real)
        and _finite(value)
        and 0 <= float(value) <= 1
    ):
        return float(value)
    raise ValueError(f"Invalid {name}={value!r}: must be a number in [0, 1].")


def name_list(name: str, value: object) -> tuple[str, ...]:
    """Return names or globs as a tuple: of one string, or of a collection of strings; None is none.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    given = (
        list(value) if isinstance(value, Collection) and not isinstance(value, Mapping) else None
    )
    if given is None or not all(isinstance(each, str) for each in given):
        raise ValueError(f"Invalid {name}={value!r}: must be a string or a sequence of strings.")
    return tuple(given)


def choice(name: str, value: object, known: Iterable[str], more: str = "") -> str:
    """Return the entry of ``known`` that ``value`` names; case does not matter.

    Args:
        name: of the argument, for the message.
        known: the allowed values.
        more: what else is allowed, for the message.

    Raises:
        ValueError: there is none; lists the known ones, and the closest.
    """
    spelled = {each.lower(): each for each in known}
    text = value.lower() if isinstance(value, str) else ""
    if text in spelled:
        return spelled[text]
    close = difflib.get_close_matches(text, spelled, n=1)
    hint = f" Did you mean {spelled[close[0]]!r}?" if close else ""
    listed = ", ".join(map(repr, spelled.values()))
    raise ValueError(f"Invalid {name}={value!r}: must be one of {listed}{more}.{hint}")


def parse_block(text: str) -> tuple[int | str, int | str]:
    """Return ``"1x4"``, ``"1,4"``, ``"row"``, ``"2xrow"``, ``"col"`` or ``"colx4"`` as a sparse
    block shape; case does not matter.

    Raises:
        ValueError: it is no such shape.

    Example::

        >>> from dist_sparse.checks import parse_block
        >>> parse_block("1x4"), parse_block("row"), parse_block("col")
        ((1, 4), (1, 'ROW'), ('COL', 1))
    """
    given = {"row": "1xrow", "col": "colx1"}.get(shape := text.strip().lower(), shape)
    match = re.fullmatch(r"([1-9]\d*|col) *[x,] *([1-9]\d*|row)", given, re.ASCII)
    if match is None or match.groups() == ("col", "row"):
        raise ValueError(
            f"Invalid block {text!r}: must be ROWSxCOLUMNS, such as 1x4, row for whole rows, or col"
            " for whole columns."
        )
    return "COL" if match[1] == "col" else int(match[1]), (
        "ROW" if match[2] == "row" else int(match[2])
    )


def _finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an int that no float can hold
        return False


def _of(name: str | None) -> str:
    return "" if name is None else f" of {name!r}"


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" in [{least}, {most}]"
    if least is not None:
        return f" >= {least}"
    return "" if most is None else f" <= {most}"

"""Plain values: checks of arguments, one rule each, and JSON that ranks compare and states hold.

NumPy scalars are accepted, bools are not numbers. Every error reads
``Invalid {name}={value!r}: must be ...``.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import math
import numbers
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

Json = Any

UNTOUCHED: Final = "untouched"
"""In the place of a level: all rows that training has never looked up, and no others."""


def integer(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    of: str | None = None,
) -> int:
    """Return ``value`` as an int.

    Args:
        name: of the argument, for the message.
        least, most: the bounds, themselves allowed.
        of: the table whose configuration it is, for the message.

    Raises:
        ValueError: it is no integer (a bool or an integral float is none), or out of bounds.
    """
    found = _finite(value)
    if isinstance(found, int) and least <= found <= most:
        return found
    raise _out_of_bounds(name, value, of, "an int", least, most)


def number(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    of: str | None = None,
) -> float:
    """Return ``value`` as an int if it is one, else as a float.

    Args:
        name: of the argument, for the message.
        least, most: the bounds, themselves allowed.
        of: the table whose configuration it is, for the message.

    Raises:
        ValueError: it is no real number, not finite as a float, or out of bounds.
    """
    found = _finite(value)
    if least <= found <= most:
        return found
    raise _out_of_bounds(name, value, of, "a finite number", least, most)


def level(name: str, value: object) -> float:
    """Return a sparsity level as a float.

    Raises:
        ValueError: it is no number in [0, 1].
    """
    found = _finite(value)
    if 0 <= found <= 1:
        return float(found)
    # 80 is 80%, written in the other common unit.
    meant = f" Did you mean {found / 100:g}?" if 1 < found <= 100 else ""
    raise ValueError(f"Invalid {name}={value!r}: must be a number in [0, 1].{meant}")


def scheduled_level(name: str, value: object) -> Any:
    """Return a level as :func:`level` does, or :data:`UNTOUCHED` as it is.

    Raises:
        ValueError: it is neither.
    """
    if value == UNTOUCHED:
        return UNTOUCHED
    if not isinstance(value, str):
        return level(name, value)
    known = f"must be a number in [0, 1], or {UNTOUCHED!r}"
    raise ValueError(f"Invalid {name}={value!r}: {known}.{_meant_by(value)}")


def _meant_by(text: str) -> str:
    """Return a question that has the level which ``text`` is close to; "" without one."""
    number = re.fullmatch(r"(\d*\.?\d+) ?(%?)", text, re.ASCII)
    if number is not None:
        share = float(number[1]) / (100 if number[2] else 1)
        return f" Did you mean {share:g}?" if share <= 1 else ""
    return f" Did you mean {UNTOUCHED!r}?" if _close(text.lower(), [UNTOUCHED]) else ""


def name_list(name: str, value: object) -> tuple[str, ...]:
    """Return names or globs as a tuple: of one string, or of a collection of strings; None is none.

    Raises:
        ValueError: it is something else.
    """
    given: object = () if value is None else value
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Collection) and not isinstance(given, Mapping):
        names = tuple(given)
        if all(isinstance(each, str) for each in names):
            return names
    raise ValueError(f"Invalid {name}={value!r}: must be a string or a sequence of strings.")


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
    close = _close(text, spelled)
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
    shape = text.strip().lower()
    shape = {"row": "1xrow", "col": "colx1"}.get(shape, shape)
    match = re.fullmatch(r"([1-9]\d*|col) *[x,] *([1-9]\d*|row)", shape, re.ASCII)
    if match is None or match.groups() == ("col", "row"):
        raise ValueError(
            f"Invalid block {text!r}: must be ROWSxCOLUMNS, such as 1x4, row for whole rows, or col"
            " for whole columns."
        )
    rows, columns = match.groups()
    return "COL" if rows == "col" else int(rows), "ROW" if columns == "row" else int(columns)


def _close(text: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(text, known, n=1)


def _finite(value: object) -> float:
    """Return a real number as an int if it is one, else as a float; NaN, which is in no bounds, if
    it is no real number, or not finite as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    with contextlib.suppress(OverflowError):  # an int that no float can hold
        if math.isfinite(value):
            return int(value) if isinstance(value, numbers.Integral) else float(value)
    return math.nan


def _out_of_bounds(
    name: str, value: object, of: str | None, kind: str, least: float, most: float
) -> ValueError:
    table = "" if of is None else f" of {of!r}"
    bounds = "" if least == -math.inf else f" >= {least}"
    if most < math.inf:
        bounds = f" in [{least}, {most}]"
    return ValueError(f"Invalid {name}={value!r}{table}: must be {kind}{bounds}.")


# JSON.


def plain(value: Any) -> Any:
    """Return Python's number for a NumPy scalar or a tensor of no dimension, and any other value as
    it is."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_scalar else value


def encode(value: Json) -> bytes:
    """Return any value as JSON, with sorted keys.

    It never raises: an error here, on one rank, would leave the others waiting. Of types that JSON
    does not have the name remains, and so it does of an entry that JSON can't hold.
    """
    if not isinstance(value, dict):
        return _text(value).encode()
    # Entry by entry, so that one that JSON can't hold does not hide the others.
    entries = sorted(f"{json.dumps(str(key))}: {_text(item)}" for key, item in value.items())
    return f"{{{', '.join(entries)}}}".encode()


def _text(value: Json) -> str:
    try:
        return json.dumps(value, default=_plain_or_name, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        # Keys of several types, a container that holds itself, an int of 5,000 digits.
        return json.dumps(f"<{type(value).__name__}>")


def _plain_or_name(value: Any) -> Json:
    found = plain(value)
    return f"<{type(value).__name__}>" if found is value else found


def digest(value: Json) -> int:
    """Return 64 bits of a hash of any value, signed."""
    hashed = hashlib.blake2b(encode(value), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def to_json(what: str, value: Json) -> str:
    """Return ``value`` as JSON for a saved state: numbers, text, None, and mappings, lists and
    tuples of those.

    Raises:
        ValueError: it has something else; ``what`` is for the message.
    """

    def plain_only(other: Any) -> Json:
        found = plain(other)
        if found is other:
            raise ValueError(
                f"Invalid {type(other).__name__} in {what}: it is saved as JSON, which has no such"
                " type."
            )
        return found

    return json.dumps(value, default=plain_only)


def from_json(what: str, text: Any) -> dict[str, Json]:
    """Return the mapping that :func:`to_json` has made text of; what were lists are tuples.

    Raises:
        ValueError: it is not the text of a mapping; ``what`` is for the message.
    """
    with contextlib.suppress(TypeError, ValueError):
        value = _with_tuples(json.loads(text))
        if isinstance(value, dict):
            return value
    shown = reprlib.repr(text)
    raise ValueError(f"Invalid state: {what} must be a mapping as JSON, and are {shown}.")


def _with_tuples(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value

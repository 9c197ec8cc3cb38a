"""Plain values: checks of arguments, one rule each, and JSON that ranks compare, states hold and
files seal.

NumPy scalars are accepted, bools are not numbers. Every error reads
``Invalid {name}={value!r}: must be ...``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import numbers
import os
import re
import reprlib
import zlib
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

Json = Any

# In the place of a level: all rows that training has never looked up, and no others.
UNTOUCHED = "untouched"


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
    if not isinstance(found, int):
        found = math.nan
    return int(_bounded(found, name, value, of, "an int", least, most))


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
    return _bounded(_finite(value), name, value, of, "a finite number", least, most)


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
    if isinstance(value, str):
        return choice(name, value, [UNTOUCHED], " or a number in [0, 1]")
    return level(name, value)


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
    hints = [f" Did you mean {spelled[each]!r}?" for each in get_close_matches(text, spelled, n=1)]
    listed = ", ".join(map(repr, spelled.values()))
    raise ValueError(f"Invalid {name}={value!r}: must be one of {listed}{more}.{''.join(hints)}")


def refuse(rules: Mapping[str, object]) -> None:
    """Raise a ValueError with the first text whose value is true, if one is.

    For several rules about one thing; a rule by itself is an ``if``.
    """
    for text, holds in rules.items():
        if holds:
            raise ValueError(text)


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


def _finite(value: object) -> float:
    """Return a real number as an int if it is one, else as a float; NaN, which is in no bounds, if
    it is no real number, or not finite as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    with contextlib.suppress(OverflowError):  # an int that no float can hold
        if math.isfinite(value):
            return int(value) if isinstance(value, numbers.Integral) else float(value)
    return math.nan


def _bounded(
    found: float, name: str, value: object, of: str | None, kind: str, least: float, most: float
) -> float:
    if least <= found <= most:
        return found
    table = "" if of is None else f" of {of!r}"
    bounds = "" if least == -math.inf else f" >= {least}"
    if most < math.inf:
        bounds = f" in [{least}, {most}]"
    raise ValueError(f"Invalid {name}={value!r}{table}: must be {kind}{bounds}.")


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
    def plain_or_name(other: Any) -> Json:
        found = plain(other)
        return f"<{type(other).__name__}>" if found is other else found

    try:
        return json.dumps(value, default=plain_or_name, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        # Keys of several types, a container that holds itself, an int of 5,000 digits.
        return json.dumps(f"<{type(value).__name__}>")


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


# Files that are whole or refused: JSON that holds its own CRC32, and folders brought to disk.

# Around the last entry of a sealed text: the CRC32 of the text without that entry.
_END = "\n}"
_CRC = ',\n "crc32": "'
_CLOSED = f'"{_END}\n'


def hex_of(crc: int) -> str:
    """Return a checksum as files hold it: of a CRC32 8 hexadecimal digits."""
    return f"{crc:08x}"


def sealed(entries: Mapping[str, Any]) -> str:
    """Return ``entries`` as JSON that ends with the CRC32 of the text without it.

    Raises:
        ValueError, TypeError: a value is none of JSON's.
    """
    text = json.dumps(entries, indent=1, allow_nan=False)
    return f"{text.removesuffix(_END)}{_CRC}{hex_of(zlib.crc32(text.encode()))}{_CLOSED}"


def unsealed(text: str, form: str, version: int) -> dict[str, Any]:
    """Return what was passed to :func:`sealed`, in which ``format`` and ``version`` are the given
    ones.

    Raises:
        ValueError: the text is not exactly that.
    """
    body, _, crc = text.rpartition(_CRC)
    if crc != f"{hex_of(zlib.crc32((body + _END).encode()))}{_CLOSED}":
        raise ValueError("its CRC32 does not fit: it is damaged, was edited, or is another file")
    try:
        entries = json.loads(body + _END)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    found = entries.get("format") if isinstance(entries, dict) else None
    if found != form:
        raise ValueError(f"it does not say that its format is {form!r}, but {found!r}")
    if entries.get("version") != version:
        raise ValueError(
            f"version {entries.get('version')!r} is not {version}, the one that this release reads"
        )
    return dict(entries)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring the entries of a folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

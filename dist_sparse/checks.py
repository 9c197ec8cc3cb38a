"""Checks of arguments, one function per rule; and JSON for comparing ranks, for states and files.

NumPy scalars are numbers, bools are not. Every error reads ``Invalid {name}={value!r}: must be
...``.
"""

import contextlib
import hashlib
import json
import math
import numbers
import os
import re
import reprlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

Json = Any

# A level as text: prune exactly the rows that training has never looked up.
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
    number = _finite(value)
    # NaN is in no bounds.
    if not isinstance(number, int):
        number = math.nan
    return int(_bounded(number, name, value, of, "an int", least, most))


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
    number = _finite(value)
    if 0 <= number <= 1:
        return float(number)
    # A percentage, such as 80.
    hint = f" Did you mean {number / 100:g}?" if 1 < number <= 100 else ""
    raise ValueError(f"Invalid {name}={value!r}: must be a number in [0, 1].{hint}")


def scheduled_level(name: str, value: object) -> Any:
    """Return a level as :func:`level` does, or :data:`UNTOUCHED` as it is.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        return choice(name, value, [UNTOUCHED], ", 'auto' (for all tables) or a number in [0, 1]")
    return level(name, value)


def name_list(name: str, value: object) -> tuple[str, ...]:
    """Return one string, a collection of strings or None as a tuple of names or globs.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Collection) and not isinstance(value, Mapping):
        names = tuple(value)
        if all(isinstance(entry, str) for entry in names):
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
    # Each entry as it is spelled, by its lower case.
    spelled = {entry.lower(): entry for entry in known}
    text = value.lower() if isinstance(value, str) else ""
    if text in spelled:
        return spelled[text]
    hints = [f" Did you mean {spelled[close]!r}?" for close in get_close_matches(text, spelled, 1)]
    listed = ", ".join(map(repr, spelled.values()))
    raise ValueError(f"Invalid {name}={value!r}: must be one of {listed}{more}.{''.join(hints)}")


def refuse(rules: Mapping[str, object]) -> None:
    """Raise a ValueError with the text of the first broken rule, if any.

    Args:
        rules: error texts, each with a value that is true if the rule is broken.
    """
    for text, is_broken in rules.items():
        if is_broken:
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
    """Return a real number as an int if it is one, else as a float. Anything else is NaN, which is
    in no bounds: no number, infinite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    # isfinite() raises it for an int that is too large for a float.
    with contextlib.suppress(OverflowError):
        if math.isfinite(value):
            return int(value) if isinstance(value, numbers.Integral) else float(value)
    return math.nan


def _bounded(
    number: float, name: str, value: object, of: str | None, kind: str, least: float, most: float
) -> float:
    if least <= number <= most:
        return number
    table = "" if of is None else f" of {of!r}"
    bounds = "" if least == -math.inf else f" >= {least}"
    if most < math.inf:
        bounds = f" in [{least}, {most}]"
    raise ValueError(f"Invalid {name}={value!r}{table}: must be {kind}{bounds}.")


# JSON.


def plain(value: Any) -> Any:
    """Return a NumPy scalar or a 0-dimensional tensor as a Python number, other values
    unchanged."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_scalar else value


def encode(value: Json) -> bytes:
    """Return any value as JSON, with sorted keys.

    It never raises, because an error on one rank would leave the others waiting. A value that JSON
    can't hold is replaced by the name of its type.
    """
    if not isinstance(value, dict):
        return _json_text(value).encode()
    # Entry by entry: one that JSON can't hold must not hide differences in the others.
    entries = sorted(f"{json.dumps(str(key))}: {_json_text(item)}" for key, item in value.items())
    return f"{{{', '.join(entries)}}}".encode()


def _json_text(value: Json) -> str:
    def plain_or_name(other: Any) -> Json:
        converted = plain(other)
        return f"<{type(other).__name__}>" if converted is other else converted

    try:
        return json.dumps(value, default=plain_or_name, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        # Such as keys of several types, a list that contains itself, an int of 5,000 digits.
        return json.dumps(f"<{type(value).__name__}>")


def digest(value: Json) -> int:
    """Return a 64-bit hash of any value as a signed int, which fits an int64 tensor."""
    hashed = hashlib.blake2b(encode(value), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def to_json(what: str, value: Json) -> str:
    """Return ``value`` as JSON for a saved state: numbers, text, None, and mappings, lists and
    tuples of those.

    Raises:
        ValueError: it has something else; ``what`` is for the message.
    """

    def plain_only(other: Any) -> Json:
        converted = plain(other)
        if converted is other:
            raise ValueError(
                f"Invalid {type(other).__name__} in {what}: it is saved as JSON, which has no such"
                " type."
            )
        return converted

    return json.dumps(value, default=plain_only)


def from_json(what: str, text: Any) -> dict[str, Json]:
    """Return the mapping whose text :func:`to_json` returned. Lists become tuples.

    Raises:
        ValueError: the text is not that of a mapping; ``what`` is for the message.
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


# Files that are refused if they are damaged: JSON whose last entry is the CRC32 of the text without
# that entry.

# The parts of a sealed text around its CRC32.
_END = "\n}"
_CRC = ',\n "crc32": "'
_CLOSED = f'"{_END}\n'


def hex_of(crc: int) -> str:
    """Return a checksum as in files: of a CRC32 8 hexadecimal digits."""
    return f"{crc:08x}"


@contextlib.contextmanager
def refusing(path: object) -> Iterator[None]:
    """Name a file in errors about what is in it; errors of the disk name it themselves."""
    try:
        yield
    except OSError:
        raise
    # Malformed JSON and pickles may raise any exception.
    except Exception as error:
        raise ValueError(f"{path} is refused: {fault_of(error)[:300]}.") from None


def fault_of(error: Exception) -> str:
    """Return what is wrong in a file or a state whose reading has raised ``error``."""
    if isinstance(error, ValueError):
        return str(error)
    return f"an entry is missing or of another type: {error!r}"


def sealed(entries: Mapping[str, Any]) -> str:
    """Return ``entries`` as JSON that ends with the CRC32 of the text without it.

    Raises:
        ValueError, TypeError: a value is none of JSON's.
    """
    text = json.dumps(entries, indent=1, allow_nan=False)
    return f"{text.removesuffix(_END)}{_CRC}{hex_of(zlib.crc32(text.encode()))}{_CLOSED}"


def unsealed(text: str, form: str, version: int) -> dict[str, Any]:
    """Return the entries that were passed to :func:`sealed`.

    Raises:
        ValueError: the text is damaged, or its ``format`` or ``version`` is another.
        AttributeError: it is no mapping.
    """
    body, _, crc = text.rpartition(_CRC)
    if crc != f"{hex_of(zlib.crc32((body + _END).encode()))}{_CLOSED}":
        raise ValueError("its CRC32 does not fit: it is damaged, was edited, or is another file")
    entries: dict[str, Any] = json.loads(body + _END)
    found, number = entries.get("format"), entries.get("version")
    refuse(
        {
            f"its format is {found!r}, not {form!r}": found != form,
            f"version {number!r} is not {version}, the one that this release reads": (
                number != version
            ),
        }
    )
    return entries


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the entries of a folder to disk: fsync() of a file does not write its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

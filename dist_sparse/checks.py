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
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from difflib import get_close_matches
from functools import partial
from pathlib import Path
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
        ValueError: it is not an integer (a bool or an integral float is not one), or out of bounds.
    """
    # Most values are Python's ints.
    if type(value) is int and least <= value <= most:
        return value
    number = _finite(value)
    # NaN is outside any bounds.
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
        ValueError: it is not a real number, not finite as a float, or out of bounds.
    """
    return _bounded(_finite(value), name, value, of, "a finite number", least, most)


def level(name: str, value: object) -> float:
    """Return a sparsity level as a float.

    Raises:
        ValueError: it is not a number in [0, 1].
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
        return choice(name, value, [UNTOUCHED], " or a number in [0, 1]")
    return level(name, value)


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_budget(budget: object) -> float:
    """Return a budget as bytes, an int, or as a fraction, a float. Text means the same as on a
    command line.

    Args:
        budget: a number of bytes, a fraction, or text: ``"4096"``, ``"512MiB"``, ``"20%"``,
            ``"0.2"``.

    Raises:
        ValueError: it is none of these, or a few bytes where a percentage is meant.

    Example::

        >>> from dist_sparse.checks import parse_budget
        >>> parse_budget("20%"), parse_budget(1 << 20), parse_budget("1 MiB")
        (0.2, 1048576, 1048576)
    """
    value = _number_of(budget) if isinstance(budget, str) else budget
    # The type tells: 100 is bytes, 1.0 all of them. type(), because a bool is an int too.
    if type(value) is int and value >= 0:
        refuse_few_bytes(value)
        return value
    if type(value) is float and 0 <= value <= 1:
        return value
    raise ValueError(
        f"Invalid {budget=}: must be bytes (an int >= 0), a fraction (a float up to 1.0), or text"
        " such as '20%' or '512MiB'."
    )


def _number_of(text: str) -> float | None:
    """Return the bytes or the fraction that a text means; None if it means neither."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d*)?) ?(%|[KMGT]iB|)", text, re.ASCII)
    if match is None:
        return None
    number, unit = match.groups()
    if unit == "%":
        return float(number) / 100
    if unit:
        return int(float(number) * _UNITS[unit])
    return float(number) if "." in number else int(number)


def refuse_few_bytes(budget: int) -> None:
    """Refuse a budget of 1 to 99 bytes: whoever writes it means a percentage.

    Raises:
        ValueError: it is one; asks for the percentage.
    """
    if 1 <= budget <= 99:
        raise ValueError(f"No table fits in {budget} bytes. Did you mean {budget}%?")


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


def flag(name: str, value: object) -> bool:
    """Return a bool as it is.

    Raises:
        ValueError: it is another value.
    """
    if not isinstance(value, bool):
        raise ValueError(f"Invalid {name}={value!r}: must be True or False.")
    return value


def keys(
    what: str, mapping: Any, needed: Set[str], optional: Set[str] | None = frozenset()
) -> None:
    """Refuse anything but a mapping with the keys ``needed`` and perhaps some of ``optional``; None
    allows any others.

    Raises:
        ValueError: names the missing and the unknown keys.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{what} must be a mapping, and is of type {type(mapping).__name__}.")
    missing = sorted(needed - mapping.keys())
    if missing:
        raise ValueError(f"{what} lacks {missing}; it has {sorted(map(str, mapping))}.")
    unknown = [] if optional is None else sorted(mapping.keys() - needed - optional)
    if unknown:
        raise ValueError(
            f"{what} has the unknown keys {unknown}: it belongs to other tables,"
            " or to a newer release."
        )


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


def parse_block(text: str) -> tuple[int | str, int | str]:
    """Return ``"1x4"``, ``"1,4"``, ``"row"``, ``"2xrow"``, ``"col"`` or ``"colx4"`` as a sparse
    block shape; case does not matter.

    Raises:
        ValueError: it is not such a shape.

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
    """Return a real number as an int if it is one, else as a float. Anything else becomes NaN,
    which is outside any bounds: what is not a number, is infinite, or is too large for a float."""
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


def json_bytes(value: Json) -> bytes:
    """Return any value as JSON, with sorted keys.

    It never raises, because an error on one rank would leave the others waiting. A value that JSON
    can't hold is replaced by the name of its type.
    """
    if not isinstance(value, dict):
        return _json_text(value).encode()
    # Entry by entry: one that JSON can't hold must not hide differences in the others.
    entries = sorted([f"{json.dumps(str(key))}: {_json_text(item)}" for key, item in value.items()])
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
    hashed = hashlib.blake2b(json_bytes(value), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def to_json(what: str, value: Json) -> str:
    """Return ``value`` as JSON for a saved state: numbers, text, None, and mappings, lists and
    tuples of these.

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
        ValueError: the text does not hold a mapping; ``what`` is for the message.
    """
    with contextlib.suppress(TypeError, ValueError):
        value = json.loads(text, object_hook=_with_tuples)
        if isinstance(value, dict):
            return value
    shown = reprlib.repr(text)
    raise ValueError(f"Invalid state: {what} must be a mapping as JSON, and are {shown}.")


def _with_tuples(entries: dict[str, Any]) -> dict[str, Json]:
    """Return a JSON object with tuples in place of lists."""
    return {
        key: _as_tuple(value) if isinstance(value, list) else value
        for key, value in entries.items()
    }


def _as_tuple(values: list[Any]) -> tuple[Json, ...]:
    return tuple([_as_tuple(value) if isinstance(value, list) else value for value in values])


# Files that are refused if they are damaged: JSON whose last entry is the CRC32 of the text without
# that entry.

# The parts of a sealed text around its CRC32.
_END = "\n}"
_CRC = ',\n "crc32": "'
_CLOSED = f'"{_END}\n'


def hex_of(crc: int) -> str:
    """Return a checksum as files hold it: a CRC32 as 8 hexadecimal digits."""
    return f"{crc:08x}"


@contextlib.contextmanager
def refusing(path: object) -> Iterator[None]:
    """Name a file in errors about what is in it. Disk errors name it themselves. Neither they nor a
    lack of memory say anything about what is in it."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    # Malformed JSON and pickles may raise any exception.
    except Exception as error:
        raise ValueError(f"{path} is refused: {fault_of(error)[:300]}.") from None


def refuse_special(file: Path, *, link: bool = False) -> None:
    """Refuse to open anything that exists and is not a regular file: a pipe would block, a link
    could lead out of the folder.

    Args:
        file: of a folder that this package writes.
        link: allow a link to a regular file, or to nothing.
    """
    # NotADirectoryError: the folder is a file, which its caller refuses.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = file.stat() if link else file.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{file} is not a regular file: it is neither read nor written.")


def write_whole(file: Path, content: bytes, *, shared: bool = False) -> None:
    """Replace a file atomically: readers see the old file or the new one.

    It is private to the user (0600), or readable by all (0644, less the umask) if ``shared``.

    Raises:
        ValueError: it exists and is neither a regular file nor a link to one.
        OSError: it can't be written; names it. The old file is intact.
    """
    # The rename replaces a link, so that its target stays as it is. But not /dev/stdout.
    refuse_special(file, link=True)
    part = part_of(file)
    opener = partial(os.open, mode=0o644 if shared else 0o600)
    try:
        with open(part, "xb", opener=opener) as stream:
            stream.write(content)
        part.replace(file)
    except OSError as error:
        # The error of a full disk does not name the file.
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        part.unlink(missing_ok=True)


def part_of(file: Path) -> Path:
    """Return a new path beside ``file``, to be renamed to it once it is complete."""
    return file.with_name(f".{os.urandom(8).hex()}.part")


def fault_of(error: Exception) -> str:
    """Return what is wrong in a file or a state whose reading has raised ``error``."""
    if isinstance(error, ValueError):
        return str(error)
    return f"an entry is missing or of another type: {error!r}"


def sealed(entries: Mapping[str, Any]) -> str:
    """Return ``entries`` as JSON that ends with the CRC32 of the text without it.

    Raises:
        ValueError, TypeError: JSON can't hold a value.
    """
    text = json.dumps(entries, indent=1, allow_nan=False)
    return f"{text.removesuffix(_END)}{_CRC}{hex_of(zlib.crc32(text.encode()))}{_CLOSED}"


def unsealed(text: str, form: str, version: int) -> dict[str, Any]:
    """Return the entries that were passed to :func:`sealed`.

    Raises:
        ValueError: the text is damaged, or its ``format`` or ``version`` is a different one.
        AttributeError: it is not a mapping.
    """
    body, _, crc = text.rpartition(_CRC)
    if crc != f"{hex_of(zlib.crc32((body + _END).encode()))}{_CLOSED}":
        raise ValueError("its CRC32 does not fit: it is damaged, was edited, or is another file")
    entries: dict[str, Any] = json.loads(body + _END)
    found, number = entries.get("format"), entries.get("version")
    if found != form:
        raise ValueError(f"its format is {found!r}, not {form!r}")
    if number != version:
        raise ValueError(
            f"version {number!r} is not {version}, the one that this release reads: use the"
            " release of dist_sparse that wrote it, or write it again"
        )
    return entries


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the entries of a folder to disk: fsync() of a file does not write its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

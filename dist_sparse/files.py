"""Files that are whole or refused: JSON that holds its own CRC32, and folders brought to disk."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, Final

_END: Final = "\n}"
_CRC: Final = ',\n "crc32": "'
# Around the last entry of a sealed text: the CRC32 of the text without that entry.
_CLOSED: Final = f'"{_END}\n'


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

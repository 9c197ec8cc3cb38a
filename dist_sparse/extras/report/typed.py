"""Types of the values in the files of a run, which an editor or another program may have changed.

They come from annotations, which the dataclasses that are made of such values have anyway.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from dist_sparse.extras.report.words import shortened

# Types of JSON, as text for errors: one value, and several.
_TEXTS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "text"),
    bool: ("true or false", "true or false"),
    list: ("a list", "lists"),
    dict: ("a mapping", "mappings"),
    NoneType: ("null", "null"),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Types that a value may have in JSON, and the types of its items; without these, items may
    have any type. A list has ``length`` items, or any number of them if that is 0."""

    types: frozenset[type]
    items: frozenset[type]
    length: int

    def fits(self, value: object) -> bool:
        """Whether a value and its items have these types; numbers must be finite."""
        if not _has_type(value, self.types):
            return False
        if not self.items or not isinstance(value, list | dict):
            return True
        if self.length and len(value) != self.length:
            return False
        items = value.values() if isinstance(value, dict) else value
        return all(_has_type(item, self.items) for item in items)

    def __str__(self) -> str:
        texts = []
        for kind in _shown(self.types):
            text = _TEXTS[kind][0]
            if self.items and kind in (list, dict):
                number = f"{self.length} " if self.length else ""
                text += f" of {number}{' or '.join(_TEXTS[item][1] for item in _shown(self.items))}"
            texts.append(text)
        return " or ".join(texts)


def kinds_of(hints: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the kinds of values by their names, from their annotations."""
    return {name: _kind_of(hint) for name, hint in hints.items()}


def refuse_wrong(values: object, kinds: Mapping[str, Kind]) -> None:
    """Refuse a mapping with a value of another type. Keys may be missing.

    Raises:
        ValueError: names the key, the value and the type that it must have.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{shortened(values)} is not a mapping")
    for name, kind in kinds.items():
        if name in values and not kind.fits(values[name]):
            raise ValueError(f"{name} is {shortened(values[name])}; must be {kind}")


# Exceptions from reading what this package has not written.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def refusing_values(place: object, writer: str) -> Iterator[None]:
    """Name a file, and the function that writes it, in errors about its contents."""
    try:
        yield
    except _UNREADABLE as error:
        fault = str(error) if isinstance(error, ValueError) else shortened(error, most=200)
        if isinstance(error, KeyError):
            fault = f"it has no {error}"
        raise ValueError(f"{place} is not one that {writer} writes: {fault[:300]}.") from error


def _kind_of(hint: Any) -> Kind:
    types, items, length = set[type](), set[type](), 0
    for part in _parts_of(hint):
        origin = get_origin(part)
        if origin is Mapping:
            types.add(dict)
            items |= _types_of(get_args(part)[1:])
        elif origin in (Sequence, tuple):
            types.add(list)
            items |= _types_of(get_args(part))
            if origin is tuple and ... not in get_args(part):
                length = len(get_args(part))
        else:
            types |= _types_of([part])
    return Kind(frozenset(types), frozenset(items), length)


def _types_of(hints: Sequence[Any]) -> set[type]:
    """Return the types of JSON for annotations without items; none for Any and for ``...``."""
    types = set[type]()
    for hint in hints:
        for part in _parts_of(hint):
            if part is float:
                types |= {int, float}
            elif part in _TEXTS:
                types.add(part)
            elif part not in (Any, ...):
                # A dataclass: JSON has its fields.
                types.add(dict)
    return types


def _parts_of(hint: Any) -> Sequence[Any]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]


def _has_type(value: Any, types: frozenset[type]) -> bool:
    # type() and not isinstance(): True is not a number.
    kind = type(value)
    if kind is int or kind is float:
        # Not NaN, an infinity, or a whole number that overflows when it is divided.
        return kind in types and _LEAST < value < _MOST
    return kind in types


# Of float64, with room: the report subtracts values.
_LEAST, _MOST = -1e301, 1e301


def _shown(types: frozenset[type]) -> list[type]:
    # A number may be whole.
    return [kind for kind in _TEXTS if kind in types and (kind is not int or float not in types)]

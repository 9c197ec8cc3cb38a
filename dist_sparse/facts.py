"""Values that ranks compare before they act, and messages about values that differ.

Saved states hold their values as JSON too, exactly. The length of a message does not grow with the
number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "MOST_SHOWN",
    "cut",
    "digest",
    "encode",
    "explain_actions",
    "explain_errors",
    "explain_facts",
    "from_json",
    "ranks_text",
    "to_json",
]

Json = Any

# Faults in a message; the rest are counted.
MOST_SHOWN: Final = 3

_LONGEST_ERROR: Final = 1000
_LONGEST_VALUE: Final = 120

# Levels of nested containers that are compared; a container that holds itself has no end.
_DEEPEST: Final = 12


def encode(value: Json) -> bytes:
    """Return any value as JSON, with sorted keys."""
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: object, depth: int = 0) -> Json:
    """Return any ``value`` as JSON can hold it.

    It never raises: an error here, on one rank, would leave the others waiting. Numbers of NumPy
    become Python's; of types that JSON does not have the name remains, which is as much as ranks
    can compare.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)  # of a subclass, such as NumPy's
    if isinstance(value, numbers.Real):
        return _plain_number(value)
    if depth < _DEEPEST:
        if isinstance(value, dict):
            return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1) for item in value]
    return f"<{type(value).__name__}>"


def _plain_number(value: numbers.Real) -> Json:
    if isinstance(value, numbers.Integral):
        whole = int(value)
        # Python refuses to print longer ones.
        if whole.bit_length() >= 1024:
            return f"<int of {whole.bit_length()} bits, hash {hash(whole)}>"
        return whole
    try:
        return float(value)
    except OverflowError:
        return f"<{type(value).__name__}>"


def _key(key: object) -> str:
    """Return a key as text: keys of mixed types can't be sorted."""
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def digest(value: Json) -> int:
    """Return 64 bits of a hash of any value, signed."""
    return int.from_bytes(
        hashlib.blake2b(encode(value), digest_size=8).digest(), "little", signed=True
    )


def to_json(what: str, value: Json) -> str:
    """Return ``value`` as JSON for a saved state: numbers, text, None, and mappings, lists and
    tuples of those.

    Raises:
        ValueError: it has something else; ``what`` is for the message.
    """

    def plain(other: Any) -> Json:
        # A number of NumPy, a tensor of no dimension.
        if getattr(other, "ndim", None) == 0 and hasattr(other, "item"):
            return other.item()
        raise ValueError(
            f"Invalid {type(other).__name__} in {what}: it is saved as JSON, which has no such"
            " type."
        )

    return json.dumps(value, default=plain)


def from_json(what: str, text: object) -> dict[str, Json]:
    """Return the mapping that :func:`to_json` has made text of; what were lists are tuples.

    Raises:
        ValueError: it is not the text of a mapping; ``what`` is for the message.
    """
    try:
        value = _with_tuples(json.loads(text)) if isinstance(text, str) else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f"Invalid state: {what} must be a mapping as JSON, and are {cut(repr(text), 80)}."
        )
    return value


def _with_tuples(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def explain_errors(ranks: Sequence[int], reports: Sequence[Mapping[str, Json]]) -> str:
    """Return which ranks failed, and how: equal errors of several ranks once."""
    by_text: dict[str, list[int]] = {}
    for rank, report in zip(ranks, reports, strict=True):
        if report["error"]:
            by_text.setdefault(report["error"], []).append(rank)
    # Several errors share the room of one.
    longest = _LONGEST_ERROR if len(by_text) == 1 else _LONGEST_ERROR // 2
    shown: list[str] = []
    others: list[int] = []
    for text, at in by_text.items():
        if len(shown) < MOST_SHOWN:
            shown.append(f"{ranks_text(at)}: {cut(text, longest)}")
        else:
            others += at
    if others:
        shown.append(f"{ranks_text(sorted(others))}: other errors")
    action = reports[0]["action"]
    return f"{action} was refused on every rank, nothing was changed. " + " | ".join(shown)


def explain_actions(ranks: Sequence[int], reports: Sequence[Mapping[str, Json]]) -> str:
    """Return which ranks are about to do something else than the lowest one."""
    first = reports[0]["action"]
    by_action: dict[str, list[int]] = {}
    for rank, report in zip(ranks, reports, strict=True):
        if report["action"] != first:
            by_action.setdefault(report["action"], []).append(rank)
    faults = []
    for action, at in [*by_action.items()][:MOST_SHOWN]:
        verb = "is" if len(at) == 1 else "are"
        faults.append(
            f"{ranks_text(at)} {verb} at {action!r} while rank {ranks[0]} is at {first!r}"
        )
    return f"The ranks disagree at {first!r}, nothing was changed. " + "; ".join(faults)


def explain_facts(
    ranks: Sequence[int],
    action: str,
    keys: Sequence[str],
    values: Sequence[Mapping[str, Json]],
    count: int,
) -> str:
    """Return for each differing key the part of its value that differs, against the lowest rank's.

    Args:
        ranks: global ranks.
        action: what they were about to do.
        keys: the first of ``count`` keys that differ.
        values: for each rank, its values of those keys that it has.
    """
    faults: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in zip(ranks[1:], values[1:], strict=True):
        for key in keys:
            path, mine, other = _difference(
                values[0].get(key, "nothing"), theirs.get(key, "nothing")
            )
            if mine != other:
                faults.setdefault((f"{key}{path}", other, mine), []).append(rank)
    # A key may differ in two ways between ranks.
    most = 2 * MOST_SHOWN
    shown = []
    for (key, other, mine), at in [*faults.items()][:most]:
        shown.append(f"{key} is {other} on {ranks_text(at)} and {mine} on rank {ranks[0]}")
    if len(faults) > most or count > len(keys):
        shown.append("...")
    return f"The ranks disagree at {action!r}, nothing was changed. " + "; ".join(shown)


def _difference(ours: Json, theirs: Json) -> tuple[str, str, str]:
    """Return the path to where two values first differ, and the text of both there."""
    path = ""
    while (inner := _first_difference(ours, theirs)) is not None:
        name, ours, theirs = inner
        path += name
    mine, other = str(ours), str(theirs)
    pairs = enumerate(zip(mine, other, strict=False))
    same = next((i for i, (one, two) in pairs if one != two), 0)
    if same > 20 and max(len(mine), len(other)) > _LONGEST_VALUE:
        # From shortly before the part that differs.
        mine, other = (cut(text[same - 20 :], _LONGEST_VALUE) for text in (mine, other))
        return path, f"...{mine}", f"...{other}"
    return path, cut(mine, _LONGEST_VALUE), cut(other, _LONGEST_VALUE)


def _first_difference(ours: Json, theirs: Json) -> tuple[str, Json, Json] | None:
    """Return the name and both values of the first entry that differs; None unless the values are
    containers of one kind that are better shown by entry."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            if _differ(ours.get(key), theirs.get(key)):
                return f": {key}", ours.get(key, "nothing"), theirs.get(key, "nothing")
        return None
    if not isinstance(ours, list) or not isinstance(theirs, list) or len(ours) != len(theirs):
        return None
    if max(len(str(ours)), len(str(theirs))) <= _LONGEST_VALUE // 2:
        return None  # short enough to show whole
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if _differ(mine, other):
            return f"[{i}]", mine, other
    return None


def _differ(ours: Json, theirs: Json) -> bool:
    """As text: NaN is NaN, and the types count too."""
    return json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True)


def cut(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Return the beginning of ``text``."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 7``, cut after a few."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(texts) > 8:
        texts = [*texts[:8], f"... ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"

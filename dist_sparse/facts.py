"""What ranks compare before they act: any value as JSON and as a digest, and messages about values
that differ.

Saved states hold their values as JSON too, exactly. The length of a message does not grow with the
number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Mapping, Sequence
from itertools import groupby
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

MOST_SHOWN: Final = 3
"""Faults in a message; the rest are counted."""

_LONGEST_ERROR: Final = 1000
_LONGEST_VALUE: Final = 120

_DEEPEST: Final = 12
"""Levels of nested containers that are compared; a container that holds itself has no end."""


def encode(value: Json) -> bytes:
    """Return any value as JSON, with sorted keys."""
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: object, depth: int = 0) -> Json:
    """``value`` as JSON can hold it, whatever it is: an error here, on one rank, would leave the
    others waiting.

    Numbers of NumPy become Python's; of what JSON does not have the type remains, which is as much
    as ranks can compare.
    """
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return (
            whole
            if whole.bit_length() < 1024
            else f"<int of {whole.bit_length()} bits, hash {hash(whole)}>"
        )
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return f"<{type(value).__name__}>"
    if depth < _DEEPEST and isinstance(value, dict):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return f"<{type(value).__name__}>"


def _key(key: object) -> str:
    """Keys as text: those of mixed types can't be sorted."""
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
    """Return who was wrong, and how: equal errors of several ranks once."""
    by_text: dict[str, list[int]] = {}
    for rank, report in zip(ranks, reports, strict=True):
        if report["error"]:
            by_text.setdefault(report["error"], []).append(rank)
    longest = _LONGEST_ERROR if len(by_text) == 1 else _LONGEST_ERROR // 2
    shown = [f"{ranks_text(at)}: {cut(text, longest)}" for text, at in by_text.items()]
    more = sorted(rank for at in list(by_text.values())[MOST_SHOWN:] for rank in at)
    rest = [f"{ranks_text(more)}: other errors"] if more else []
    return f"{reports[0]['action']} was refused on every rank, nothing was changed. " + " | ".join(
        shown[:MOST_SHOWN] + rest
    )


def explain_actions(ranks: Sequence[int], reports: Sequence[Mapping[str, Json]]) -> str:
    """Return which ranks are about to do something else than the lowest one."""
    first = reports[0]["action"]
    by_action: dict[str, list[int]] = {}
    for rank, report in zip(ranks, reports, strict=True):
        if report["action"] != first:
            by_action.setdefault(report["action"], []).append(rank)
    faults = [
        f"{ranks_text(at)} {'is' if len(at) == 1 else 'are'} at {action!r} while rank {ranks[0]} is"
        f" at {first!r}"
        for action, at in by_action.items()
    ]
    return f"The ranks disagree at {first!r}, nothing was changed. " + "; ".join(
        faults[:MOST_SHOWN]
    )


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
        keys: some of those that differ, of ``count``.
        values: for each rank, its values of those keys that it has.
    """
    faults: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in zip(ranks[1:], values[1:], strict=True):
        for key in keys:
            path, ours_text, theirs_text = _difference(
                values[0].get(key, "nothing"), theirs.get(key, "nothing")
            )
            if ours_text != theirs_text:
                faults.setdefault((f"{key}{path}", theirs_text, ours_text), []).append(rank)
    shown = [
        f"{key} is {text} on {ranks_text(at)} and {ours} on rank {ranks[0]}"
        for (key, text, ours), at in faults.items()
    ]
    hidden = max(len(shown) - 2 * MOST_SHOWN, count - len(keys))
    rest = ["..."] if hidden > 0 else []
    return f"The ranks disagree at {action!r}, nothing was changed. " + "; ".join(
        shown[: 2 * MOST_SHOWN] + rest
    )


def _difference(ours: Json, theirs: Json) -> tuple[str, str, str]:
    """Where two values first differ, as a path, and both there."""
    path = ""
    while True:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            keys = [
                key for key in sorted({*ours, *theirs}) if _differ(ours.get(key), theirs.get(key))
            ]
            if not keys:
                break
            path, ours, theirs = (
                f"{path}: {keys[0]}",
                ours.get(keys[0], "nothing"),
                theirs.get(keys[0], "nothing"),
            )
        elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            at = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if _differ(*pair)]
            if not at or max(len(str(ours)), len(str(theirs))) <= _LONGEST_VALUE // 2:
                break
            path, ours, theirs = f"{path}[{at[0]}]", ours[at[0]], theirs[at[0]]
        else:
            break
    mine, other = str(ours), str(theirs)
    same = next(
        (i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), 0
    )
    start = max(0, same - 20) if max(len(mine), len(other)) > _LONGEST_VALUE else 0
    mine, other = (
        ("..." if start else "") + cut(text[start:], _LONGEST_VALUE) for text in (mine, other)
    )
    return path, mine, other


def _differ(ours: Json, theirs: Json) -> bool:
    """As text: NaN is NaN, and the types count too."""
    return json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True)


def cut(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Return the beginning of ``text``."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 7``, cut after a few."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(texts) > 8:
        texts = [*texts[:8], f"... ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"

"""Messages about ranks that fail or differ. Their length does not grow with the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

Json = Any

# Faults in a message; the rest are counted.
MOST_SHOWN: Final = 3

_LONGEST_ERROR: Final = 1000
_LONGEST_VALUE: Final = 120


def explain_errors(ranks: Sequence[int], reports: Sequence[Mapping[str, Json]]) -> str:
    """Return which ranks failed, and how: equal errors of several ranks once."""
    by_text = _ranks_by(ranks, [report["error"] for report in reports])
    # Of ranks without an error.
    by_text.pop(None, None)
    shown: list[str] = []
    others: list[int] = []
    for text, at in by_text.items():
        if len(shown) < MOST_SHOWN:
            # Several errors share the room of one.
            shown.append(f"{ranks_text(at)}: {cut(text, _LONGEST_ERROR // min(len(by_text), 2))}")
        else:
            others += at
    if others:
        shown.append(f"{ranks_text(sorted(others))}: other errors")
    action = reports[0]["action"]
    return f"{action} was refused on every rank, nothing was changed. " + " | ".join(shown)


def explain_actions(ranks: Sequence[int], reports: Sequence[Mapping[str, Json]]) -> str:
    """Return which ranks are about to do something else than the lowest one."""
    (first, _), *others = _ranks_by(ranks, [report["action"] for report in reports]).items()
    faults = []
    for action, at in others[:MOST_SHOWN]:
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
    """Return for each differing key both values, from where they differ, against the lowest rank's.

    Args:
        ranks: global ranks.
        action: what they were about to do.
        keys: the first of ``count`` keys that differ.
        values: for each rank, its values of those keys that it has.
    """
    shown = []
    for key in keys:
        differences = [_difference(key, theirs, values[0]) for theirs in values]
        (_, *others) = _ranks_by(ranks, differences).items()
        for (path, other, mine), at in others:
            shown.append(f"{path} is {other} on {ranks_text(at)} and {mine} on rank {ranks[0]}")
    # A key may differ in two ways between ranks.
    most = 2 * MOST_SHOWN
    if len(shown) > most or count > len(keys):
        shown[most:] = ["..."]
    return f"The ranks disagree at {action!r}, nothing was changed. " + "; ".join(shown)


def _ranks_by(ranks: Sequence[int], values: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, in the order of the values."""
    found: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def _difference(key: str, ours: Json, theirs: Json) -> tuple[str, str, str]:
    """Return the path to an entry of two mappings, or to the first one in it that differs, and both
    texts, from shortly before the first difference."""
    one, other = ours.get(key, "nothing"), theirs.get(key, "nothing")
    if isinstance(one, dict) and isinstance(other, dict):
        for inner in sorted({*one, *other}):
            if str(one.get(inner)) != str(other.get(inner)):
                path, first, second = _difference(inner, one, other)
                return f"{key}: {path}", first, second
    texts = [str(one), str(other)]
    # Both are shown from the same place, where the beginning says nothing.
    same = len(os.path.commonprefix(texts)) - 20  # noqa: RUF071  # of any texts
    if same > 0 and max(map(len, texts)) > _LONGEST_VALUE:
        texts = [f"...{text[same:]}" for text in texts]
    first, second = (cut(text, _LONGEST_VALUE + 3) for text in texts)
    return key, first, second


def cut(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Return the beginning of ``text``."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 7``, cut after a few."""
    texts = []
    # Ranks that follow each other have one distance from their places.
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        first, *_, last = [rank for _, rank in run] * 2
        texts.append(f"{first}-{last}" if first < last else str(first))
    if len(texts) > 8:
        texts = [*texts[:8], f"... ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"

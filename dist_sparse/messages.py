"""Messages about ranks that fail or differ. Their length does not grow with the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

# Faults in a message; the rest are counted.
MOST_SHOWN = 3
_LONGEST_ERROR = 1000
_LONGEST_VALUE = 120


def explain_errors(ranks: Sequence[int], action: str, errors: Sequence[str | None]) -> str:
    """Return which ranks failed, and how: equal errors of several ranks once."""
    by_text = _ranks_by(ranks, errors)
    # Ranks without an error.
    by_text.pop(None, None)
    # Two errors or more share the length of one message.
    room = _LONGEST_ERROR // min(len(by_text), 2)
    texts = [*by_text.items()]
    # Once, and not cut: it says what to do.
    ending = _common_ending(by_text)
    shown = []
    for text, at in texts[:MOST_SHOWN]:
        shown.append(f"{ranks_text(at)}: {cut(text.removesuffix(ending), room)}")
    if len(texts) > MOST_SHOWN:
        others = chain.from_iterable(at for _, at in texts[MOST_SHOWN:])
        shown.append(f"{ranks_text(sorted(others))}: other errors")
    faults = " | ".join(shown)
    return f"{action} was refused on every rank, nothing was changed. {faults}{ending}"


def _common_ending(texts: Iterable[str]) -> str:
    """Return the last sentences that all texts share, with the end of the sentence before them:
    ``". Load it."``; of one text, all sentences but the first."""
    backwards = os.path.commonprefix([text[::-1] for text in texts])  # noqa: RUF071  # of any texts
    _, stop, sentences = backwards[::-1].partition(". ")
    return stop + sentences


def explain_actions(ranks: Sequence[int], actions: Sequence[str]) -> str:
    """Return the ranks that are about to do something other than the lowest one."""
    (first, _), *others = _ranks_by(ranks, actions).items()
    faults = []
    for action, at in others[:MOST_SHOWN]:
        faults.append(f"{ranks_text(at)} at {action!r} while rank {ranks[0]} is at {first!r}")
    return f"The ranks disagree at {first!r}, nothing was changed. " + "; ".join(faults)


def explain_facts(
    ranks: Sequence[int], action: str, keys: Sequence[str], values: Sequence[Mapping[str, Any]]
) -> str:
    """Return for each differing key both values, from where they differ: each rank's against the
    lowest rank's.

    Args:
        ranks: global ranks.
        action: what they were about to do.
        keys: the first ones that differ.
        values: for each rank, its values of these keys.
    """
    shown = []
    for key in keys:
        differences = [_difference(key, theirs, values[0]) for theirs in values]
        (_, *others) = _ranks_by(ranks, differences).items()
        for (path, other, mine), at in others:
            shown.append(f"{path} is {other} on {ranks_text(at)} and {mine} on rank {ranks[0]}")
    faults = cut("; ".join(shown))
    return f"The ranks disagree at {action!r}, nothing was changed. {faults}"


def _ranks_by(ranks: Sequence[int], values: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, in the order of the values."""
    found: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def _difference(key: str, ours: Any, theirs: Any) -> tuple[str, str, str]:
    """Return the path to an entry of two mappings, or to its first inner entry that differs, and
    both texts, from shortly before the first difference."""
    one, other = ours.get(key, "nothing"), theirs.get(key, "nothing")
    if {type(one), type(other)} == {dict}:
        for inner in sorted({*one, *other}):
            if str(one.get(inner)) != str(other.get(inner)):
                path, first, second = _difference(inner, one, other)
                return f"{key}: {path}", first, second
    texts = [str(one), str(other)]
    # A long common beginning is left out of both.
    same = len(os.path.commonprefix(texts)) - 20  # noqa: RUF071  # of any texts
    if same > 0:
        texts = [f"...{text[same:]}" for text in texts]
    return key, cut(texts[0], _LONGEST_VALUE + 3), cut(texts[1], _LONGEST_VALUE + 3)


def cut(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Return the beginning of ``text``."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def names_text(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are: ``a, b and 24 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 7``, cut after a few."""
    texts = []
    # In a run of consecutive ranks, rank minus position is constant.
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        first, last = members[0], members[-1]
        texts.append(f"{first}-{last}" if first < last else str(first))
    if len(texts) > 8:
        texts = [*texts[:8], f"... ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def differing(digests: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the keys that are not equal on all ranks, in the order of messages."""
    differing, missing = [], []
    for key in sorted(set().union(*digests)):
        values = {digest.get(key) for digest in digests}
        if None in values:
            missing.append(key)
        elif len(values) > 1:
            differing.append(key)
    # Last, facts that some rank has not added: usually a consequence of another difference.
    return differing + missing


def drifted(ranks: Sequence[int], hashes: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the replicas that differ from their first holder's, and the ranks where they do."""
    first: dict[str, int] = {}
    drifted: dict[str, list[int]] = {}
    # Ranks ascend, so the first value of a name is its first holder's.
    for rank, held in zip(ranks, hashes, strict=True):
        for name, value in held.items():
            if first.setdefault(name, value) != value:
                drifted.setdefault(name, []).append(rank)
    return drifted

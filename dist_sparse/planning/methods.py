"""What a frontier tries: for each budget and method, the candidates that use as much of it as they can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dist_sparse.planning.candidates import Candidate, SizedTable
from dist_sparse.planning.choices import Choices, column_fractions, least_removed, worth_rotating
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.serving.manifest import Dtype
from dist_sparse.tables.shards import COL, ROW

__all__ = ["METHODS", "Attempt", "Part", "attempts"]

METHODS: Final = {
    "bits": "bits alone",
    "untouched": "untouched rows removed",
    "small": "small dense",
    "columns": "columns",
    "rotated": "rotated columns",
    "rows": "rows",
    "blocks": "1x4 blocks",
    "elements": "elements",
    "mix": "rotated columns and rows",
    "hashed": "hashed rows",
}
"""What each method is called, the simplest first."""

Groups = tuple[tuple[str, ...], ...]
Part = Literal["columns", "rows"]

_BLOCKS: Final[Mapping[str, tuple[int | str, int | str]]] = {
    "columns": (COL, 1),
    "rows": (1, ROW),
    "blocks": (1, 4),
    "elements": (1, 1),
}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Something to measure.

    Args:
        method: of :data:`METHODS`.
        candidate: what is served of the model.
        trained: of what part of the tables another model is trained, and how much of it that one keeps; None is the
            model itself.
    """

    method: str
    candidate: Candidate
    trained: tuple[Part, float] | None = None


def attempts(
    tables: Sequence[SizedTable],
    budget: int,
    *,
    methods: Sequence[str],
    dtypes: Sequence[Dtype],
    rotate: Rotate,
    pruned: Sequence[str],
    untouched: Mapping[str, int],
) -> Iterator[Attempt]:
    """Yield what a budget of bytes holds, by method and dtype: the most columns, or the lowest level.

    Nothing is removed that need not be: where a dtype alone meets the budget, it is tried alone.

    Args:
        tables: of the model.
        budget: bytes of all tables, as :class:`~dist_sparse.planning.candidates.ServedBytes` counts them.
        methods: of :data:`METHODS`.
        dtypes: to store what is left in.
        rotate: as in :func:`~dist_sparse.rotate`.
        pruned: names of the tables that may lose blocks; all of them have one level. Rotated columns are removed from
            any table.
        untouched: by table, how many rows training has never touched.
    """

    def size(candidate: Candidate) -> int:
        return candidate.served_bytes(tables).total

    def fits(candidate: Candidate) -> bool:
        return size(candidate) <= budget

    def removing(dtype: Dtype, block: str, columns: float = 1.0, groups: Groups = ()) -> Candidate | None:
        """With the lowest level that fits."""
        whole = Candidate(dtype=dtype, block=_BLOCKS[block], columns=columns, groups=groups)
        found = least_removed(whole, pruned, tables, budget)
        return found if fits(found) else None

    groups = rotation_groups(rotate, [table.name for table in tables])
    if "bits" in methods:
        alone = [Candidate(dtype=dtype) for dtype in dict.fromkeys(("fp16", *dtypes))]
        yield from (Attempt(method="bits", candidate=each) for each in alone if each.dtype != "fp32" and fits(each))
    if "untouched" in methods:
        lossless = Choices(tables=tables, budget=budget, groups=(), cold=(), untouched=untouched).all()
        without = [each.candidate for each in lossless if each.kind == "full" and each.fits and each.candidate.levels]
        yield from (Attempt(method="untouched", candidate=each) for each in without if each.dtype in dtypes)
    for dtype in dtypes:
        if fits(Candidate(dtype=dtype)):
            continue
        widths = column_fractions(tables)[::-1]
        narrow = next((f for f in widths if fits(Candidate(dtype=dtype, columns=f))), None)
        if narrow is not None and "small" in methods:
            yield Attempt(method="small", candidate=Candidate(dtype=dtype), trained=("columns", narrow))
        turned = [Candidate(dtype=dtype, columns=f, groups=worth_rotating(groups, tables, dtype, f)) for f in widths]
        turned = [each for each in turned if each.groups]
        first = next((i for i, each in enumerate(turned) if fits(each)), len(turned))
        if first < len(turned) and "rotated" in methods:
            yield Attempt(method="rotated", candidate=turned[first])
        for block in (name for name in _BLOCKS if name in methods):
            if (candidate := removing(dtype, block)) is not None:
                yield Attempt(method=block, candidate=candidate)
        for wider in turned[max(first - 2, 0) : first] if "mix" in methods else ():
            if (candidate := removing(dtype, "rows", wider.columns, wider.groups)) is not None:
                yield Attempt(method="mix", candidate=candidate)
    if "hashed" in methods:
        smallest = min(map(lambda dtype: Candidate(dtype=dtype), dtypes), key=size)
        if budget < size(smallest):
            yield Attempt(method="hashed", candidate=smallest, trained=("rows", budget / size(smallest)))

"""Which of the candidates to use: rules from measurements at equal bytes, against int8 and small dense tables.

Measured on two-tower models (three data sets) and on a DLRM (one small data set); docs/planning.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dist_sparse.planning.candidates import dense_bytes
from dist_sparse.planning.choices import Choice, Choices, Kind
from dist_sparse.serving.manifest import Dtype
from dist_sparse.text import size

__all__ = ["recommend"]

_ROWS_BELOW: Final = 0.05
"""Share of the bytes of touched rows below which removing rows of cold crossed features was worth it."""


_TIE_BELOW: Final = 0.07
"""Share of the bytes below which rotated columns gained nothing over small dense tables with a learning rate of their
own, and lost recall."""


def recommend(choices: Choices, found: Sequence[Choice]) -> tuple[tuple[Choice, ...], str]:
    """Return which of the candidates ``found`` to use, and why in a few sentences. Several are to be measured, the
    likeliest first; none means that nothing fits."""

    def best(kind: Kind, *dtypes: Dtype) -> tuple[Choice, ...]:
        fitting = [each for each in found if each.fits and each.kind == kind]
        return tuple(each for dtype in dtypes for each in fitting if each.candidate.dtype == dtype)

    if dense_bytes(choices.tables) <= choices.budget:
        return (), "The tables fit as they are."
    if whole := best("full", "int8")[:1]:
        why = "int8 changed AUC by less than 0.0001 wherever it was measured"
        if whole[0].candidate.levels:
            why += ", and fits without the rows that training has never touched. Remove no others: that can only lose."
        else:
            why += ". Remove no weights: that can only lose."
        return whole, why
    dots = bool(choices.groups) and all(len(group) > 1 for group in choices.groups)
    narrow: Kind = "columns" if dots and best("columns", "int8", "int4") else "small"
    if whole := best("full", "int4")[:1]:
        other = "fewer, rotated columns" if dots else "a smaller dense table"
        without = ", without the rows that training has never touched," if whole[0].candidate.levels else ""
        why = f"int4 of all columns{without} or {other} in int8: which is better depends on the data. Measure both."
        return whole + best(narrow, "int8"), why
    fewer = best(narrow, "int8", "int4")
    rows = best("rows", "int8") or best("rows", "int4")
    if rows and (not fewer or choices.budget < _ROWS_BELOW * _touched_bytes(choices)):
        return fewer + rows[:2], (
            "At so few bytes, tables without most rows of cold crossed features had an AUC 0.005 to 0.008 above small "
            "dense tables, on one data set: measure them against fewer columns."
        )
    if not fewer:
        return (), f"Nothing fits: the least is {size(choices.least.served.total)}."
    if narrow == "columns":
        if choices.budget < _TIE_BELOW * dense_bytes(choices.tables):
            fewer = best("small", "int8", "int4") + fewer
        return fewer, (
            "Rotated columns, removed during training, had an AUC up to 0.009 above the best small dense table of the "
            "same bytes. With learning rates tuned for each, 0.001 was left at 10% of the bytes and nothing at 5%, at "
            "a lower recall@20. int8 or int4 depends on the data: measure both, and a small dense table."
        )
    turned = " For tables that are turned back no gain was measured: try both."
    return fewer, (
        "Train smaller dense tables: nothing that removes weights afterwards was better, except rotated columns of "
        "tables that only dot products read, by up to 0.009 AUC. If yours are, name them, as in "
        f'rotate=[["user", "item"]].{turned if choices.groups and not dots else ""}'
    )


def _touched_bytes(choices: Choices) -> int:
    """Bytes of the rows that training has touched."""
    idle = (choices.untouched.get(t.name, 0) * t.shape[1] * t.dtype.itemsize for t in choices.tables)
    return dense_bytes(choices.tables) - sum(idle)

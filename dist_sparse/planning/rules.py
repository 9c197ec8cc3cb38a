"""Which of the candidates to use: rules from measurements at equal bytes, against int8 and small
dense tables.

Measured on two-tower models (three data sets) and on a DLRM (one small data set); docs/planning.md
has the numbers. Where the data sets disagree there is no rule: several candidates are recommended,
to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dist_sparse.planning.candidates import dense_bytes
from dist_sparse.planning.choices import Choice, Choices, Kind
from dist_sparse.serving.manifest import Dtype
from dist_sparse.text import size

__all__ = ["recommend"]

_Advice = tuple[tuple[Choice, ...], str]

_ROWS_BELOW: Final = 0.05
"""Share of the bytes of touched rows below which removing rows of cold crossed features was worth
it."""

_IT_DEPENDS: Final = (
    "Rotated columns that are removed during training, or smaller dense tables: which is better"
    " depends on the interactions per item, the passes over the data and the compute. At 4.7% of"
    " the bytes, tuned alike, 14 passes gave columns 0.010 and 0.013 more AUC with 5 to 7"
    " interactions per item and none with 20; 28 passes gave 0.006, and equal compute no gain."
    " Measure both, in int8 and int4."
)


def recommend(choices: Choices, found: Sequence[Choice]) -> _Advice:
    """Return which of the candidates ``found`` to use, and why in a few sentences. Several are to
    be measured; none means that nothing fits."""
    if dense_bytes(choices.tables) <= choices.budget:
        return (), "The tables fit as they are."
    if whole := _fitting(found, "full", "int8")[:1]:
        return whole, _why_int8(whole[0])
    dots = _meet_in_dot_products(choices)
    if whole := _fitting(found, "full", "int4")[:1]:
        return _int4_or_fewer_columns(whole, found, dots)
    columns = _fitting(found, "columns", "int8", "int4") if dots else ()
    fewer = columns + _fitting(found, "small", "int8", "int4")
    rows = _fitting(found, "rows", "int8") or _fitting(found, "rows", "int4")
    if rows and (not fewer or choices.budget < _ROWS_BELOW * _touched_bytes(choices)):
        return (
            fewer + rows[:2],
            (
                "At so few bytes, tables without most rows of cold crossed features had an AUC"
                " 0.005 to 0.008 above small dense tables, on one data set: measure them against"
                " fewer columns."
            ),
        )
    if not fewer:
        return (), f"Nothing fits: the least is {size(choices.least.served.total)}."
    if columns:
        return fewer, _IT_DEPENDS
    return fewer, _why_small(turned_back=bool(choices.groups) and not dots)


def _meet_in_dot_products(choices: Choices) -> bool:
    """Whether all rotated tables do. Nothing was gained where a single table is turned back."""
    return bool(choices.groups) and all(len(group) > 1 for group in choices.groups)


def _fitting(found: Sequence[Choice], kind: Kind, *dtypes: Dtype) -> tuple[Choice, ...]:
    """The candidates of a kind that fit, in the order of ``dtypes``."""
    fitting = [each for each in found if each.fits and each.kind == kind]
    return tuple(each for dtype in dtypes for each in fitting if each.candidate.dtype == dtype)


def _why_int8(whole: Choice) -> str:
    why = "int8 changed AUC by less than 0.0001 wherever it was measured"
    if whole.candidate.levels:
        return (
            f"{why}, and fits without the rows that training has never touched. Remove no others:"
            " that can only lose."
        )
    return f"{why}. Remove no weights: that can only lose."


def _int4_or_fewer_columns(
    whole: tuple[Choice, ...], found: Sequence[Choice], dots: bool
) -> _Advice:
    columns = _fitting(found, "columns", "int8") if dots else ()
    other = "fewer, rotated columns" if columns else "a smaller dense table"
    without = (
        ", without the rows that training has never touched," if whole[0].candidate.levels else ""
    )
    why = (
        f"int4 of all columns{without} or {other} in int8: which is better depends on the data."
        " Measure both."
    )
    return whole + (columns or _fitting(found, "small", "int8")), why


def _why_small(turned_back: bool) -> str:
    why = (
        "Train smaller dense tables: nothing that removes weights afterwards was better, except"
        " rotated columns of tables that only dot products read, by up to 0.013 AUC where items"
        ' have few interactions. If yours are, name them, as in rotate=[["user", "item"]].'
    )
    return (
        f"{why} For tables that are turned back no gain was measured: try both."
        if turned_back
        else why
    )


def _touched_bytes(choices: Choices) -> int:
    """Bytes of the rows that training has touched."""
    idle = (
        choices.untouched.get(t.name, 0) * t.shape[1] * t.dtype.itemsize for t in choices.tables
    )
    return dense_bytes(choices.tables) - sum(idle)

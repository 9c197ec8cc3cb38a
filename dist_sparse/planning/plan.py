"""`plan()`: smaller versions of a model's tables within a byte budget, and which one to use."""

from __future__ import annotations

import glob
import math
import pprint
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch import nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.planning.candidates import BY_COLUMN, CODED, TableShape, dense_bytes, shape_of
from dist_sparse.planning.choices import METHODS, Choice, Choices, recommend
from dist_sparse.planning.traffic import untouched_rows
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import count, number_of, percent, printable, size, table_lines
from dist_sparse.training.arguments import parse_budget

_LABELS = {"full": "all columns", "small": METHODS["small"], "columns": METHODS["rotated"]}

# What a mask update takes at most beside the tables of a rank: a share of them, and bytes. (C4)
UPDATE_MEMORY: Final = {"rows": (0.05, 64 << 20), "1x4": (0.30, 32 << 20)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Candidates within a budget. Printing it shows their bytes and the code for the recommended.

    Args:
        budget: bytes.
        tables: names, shapes and dtypes of the tables, in the order of the model.
        rank_bytes: bytes of the tables as they are trained, on the rank that holds most.
        untouched: number of rows that training has never touched, by table; tables without Adagrad
            sums are missing.
        choices: the candidates. Candidates with all columns are listed whether or not they fit.
        recommended: the one to use, or several to be measured. Empty if nothing fits, or if the
            tables fit as they are.
        why: reason for the recommendation.
    """

    budget: int
    tables: tuple[TableShape, ...]
    rank_bytes: int
    untouched: Mapping[str, int]
    choices: tuple[Choice, ...]
    recommended: tuple[Choice, ...]
    why: str

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tables as they are trained."""
        return dense_bytes(self.tables)

    @property
    def update_memory(self) -> dict[str, int]:
        """Most bytes that a mask update takes on a rank beside the tables, by the blocks of the
        masks."""
        return {
            blocks: math.ceil(share * self.rank_bytes) + constant
            for blocks, (share, constant) in UPDATE_MEMORY.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able values, sizes in bytes."""
        return {
            "budget": self.budget,
            "dense_bytes": self.dense_bytes,
            "update_memory": self.update_memory,
            "tables": [
                {"name": t.name, "shape": list(t.shape), "dtype": str(t.dtype)} for t in self.tables
            ],
            "untouched": dict(self.untouched),
            "choices": [_choice_json(choice) for choice in self.choices],
            "recommended": [_choice_json(choice) for choice in self.recommended],
            "why": self.why,
        }

    def __repr__(self) -> str:
        head = ("use", "what", "dtype", "columns", "rows", "served", "")
        rows = [self._cells(choice) for choice in self.choices]
        share = percent(self.budget / self.dense_bytes)
        tables = number_of(len(self.tables), "table")
        memory = [f"{size(most)} ({blocks})" for blocks, most in self.update_memory.items()]
        lines = [
            f"budget {size(self.budget)}, {share} of {size(self.dense_bytes)} in {tables}",
            "",
            *table_lines(head, rows, right=range(3, len(head))),
            "",
            *self._never_touched(),
            textwrap.fill(self.why, 79),
            "",
            f"A mask update needs up to {' or '.join(memory)} more per rank.",
        ]
        for place, choice in enumerate(self.recommended, start=1):
            lines += ["", f"{place}. {self._label(choice)}, {choice.candidate.dtype}:"]
            lines += _code_lines(choice, self.tables)
        return "\n".join(lines)

    def _cells(self, choice: Choice) -> list[str]:
        """Return the cells of a choice, in the order of ``head``."""
        use = "fits" if choice.fits else "too large"
        if choice in self.recommended:
            # The number of its code below the table.
            use = f"use {self.recommended.index(choice) + 1}"
        shapes = [choice.candidate.shape(table) for table in self.tables]
        widths = sorted({width for _, width in shapes})
        # One width, or the narrowest and the widest.
        columns = "-".join(map(str, dict.fromkeys((widths[0], widths[-1]))))
        return [
            use,
            self._label(choice),
            choice.candidate.dtype,
            columns,
            count(sum(rows for rows, _ in shapes)),
            size(choice.served.total),
            percent(choice.served.total / self.dense_bytes),
        ]

    def _label(self, choice: Choice) -> str:
        if choice.kind == "full" and choice.candidate.levels:
            return METHODS["untouched"]
        return _LABELS[choice.kind]

    def _never_touched(self) -> list[str]:
        tables = []
        for table in self.tables:
            if untouched := self.untouched.get(table.name):
                rows = count(table.shape[0])
                tables.append(f"{count(untouched)} of {rows} rows of {printable(table.name)}")
        if not tables:
            return []
        names = f"Never looked up in training: {', '.join(tables)}."
        text = f"{names} Removing them is lossless on the training data."
        return [textwrap.fill(text, 79), ""]


def plan(
    model: nn.Module | Mapping[str, tuple[int, int]],
    budget: int | str,
    *,
    rotate: Rotate | None = None,
    optimizer: Any = None,
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
) -> Plan:
    """Return candidates within a byte budget for a model's tables, and which one to use. The model
    does not change. Collective: every rank of the world must call it.

    Dtypes of 32, 16, 8 and 4 bits, 4 bits with a scale for each column, and codes of 4 and 8
    columns are combined with widths that are multiples of 4 columns, and, but for codes, with the
    removal of rows that training has never touched, which is lossless. Bytes are counted as a
    server holds them: weights, scales, books, indexes of kept rows, and bases that rotate outputs
    back. No weights are read, and no quality is predicted: recommendations follow rules that were
    measured on other models. Where a rule depends on the data, several candidates are recommended,
    to be measured.

    Args:
        model: as it was trained, wrapped or not; or ``(rows, columns)`` of float32 tables by name.
        budget: bytes, or a share of the tables' bytes as text, ``"10%"``.
        rotate: tables that may be narrowed by a rotation, as in :func:`~dist_sparse.rotate`: groups
            of tables that are read only by dot products between them, or ``"table"``.
        optimizer: the optimizer that steps tables that are not fused, or a sequence of several. If
            tables are stepped by an Adagrad, fused or not, the rows that training has never touched
            are known.
        include: globs over table names and fully qualified names; None is every table.
        exclude: globs of tables to leave out, which are not counted.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; on every rank.

    Example::

        >>> from dist_sparse import plan
        >>> tables = {"user": (100_000, 64), "item": (50_000, 64)}
        >>> answer = plan(tables, "10%", rotate=[["user", "item"]])
        >>> [str(choice.candidate) for choice in answer.recommended[:2]]
        ['int8, 31.2% of the columns, rotated', 'int4, 62.5% of the columns, rotated']
        >>> [choice.kind for choice in answer.recommended]  # to be measured
        ['columns', 'columns', 'small', 'small']
        >>> answer.recommended[0].served.total, answer.budget
        (3600000, 3840000)
        >>> [str(choice.candidate) for choice in plan(tables, "30%").recommended]
        ['int8']
    """
    world = group_over(world_ranks())
    with world.agreeing("plan()") as facts:
        limit = parse_budget(budget)
        located: list[ShardedData] = []
        if isinstance(model, nn.Module):
            located = model_source(model, include=include, exclude=exclude).locate()
            tables = tuple(map(shape_of, located))
        elif any(argument is not None for argument in (include, exclude, optimizer)):
            raise ValueError(
                "Invalid include, exclude or optimizer: "
                "they are for models, not for shapes of tables."
            )
        else:
            tables = _shapes(model)
        groups = _groups(rotate, tables)
        # Ranks that planned for other tables would recommend something else.
        facts["tables"] = [[table.name, *table.shape, str(table.dtype)] for table in tables]
        facts["budget, rotate"] = [limit, groups]
    # Outside of the block above, because it communicates.
    untouched = untouched_rows(model, located, optimizer) if isinstance(model, nn.Module) else {}
    rank_bytes = _most_on_a_rank(located) if located else dense_bytes(tables)
    # A float is a share of the bytes.
    room = math.floor(limit * dense_bytes(tables)) if isinstance(limit, float) else limit
    choices = Choices(tables=tables, budget=room, groups=groups, untouched=untouched)
    candidates = tuple(choices.all())
    recommended, why = recommend(choices, candidates)
    return Plan(
        budget=room,
        tables=tables,
        rank_bytes=rank_bytes,
        untouched=untouched,
        choices=candidates,
        recommended=recommended,
        why=why,
    )


def _most_on_a_rank(located: Sequence[ShardedData]) -> int:
    held: Counter[int] = Counter()
    for data in located:
        for rank, rects in zip(data.ranks or (0,), data.tiling, strict=True):
            held[rank] += sum(rect.numel for rect in rects) * data.dtype.itemsize
    return max(held.values())


def _shapes(tables: Any) -> tuple[TableShape, ...]:
    """Return the tables of a mapping of ``(rows, columns)`` by name, checked."""
    if not isinstance(tables, Mapping) or not tables:
        raise ValueError(
            f"Invalid model of type {type(tables).__name__}: must be a module, or shapes by table."
        )
    found = []
    for name, shape in tables.items():
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise ValueError(f"Invalid shape {shape!r} of {name!r}: must be (rows, columns).")
        rows, columns = (checks.integer(f"shape of {name!r}", side, least=1) for side in shape)
        found.append(TableShape(str(name), (rows, columns)))
    return tuple(found)


def _groups(rotate: Any, tables: Sequence[TableShape]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of ``rotate``, checked."""
    columns = {table.name: table.shape[1] for table in tables}
    groups = tuple(map(tuple, rotation_groups([] if rotate is None else rotate, columns)))
    for group in groups:
        widths = [columns[name] for name in group]
        if len(set(widths)) > 1:
            raise ValueError(f"Invalid {rotate=}: {list(group)} have {widths} columns.")
    return groups


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "kind": choice.kind,
        "candidate": asdict(choice.candidate),
        "served": asdict(choice.served) | {"total": choice.served.total},
        "fits": choice.fits,
    }


def _code_lines(choice: Choice, tables: Sequence[TableShape]) -> list[str]:
    """Return the code that makes a candidate from a trained ``model`` and its ``optimizer``."""
    candidate = choice.candidate
    # sparsify() leaves tables of fewer than 16 rows dense by default.
    names = {*candidate.narrowed, *candidate.levels}
    small = any(table.shape[0] < 16 for table in tables if table.name in names)
    ending = ["end=0", "min_rows=0"] if small else ["end=0"]
    lines, sparse = [], "None"
    if candidate.columns < 1 and candidate.groups:
        groups = _code([*map(list, candidate.groups)])
        level = f"level={1 - candidate.columns:.6g}"
        lines += _sparsify_lines(level, 'block="col"', f"rotate={groups}", *ending)
        lines.append("model = compact(model, sparse)")
        lines.append("# then train on; tables with a fused optimizer have another one now. If an")
        lines.append('# optimizer keeps a number for each weight, add optimizer_state="reset"')
    elif candidate.columns < 1:
        widths = dict.fromkeys(str(candidate.shape(table)[1]) for table in tables)
        lines.append(f"# of a model that was trained with embedding_dim={', '.join(widths)}")
    if candidate.levels:
        # sparsify() reads names as globs.
        include = f"include={_code([*map(glob.escape, candidate.levels)])}"
        lines += _sparsify_lines('level="untouched"', include, 'block="row"', *ending)
        sparse = "sparse"
    how = f'dtype="{candidate.dtype}"'
    if candidate.dtype == BY_COLUMN:
        how = 'dtype="int4", scale="column"'
    if candidate.dtype in CODED:
        lines += _quantize_lines(choice, tables)
        # The dtype of tables without codes.
        sparse, how = "coded", 'dtype="int4"'
    return [*lines, f'export(model, {sparse}, "served", {how})']


def _quantize_lines(choice: Choice, tables: Sequence[TableShape]) -> list[str]:
    """Return the code that gives the tables their codes."""
    codes = {table.name: choice.candidate.codes(table) for table in tables}
    codes = {name: each for name, each in codes.items() if each}
    text = pprint.pformat(codes, width=66, compact=True, sort_dicts=False)
    return [
        "# better: from half of the training on, with coded.step() after each step",
        *_call("coded = quantize", "model", "optimizer", f"codes={text}", "begin=0", "end=0"),
        "coded.step()",
    ]


def _code(names: list[Any]) -> str:
    return pprint.pformat(names, width=66, compact=True)


def _sparsify_lines(*arguments: str) -> list[str]:
    """Return a call of sparsify(), and the step that removes."""
    return [*_call("sparse = sparsify", "model", "optimizer", *arguments), "sparse.step()"]


def _call(what: str, *arguments: str) -> list[str]:
    """Return a call in 79 columns."""
    line = f"{what}({', '.join(arguments)})"
    if len(line) <= 79:
        return [line]
    parts = ",\n".join([*arguments, ""])
    return [f"{what}(", textwrap.indent(parts.rstrip(), "    "), ")"]

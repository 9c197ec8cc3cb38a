"""`plan()`: smaller versions of a model's tables within a byte budget, and which one to use.

From the top: :class:`Plan`, the result, which prints itself; :func:`plan`, which lists what fits
(:class:`~dist_sparse.planning.candidates.Choices`); the rules that recommend candidates; the checks
of arguments; and the code that is printed for a candidate. Rows that training never or hardly read
are counted by :mod:`dist_sparse.planning.reads`.

The rules come from measurements at equal bytes, against int8 and small dense tables: two-tower
models on three data sets, and a DLRM on a small one (docs/planning.md). Where the data sets
disagree there is no rule: several candidates are recommended, to be measured.
"""

import glob
import pprint
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.groups import world_group
from dist_sparse.ids.share import Share
from dist_sparse.messages import names_text
from dist_sparse.optimizers import NOT_STEPPED, Optimizers
from dist_sparse.planning.candidates import (
    BY_COLUMN,
    CODED,
    Candidate,
    Choice,
    Choices,
    Groups,
    TableShape,
    shape_of,
)
from dist_sparse.planning.reads import WITHOUT_STATE, RowsByReads, rows_by_reads, unread_share
from dist_sparse.remove import Record, noted_counts
from dist_sparse.tables.bases import TableGroups, rotation_groups
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import FUSED, ShardedData
from dist_sparse.text import count, number_of, percent, printable, size, table_lines
from dist_sparse.training.arguments import budget_bytes, dense_bytes

# Names of tables that a line of text shows.
_MOST_NAMES = 8

_LABELS = {"full": "all columns", "small": "small dense", "columns": "rotated columns"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Candidates within a budget. Printing it shows their bytes and the code for the recommended.

    Args:
        budget: bytes.
        tables: names, shapes and dtypes of the tables, in the order of the model.
        untouched: number of rows that training has never touched, by table, where the state of
            optimizers or a record of lookups tells.
        hardly_read: number of other rows whose sum of squared gradients is below a tenth of the
            mean of its table's touched rows, by table, where Adagrad has summed these. If columns
            or column shards have separate sums, the largest sum in a row counts, so the number
            depends a little on the sharding.
        unknown: why ``untouched`` and ``hardly_read`` lack a table of a model, by table.
        records: what tells of the tables in ``untouched``, and which steps that covers, as text.
        doubts: why nothing shows that the record covers the training, for tables in ``untouched``
            that would lose rows: ``remove_untouched`` accepts them only with ``trust_record=True``.
        reads_zeros: which lookups of the batches would read a removed row if the rows of
            ``untouched`` were removed. None without batches.
        choices: the candidates. Candidates with all columns are listed whether or not they fit.
        recommended: the one to use, or several to be measured. Empty if nothing fits, or if the
            tables fit as they are.
        why: reason for the recommendation.
        stepped: the tables that an optimizer outside of the model steps: printed code passes it.
        counted: whether ``record=`` told which rows were read: printed code passes it as
            ``counts``.
        all_tables: whether the model has no other tables.
    """

    budget: int
    tables: tuple[TableShape, ...]
    untouched: Mapping[str, int]
    hardly_read: Mapping[str, int]
    unknown: Mapping[str, str]
    records: Mapping[str, str]
    doubts: Mapping[str, str]
    reads_zeros: Share | None
    choices: tuple[Choice, ...]
    recommended: tuple[Choice, ...]
    why: str
    stepped: tuple[str, ...]
    counted: bool
    all_tables: bool

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tables as they are trained."""
        return dense_bytes(self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able values, sizes in bytes."""
        return vars(self) | {
            "dense_bytes": self.dense_bytes,
            "tables": [asdict(table) | {"dtype": str(table.dtype)} for table in self.tables],
            "reads_zeros": self.reads_zeros and asdict(self.reads_zeros),
            "choices": list(map(_choice_json, self.choices)),
            "recommended": list(map(_choice_json, self.recommended)),
        }

    def __repr__(self) -> str:
        head = ("verdict", "what", "dtype", "columns", "rows", "served", "")
        rows = list(map(self._cells, self.choices))
        share = percent(self.budget / self.dense_bytes)
        tables = number_of(len(self.tables), "table")
        lines = [
            f"budget {size(self.budget)}, {share} of {size(self.dense_bytes)} in {tables}",
            "",
            *table_lines(head, rows, right=range(3, len(head))),
            "",
            *self._reads_lines(),
            *textwrap.wrap(self.why, 79),
        ]
        for number, choice in enumerate(self.recommended, start=1):
            lines += ["", f"{number}. {self._label(choice)}, {choice.candidate.dtype}:"]
            lines += self._code_lines(choice.candidate)
        return "\n".join(lines)

    def _cells(self, choice: Choice) -> list[str]:
        """Return the cells of a choice, in the order of ``head`` in ``__repr__``."""
        verdict = "fits" if choice.fits else "too large"
        if choice in self.recommended:
            # Its code is printed below the table under this number.
            number = self.recommended.index(choice) + 1
            verdict = f"measure {number}" if len(self.recommended) > 1 else "best"
        rows, widths = zip(*map(choice.candidate.shape, self.tables), strict=True)
        # The narrowest and the widest; a set, because often they are equal.
        columns = "-".join(map(str, sorted({min(widths), max(widths)})))
        return [
            verdict,
            self._label(choice),
            choice.candidate.dtype,
            columns,
            count(sum(rows)),
            size(choice.served.total),
            percent(choice.served.total / self.dense_bytes),
        ]

    def _label(self, choice: Choice) -> str:
        # Tables with all columns lose only untouched rows.
        if choice.kind == "full" and choice.candidate.levels:
            return "touched rows"
        return _LABELS[choice.kind]

    def _reads_lines(self) -> list[str]:
        """Return how many rows of each table were never or hardly read, where that is known."""
        lines, examples = [], ""
        text = f"Rows never read: unknown. {self._advice()}"
        if self.untouched:
            columns: dict[str, Mapping[str, Any]] = {
                "never read": self.untouched,
                "hardly read": self.hardly_read,
            }
            text = "Never read: removing these rows is lossless on the training data"
            text += ", if the record covers it." if self.doubts else "."
            if self.hardly_read:
                text += (
                    " Hardly read: less than a tenth of the table's mean sum of squared gradients."
                )
            share = self.reads_zeros
            if share is not None:
                columns["reads zeros"] = share.shares
                text += " Reads zeros: the share of the batches' lookups that read rows never read."
                examples = f"{share.examples_text} would read zeros."
            rows = []
            for table in self.tables:
                cells = [column.get(table.name, "unknown") for column in columns.values()]
                rows.append([printable(table.name), *map(_cell, (table.shape[0], *cells))])
            head = ("table", "rows", *columns)
            lines = [*table_lines(head, rows, right=range(1, len(head))), ""]
        for names, record in self._by_text(self.records):
            lines += textwrap.wrap(f"Record of {names}: {record}.", 79)
        lines += textwrap.wrap(text, 79)
        if examples:
            lines.append(examples)
        lines.append("")
        for names, reason in self._by_text(self.doubts):
            nothing = f"Nothing shows that the record covers the training of {names}: {reason}."
            lines += [*textwrap.wrap(nothing, 79), ""]
        for names, reason in self._by_text(self.unknown):
            lines += [*textwrap.wrap(f"Unknown of {names}: {reason}.", 79), ""]
        return lines

    def _advice(self) -> str:
        """Return what would tell which rows were read, where no table is in ``untouched``."""
        if not self.unknown:
            # Of shapes of tables.
            return "A trained model would tell, with its optimizer's state."
        reasons = tuple(self.unknown.values())
        counting = "pass record=ds.count_lookups(batches, model), with all training data."
        if self.counted or not any(reason.startswith(WITHOUT_STATE) for reason in reasons):
            return counting.capitalize()
        passed = " and pass optimizer=" if NOT_STEPPED in reasons else ""
        return f"Load the optimizer's state with the weights{passed}, or {counting}"

    def _by_text(self, texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield each text once, after the names of the tables that it is about."""
        by_text: dict[str, list[str]] = defaultdict(list)
        for table in self.tables:
            if table.name in texts:
                by_text[texts[table.name]].append(printable(table.name))
        for text, names in by_text.items():
            yield names_text(names, _MOST_NAMES), text

    def _code_lines(self, candidate: Candidate) -> list[str]:
        """Return the code that makes a candidate from a trained ``model`` and its ``optimizer``,
        after ``import dist_sparse as ds``: most TorchRec scripts have their own ``plan``."""
        # By default, sparsify() leaves these tables dense.
        small = {table.name for table in self.tables if table.shape[0] < 16}
        # Required, but it has no effect on fused tables.
        optimizer = "optimizer" if self.stepped else "[]"
        lines, sparse = [], "None"
        if candidate.groups:
            groups = _code([*map(list, candidate.groups)])
            level = f"level={1 - candidate.columns:.6g}"
            few = small.intersection(chain(*candidate.groups))
            lines.append("from dist_sparse.extras.rotation import Rotation")
            lines += _sparsify_lines(few, optimizer, level, f"rotate=Rotation({groups})")
            lines += [
                "model = ds.compact(model, sparse)",
                "# then train on; a sharded model has a new model.fused_optimizer. With Adam,",
                '# which has state for each weight, advanced needs optimizer_state="reset"',
            ]
        elif candidate.columns < 1:
            widths = dict.fromkeys(str(candidate.shape(table)[1]) for table in self.tables)
            lines.append(f"# of a model that was trained with embedding_dim={', '.join(widths)}")
        if candidate.levels:
            lines += self._removal_lines(candidate.levels)
            sparse = "removed"
        if candidate.dtype in CODED:
            codes = {table.name: code for table in self.tables if (code := candidate.codes(table))}
            text = f"codes={_code(codes)}"
            lines.append(
                "# better: from half of the training on, with coded.step() after each step"
            )
            lines.append("from dist_sparse.extras.codes import quantize")
            lines += _call("coded = quantize", "model", optimizer, text, "begin=0", "end=0")
            lines.append("coded.step()")
            sparse = "coded"
        how = _EXPORTS.get(candidate.dtype, f'dtype="{candidate.dtype}"')
        return [*lines, f'ds.export(model, {sparse}, "served", {how})']

    def _removal_lines(self, levels: Mapping[str, float]) -> list[str]:
        """Return the code that removes the rows never read of some tables."""
        lines, arguments = [], ["model"]
        if self.counted:
            arguments.append("record=counts")
        elif levels.keys() & set(self.stepped):
            arguments.append("optimizer")
        losing = {name for name, rows in self.untouched.items() if rows}
        if not self.all_tables or self.unknown or losing - levels.keys():
            # It takes globs.
            arguments.append(f"include={_code([*map(glob.escape, levels)])}")
        if levels.keys() & self.doubts.keys():
            lines.append("# trust_record: you say that the record covers the whole training")
            arguments.append("trust_record=True")
        return [*lines, *_call("removed = ds.remove_untouched", *arguments)]


def plan(
    model: nn.Module | Mapping[str, tuple[int, int]],
    budget: float | str,
    *,
    rotate: TableGroups | None = None,
    optimizer: Optimizers | None = None,
    record: Record | None = None,
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
    batches: Iterable[Any] | None = None,
) -> Plan:
    """Return candidates within a byte budget for a model's tables, and which one to use. The model
    does not change. Collective: every rank of the world must call it.

    Dtypes of 32, 16, 8 and 4 bits, 4 bits with a scale for each column, and codes of 2, 4 and 8
    columns are combined with widths that are multiples of 4 columns. All except codes are also
    combined with the removal of rows that training has never touched, which is lossless. Only the
    weights of these rows are read, as a proof that they were never trained; where they prove
    nothing, the plan says so. Bytes are counted as a server holds them: weights, scales, books,
    indexes of kept rows, and bases that rotate outputs back. No quality is predicted:
    recommendations follow rules that were measured on other models. Where a rule depends on the
    data, several candidates are recommended, to be measured.

    Args:
        model: as it was trained, wrapped or not; or ``(rows, columns)`` of float32 tables by name.
        budget: bytes, ``4096`` or ``"512MiB"``, or a share of the tables' bytes, ``0.1`` or
            ``"10%"``, as on the command line.
        rotate: tables that may be narrowed by a rotation (``dist_sparse.extras.rotation``): groups
            of tables that are read only by dot products between them, or ``"table"``.
        optimizer: the optimizer that steps tables that are not fused, or a sequence of several. If
            tables are stepped by Adagrad, Adam, AdamW or RMSprop, the rows that training has never
            touched are known, unless weight decay or a loss term writes whole tables.
        record: instead of optimizer state, lookups of each row by table, such as what
            :func:`~dist_sparse.count_lookups` returns, or the folder that it was saved to; as in
            :func:`~dist_sparse.remove_untouched`.
        include: globs over table names and fully qualified names; None is every table.
        exclude: globs of tables to leave out, which are not counted.
        batches: lookups that the model must answer, such as its test data, as in
            :func:`~dist_sparse.count_lookups`; every rank passes its own. The plan tells
            which share of them, and of the examples, would read zeros if the rows that training
            has never touched were removed.

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
    world = world_group()
    with world.agreeing("plan()") as facts:
        limit = checks.parse_budget(budget)
        counts = noted_counts(facts, record, optimizer)
        located: list[ShardedData] = []
        if isinstance(model, nn.Module):
            located = ModelTables(model, include=include, exclude=exclude).locate()
            tables = tuple(map(shape_of, located))
            stepped = tuple(data.name for data in located if data.kernel not in FUSED)
        elif any(given is not None for given in (include, exclude, optimizer, record, batches)):
            raise ValueError(
                "Invalid include, exclude, optimizer, record or batches: "
                "they are for models, not for shapes of tables."
            )
        else:
            tables = _parse_shapes(model)
            stepped = tuple(table.name for table in tables)
        groups = _rotated_groups(rotate, tables)
        if not dense_bytes(tables):
            raise ValueError("The tables have no rows: there is nothing to plan.")
        # Ranks that plan for different tables or budgets would recommend different candidates.
        facts["tables"] = [[table.name, *table.shape, str(table.dtype)] for table in tables]
        facts["budget, rotate"] = [limit, groups]
        facts["batches are given"] = batches is not None
    reads, share = RowsByReads(), None
    # Outside of the block above: counting rows communicates.
    if isinstance(model, nn.Module):
        with world.jointly("plan()"):
            reads = rows_by_reads(model, located, optimizer, counts)
            if batches is not None:
                share = unread_share(located, reads, batches)
    room = budget_bytes(limit, dense_bytes(tables))
    choices = Choices(tables=tables, budget=room, groups=groups, untouched=reads.never)
    candidates = tuple(choices.all())
    recommended, why = _recommend(choices, candidates)
    return Plan(
        budget=room,
        tables=tables,
        untouched=reads.never,
        hardly_read=reads.hardly,
        unknown=reads.unknown,
        records=reads.records,
        doubts=reads.doubts,
        reads_zeros=share,
        choices=candidates,
        recommended=recommended,
        why=why,
        stepped=stepped,
        counted=counts is not None,
        all_tables=include is None and exclude is None,
    )


# ------------------------------------------------------------------------------
# The rules: which of the candidates to use, and why.

# The candidate of each kind and dtype that fits, as _most_kept() returns them.
Fitting = Mapping[tuple[str, str], Choice]

# Why narrow tables are recommended, by their kind.
_WHY_NARROW = {
    "columns": (
        "Rotated columns that are removed during training, or smaller dense tables: which is better"
        " depends on the data and the compute (docs/planning.md). Measure both, in int8 and int4."
    ),
    "small": (
        "Train smaller dense tables: removing weights afterwards was no better, except rotated"
        " columns of tables that only dot products read. If yours are, name them, as in"
        ' rotate=[["user", "item"]].'
    ),
}

# From this width on, int4 rows were as good as codes of the same bytes on Gowalla: 20 bytes of
# weights and 4 of scale and bias.
_NO_GAIN_FROM = 40

_WHY_HEADERLESS = (
    "In short rows, the 4 bytes of scale and bias are a large share; int4 by column and codes"
    " have neither. Where models overfit, fewer columns win. Measure them too."
)
_WHY_INT8 = "int8{} changed AUC by less than 0.0001 wherever it was measured. Remove nothing else."
_WHY_INT4 = (
    "int4 of all columns{} or {} in int8: which is better depends on the data. Measure both."
)
_NARROW_NAMES = {"columns": "fewer, rotated columns", "small": "a smaller dense table"}


def _recommend(choices: Choices, candidates: Iterable[Choice]) -> tuple[tuple[Choice, ...], str]:
    """Return which candidates to use, and why in a few sentences. Several are to be measured; none
    means that the tables fit as they are, or that nothing fits.

    The first of these that fits: the tables as they are; int8; int4, beside narrower tables in
    int8; narrower tables, beside forms whose rows have neither scale nor bias.
    """
    if dense_bytes(choices.tables) <= choices.budget:
        return (), "The tables fit as they are."
    fitting = _most_kept(candidates)
    # All columns in int8 lose nothing measurable: whatever else is removed can only lose.
    if int8 := _of_kind(fitting, "full", "int8"):
        return int8, _WHY_INT8.format(_without_untouched(int8[0]))
    # A table that is rotated alone is rotated back: no gain over small dense tables was measured.
    kind = "columns" if min(map(len, choices.groups), default=0) > 1 else "small"
    narrow_kind = kind if _of_kind(fitting, kind, "int8", "int4") else "small"
    narrow = _of_kind(fitting, narrow_kind, "int8", "int4")
    small = _of_kind(fitting, "small", "int8", "int4")
    # All columns in 4 bits against fewer in 8: the data sets disagree. There are no narrower tables
    # in int4 here, because all columns fit.
    if int4 := _of_kind(fitting, "full", "int4"):
        why = _WHY_INT4.format(_without_untouched(int4[0]), _NARROW_NAMES[narrow_kind])
        return int4 + narrow, why
    # Columns must be removed, by rotation or by training narrow tables; the data sets disagree
    # here too. Where nothing is rotated, `narrow` and `small` are the same.
    narrower = tuple(dict.fromkeys(narrow + small))
    # By `kind`, whatever fits of it: codes and int4 by column may fit where int4 does not.
    headerless = _without_headers(choices.tables, fitting, kind)
    reasons = []
    if narrower:
        reasons.append(_WHY_NARROW[narrow_kind])
    if headerless:
        reasons.append(_WHY_HEADERLESS)
    why = " ".join(reasons) or "Nothing fits: even the narrowest tables take more."
    return narrower + headerless, why


def _most_kept(candidates: Iterable[Choice]) -> Fitting:
    """Return for each kind and dtype the candidate that fits and keeps the most, apart from
    untouched rows."""
    fitting: dict[tuple[str, str], Choice] = {}
    for choice in candidates:
        if choice.fits:
            # The candidate that removes untouched rows comes last, and wins: that is lossless.
            fitting[choice.kind, choice.candidate.dtype] = choice
    return fitting


def _of_kind(fitting: Fitting, kind: str, *dtypes: str) -> tuple[Choice, ...]:
    """Return the candidates of a kind that fit, in the order of ``dtypes``."""
    return tuple(fitting[kind, dtype] for dtype in dtypes if (kind, dtype) in fitting)


def _without_untouched(choice: Choice) -> str:
    return " without the rows that training never read" if choice.candidate.levels else ""


def _without_headers(
    tables: Sequence[TableShape], fitting: Fitting, kind: str
) -> tuple[Choice, ...]:
    """Return the candidates whose rows have no scale and bias, by column and of codes, that are
    worth a measurement beside int4 rows. None if int4 rows of at least 24 bytes fit: such rows were
    as good."""
    widest = max(tables, key=lambda table: table.shape[1])

    def width(choice: Choice) -> int:
        return choice.candidate.shape(widest)[1]

    def of_dtype(dtype: str) -> tuple[Choice, ...]:
        return _of_kind(fitting, "full", dtype) or _of_kind(fitting, kind, dtype)

    if max(map(width, _of_kind(fitting, kind, "int4")), default=0) >= _NO_GAIN_FROM:
        return ()
    # The finest codes, which CODED lists first, that keep most of the columns: the best codes on
    # Gowalla kept 40 or 44 of 64.
    coded = chain(*map(of_dtype, CODED))
    wide = [choice for choice in coded if width(choice) >= 0.6 * widest.shape[1]]
    return (*of_dtype(BY_COLUMN), *wide[:1])


# ------------------------------------------------------------------------------
# Arguments, and facts of a model that need no weights.


def _parse_shapes(tables: Any) -> tuple[TableShape, ...]:
    """Return the tables of a mapping of ``(rows, columns)`` by name, checked."""
    if not isinstance(tables, Mapping) or not tables:
        raise ValueError(
            f"Invalid model of type {type(tables).__name__}: must be a module, or shapes by table."
        )
    parsed = []
    for name, shape in tables.items():
        if isinstance(shape, Tensor):
            raise ValueError(
                f"Invalid shape of {name!r}: it is a tensor. Pass the module, not its state_dict()."
            )
        try:
            rows, columns = shape
            rows = checks.integer("rows", rows, least=1)
            columns = checks.integer("columns", columns, least=1)
        except (TypeError, ValueError):
            raise ValueError(
                f"Invalid shape {shape!r} of {name!r}: must be (rows, columns), each >= 1."
            ) from None
        parsed.append(TableShape(str(name), (rows, columns)))
    return tuple(parsed)


def _rotated_groups(rotate: Any, tables: Sequence[TableShape]) -> Groups:
    """Return the groups of ``rotate``, checked."""
    columns = {table.name: table.shape[1] for table in tables}
    groups = tuple(map(tuple, rotation_groups(rotate or [], columns)))
    for group in groups:
        widths = list(map(columns.get, group))
        if len(set(widths)) > 1:
            raise ValueError(f"Invalid {rotate=}: {list(group)} have {widths} columns.")
    return groups


# ------------------------------------------------------------------------------
# A candidate as JSON, and as code to paste.


def _cell(value: int | str) -> str:
    return value if isinstance(value, str) else count(value)


def _choice_json(choice: Choice) -> dict[str, Any]:
    values = asdict(choice)
    # A property: asdict() leaves it out.
    values["served"]["total"] = choice.served.total
    return values


# Arguments of export(), where a candidate is not named after its dtype.
_EXPORTS = {
    BY_COLUMN: 'dtype="int4", scale="column"',
    # The dtype of tables without codes.
    **dict.fromkeys(CODED, 'dtype="int4"'),
}


def _code(value: object) -> str:
    return pprint.pformat(value, width=66, compact=True, sort_dicts=False)


def _sparsify_lines(small: Set[str], optimizer: str, level: str, rotate: str) -> list[str]:
    """Return a call of sparsify() that removes columns, and the step that does it.

    Args:
        small: tables to prune that have too few rows for the default of ``min_rows``.
    """
    more = f"{rotate}, min_rows=0" if small else rotate
    arguments = [level, 'block="col"', "end=0", f"advanced=ds.Advanced({more})"]
    return [*_call("sparse = ds.sparsify", "model", optimizer, *arguments), "sparse.step()"]


def _call(what: str, *arguments: str) -> list[str]:
    """Return a call in 79 columns."""
    line = f"{what}({', '.join(arguments)})"
    if len(line) <= 79:
        return [line]
    parts = ",\n".join(arguments)
    return [f"{what}(", textwrap.indent(f"{parts},", "    "), ")"]

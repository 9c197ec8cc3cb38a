"""`plan()`: smaller versions of a model's tables within a byte budget, and which one to use.

From the top: :class:`Plan`, the result, which prints itself; :func:`plan`, which lists what fits
(:class:`~dist_sparse.planning.candidates.Choices`); the rules that recommend candidates; the checks
of arguments; the code that is printed for a candidate; and :func:`rows_by_reads`, which counts the
rows that training never or hardly read.

The rules come from measurements at equal bytes, against int8 and small dense tables: two-tower
models on three data sets, and a DLRM on a small one (docs/planning.md). Where the data sets
disagree there is no rule: several candidates are recommended, to be measured.
"""

import glob
import math
import pprint
import textwrap
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_sparse import checks
from dist_sparse.compaction.moving import gather_rows
from dist_sparse.enforcer.dense import Optimizers, leaves, same_storage, stepped_by, sums_of
from dist_sparse.enforcer.fused import fused_sums
from dist_sparse.groups import world_group
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
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.text import count, number_of, percent, printable, size, table_lines
from dist_sparse.training.arguments import dense_bytes, parse_budget

_LABELS = {"full": "all columns", "small": "small dense", "columns": "rotated columns"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Candidates within a budget. Printing it shows their bytes and the code for the recommended.

    Args:
        budget: bytes.
        tables: names, shapes and dtypes of the tables, in the order of the model.
        untouched: number of rows that training has never touched, by table; tables without Adagrad
            sums are missing.
        hardly_read: number of other rows whose sum of squared gradients is below a tenth of the
            mean of its table's touched rows, by table. Of columns and column shards with sums of
            their own, a row's largest counts, so it depends a little on the sharding.
        choices: the candidates. Candidates with all columns are listed whether or not they fit.
        recommended: the one to use, or several to be measured. Empty if nothing fits, or if the
            tables fit as they are.
        why: reason for the recommendation.
    """

    budget: int
    tables: tuple[TableShape, ...]
    untouched: Mapping[str, int]
    hardly_read: Mapping[str, int]
    choices: tuple[Choice, ...]
    recommended: tuple[Choice, ...]
    why: str

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tables as they are trained."""
        return dense_bytes(self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able values, sizes in bytes."""
        return vars(self) | {
            "dense_bytes": self.dense_bytes,
            "tables": [asdict(table) | {"dtype": str(table.dtype)} for table in self.tables],
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
            lines += _code_lines(choice.candidate, self.tables)
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
        # Tables with all columns lose no rows but untouched ones.
        if choice.kind == "full" and choice.candidate.levels:
            return "touched rows"
        return _LABELS[choice.kind]

    def _reads_lines(self) -> list[str]:
        """Return how many rows of each table were never or hardly read, where that is known."""
        lines = []
        text = "Rows never read: unknown; a trained model's Adagrad would tell."
        if self.untouched:
            rows = []
            for table in self.tables:
                name = table.name
                if name in self.untouched:
                    numbers = table.shape[0], self.untouched[name], self.hardly_read[name]
                    rows.append([printable(name), *map(count, numbers)])
            head = ("table", "rows", "never read", "hardly read")
            lines = [*table_lines(head, rows, right=range(1, len(head))), ""]
            text = (
                "Never read: removing these rows is lossless on the training data."
                " Hardly read: less than a tenth of the table's mean sum of squared gradients."
            )
        return [*lines, *textwrap.wrap(text, 79), ""]


def plan(
    model: nn.Module | Mapping[str, tuple[int, int]],
    budget: float | str,
    *,
    rotate: Rotate | None = None,
    optimizer: Optimizers | None = None,
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
) -> Plan:
    """Return candidates within a byte budget for a model's tables, and which one to use. The model
    does not change. Collective: every rank of the world must call it.

    Dtypes of 32, 16, 8 and 4 bits, 4 bits with a scale for each column, and codes of 2, 4 and 8
    columns are combined with widths that are multiples of 4 columns, and, but for codes, with the
    removal of rows that training has never touched, which is lossless. Bytes are counted as a
    server holds them: weights, scales, books, indexes of kept rows, and bases that rotate outputs
    back. No weights are read, and no quality is predicted: recommendations follow rules that were
    measured on other models. Where a rule depends on the data, several candidates are recommended,
    to be measured.

    Args:
        model: as it was trained, wrapped or not; or ``(rows, columns)`` of float32 tables by name.
        budget: bytes, or a share of the tables' bytes: ``"10%"``, or a float, 0.1.
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
    world = world_group()
    with world.agreeing("plan()") as facts:
        limit = parse_budget(budget)
        located: list[ShardedData] = []
        if isinstance(model, nn.Module):
            located = ModelTables(model, include=include, exclude=exclude, slots=True).locate()
            _refuse_following(model, located)
            tables = tuple(map(shape_of, located))
        elif (include, exclude, optimizer) != (None, None, None):
            raise ValueError(
                "Invalid include, exclude or optimizer: "
                "they are for models, not for shapes of tables."
            )
        else:
            tables = _parse_shapes(model)
        groups = _rotated_groups(rotate, tables)
        checks.refuse(
            {"The tables have no rows: there is nothing to plan.": not dense_bytes(tables)}
        )
        # Ranks that plan for different tables or budgets would recommend different candidates.
        facts["tables"] = [[table.name, *table.shape, str(table.dtype)] for table in tables]
        facts["budget, rotate"] = [limit, groups]
    untouched, hardly_read = dict[str, int](), dict[str, int]()
    # Outside of the block above: counting rows communicates.
    if isinstance(model, nn.Module):
        untouched, hardly_read = rows_by_reads(model, located, optimizer)
    # parse_budget() returns a share as a float, and bytes as an int.
    budget_bytes = math.floor(limit * dense_bytes(tables)) if isinstance(limit, float) else limit
    choices = Choices(tables=tables, budget=budget_bytes, groups=groups, untouched=untouched)
    candidates = tuple(choices.all())
    recommended, why = _recommend(choices, candidates)
    return Plan(
        budget=budget_bytes,
        tables=tables,
        untouched=untouched,
        hardly_read=hardly_read,
        choices=candidates,
        recommended=recommended,
        why=why,
    )


# ------------------------------------------------------------------------------
# The rules: which of the candidates to use, and why.

# The candidate of each kind and dtype that fits, as of _most_kept().
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
    """Return the candidate of each kind and dtype that fits and keeps the most, but for untouched
    rows."""
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
    return " without the rows that training has never touched" if choice.candidate.levels else ""


def _without_headers(
    tables: Sequence[TableShape], fitting: Fitting, kind: str
) -> tuple[Choice, ...]:
    """Return the candidates whose rows have no scale and bias, by column and of codes, that are
    worth a measurement beside int4 rows. None if int4 rows of at least 24 bytes fit: these were as
    good."""
    widest = max(tables, key=lambda table: table.shape[1])

    def width(choice: Choice) -> int:
        return choice.candidate.shape(widest)[1]

    def of_dtype(dtype: str) -> tuple[Choice, ...]:
        return _of_kind(fitting, "full", dtype) or _of_kind(fitting, kind, dtype)

    if max(map(width, _of_kind(fitting, kind, "int4")), default=0) >= _NO_GAIN_FROM:
        return ()
    # The finest codes, which CODED lists first, that keep most columns: the best codes on Gowalla
    # kept 40 or 44 of 64.
    coded = chain(*map(of_dtype, CODED))
    wide = [choice for choice in coded if width(choice) >= 0.6 * widest.shape[1]]
    return (*of_dtype(BY_COLUMN), *wide[:1])


# ------------------------------------------------------------------------------
# Arguments, and facts of a model that need no weights.


def _refuse_following(model: nn.Module, located: Sequence[ShardedData]) -> None:
    """Refuse following tables, whose rows are slots for ids."""
    # FollowingIds can't be imported here: it needs TorchRec. Only its modules have `lookup_stats`.
    names = set().union(*(getattr(module, "lookup_stats", ()) for module in model.modules()))
    fixed = [data.name for data in located if data.name in names]
    if fixed:
        raise ValueError(
            f"Following tables have a fixed capacity, which no plan changes: {fixed}. Leave them"
            " out by exclude=, or give following() fewer rows."
        )


def _parse_shapes(tables: Any) -> tuple[TableShape, ...]:
    """Return the tables of a mapping of ``(rows, columns)`` by name, checked."""
    if not isinstance(tables, Mapping) or not tables:
        raise ValueError(
            f"Invalid model of type {type(tables).__name__}: must be a module, or shapes by table."
        )
    parsed = []
    for name, shape in tables.items():
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


def _code_lines(candidate: Candidate, tables: Sequence[TableShape]) -> list[str]:
    """Return the code that makes a candidate from a trained ``model`` and its ``optimizer``."""
    # By default, sparsify() leaves these tables dense.
    small = {table.name for table in tables if table.shape[0] < 16}
    lines, sparse = [], "None"
    if candidate.groups:
        groups = _code([*map(list, candidate.groups)])
        level = f"level={1 - candidate.columns:.6g}"
        few = small.intersection(chain(*candidate.groups))
        lines += _sparsify_lines(few, level, 'block="col"', f"rotate={groups}")
        lines += [
            "model = compact(model, sparse)",
            "# then train on; a sharded model has a new model.fused_optimizer. With Adam,",
            '# which has state for each weight, add optimizer_state="reset"',
        ]
    elif candidate.columns < 1:
        widths = dict.fromkeys(str(candidate.shape(table)[1]) for table in tables)
        lines.append(f"# of a model that was trained with embedding_dim={', '.join(widths)}")
    if candidate.levels:
        # sparsify() reads names as globs.
        include = f"include={_code([*map(glob.escape, candidate.levels)])}"
        few = small.intersection(candidate.levels)
        lines += _sparsify_lines(few, 'level="untouched"', include, 'block="row"')
        sparse = "sparse"
    if candidate.dtype in CODED:
        codes = {table.name: code for table in tables if (code := candidate.codes(table))}
        text = _code(codes)
        lines.append("# better: from half of the training on, with coded.step() after each step")
        lines += _call(
            "coded = quantize", "model", "optimizer", f"codes={text}", "begin=0", "end=0"
        )
        lines.append("coded.step()")
        sparse = "coded"
    how = _EXPORTS.get(candidate.dtype, f'dtype="{candidate.dtype}"')
    return [*lines, f'export(model, {sparse}, "served", {how})']


def _code(value: object) -> str:
    return pprint.pformat(value, width=66, compact=True, sort_dicts=False)


def _sparsify_lines(small: Set[str], *arguments: str) -> list[str]:
    """Return a call of sparsify(), and the step that removes.

    Args:
        small: tables to prune that have too few rows for the default of ``min_rows``.
    """
    ending = ["end=0", "min_rows=0"] if small else ["end=0"]
    return [
        *_call("sparse = sparsify", "model", "optimizer", *arguments, *ending),
        "sparse.step()",
    ]


def _call(what: str, *arguments: str) -> list[str]:
    """Return a call in 79 columns."""
    line = f"{what}({', '.join(arguments)})"
    if len(line) <= 79:
        return [line]
    parts = ",\n".join(arguments)
    return [f"{what}(", textwrap.indent(f"{parts},", "    "), ")"]


# ------------------------------------------------------------------------------
# Rows that training has never touched: removing them changes no prediction on training ids.

# Adagrad's sums of squared gradients of a shard, and their initial value, by the shard's address.
Sums = dict[int, tuple[Tensor, float]]


def rows_by_reads(
    model: nn.Module, located: Sequence[ShardedData], optimizer: Any = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many rows no gradient has reached, and hardly any, by table, for tables that
    Adagrad steps.

    Collective over the world. Adagrad's sums of squares never shrink, so a sum of 0 is a row that
    no batch has looked up, or only with gradients of 0. A table without any other row is left out:
    it was not trained, or its weights were loaded without the sums. So is a table whose sums begin
    above 0, where they absorb small gradients.

    Args:
        model: holds the tables, and the optimizers of fused ones.
        located: the tables.
        optimizer: the optimizer that steps the other tables, or a sequence of several.

    Raises:
        ValueError: something in ``optimizer`` is no optimizer.
    """
    world = world_group()
    with world.agreeing("plan()"):
        # Fused sums come last and win: an optimizer may list fused tables, which it never steps.
        sums = _optimizer_sums(located, optimizer) | fused_sums(model)
        totals = [_total(data, sums) for data in located]
    # A table counts only if each rank has the sums of all its shards.
    floors = _floors(located, world.all_gather_json(totals))
    by_ranks: dict[tuple[int, ...], list[ShardedData]] = defaultdict(list)
    for data in located:
        ranks = data.ranks or (world.rank,)
        # Only the ranks that hold a table take part in its gather.
        if world.rank in ranks and data.name in floors:
            by_ranks[ranks].append(data)
    never, hardly = dict[str, int](), dict[str, int]()
    # Over the world, because a table of a few ranks reports errors to these alone.
    with world.agreeing("plan()"):
        # All ranks use one order, or groups that overlap would wait for each other.
        for ranks in sorted(by_ranks):
            tables = by_ranks[ranks]
            touched = gather_rows(tables, partial(_flags, sums, {}), _reported_rects)
            often = gather_rows(tables, partial(_flags, sums, floors), _reported_rects)
            for name, read in touched.items():
                # If no row was touched, the sums carry no information.
                if read.any():
                    never[name] = int((~read).sum())
                    hardly[name] = int((~often[name]).sum()) - never[name]
    # Ranks that share a table have counted the same. Of a model that is not wrapped, each rank has
    # counted its own copy: the first one's counts.
    by_rank = world.all_gather_json([never, hardly])
    never, hardly = map(dict, starmap(ChainMap, zip(*by_rank, strict=True)))
    return never, hardly


def _optimizer_sums(located: Sequence[ShardedData], optimizer: Any) -> Sums:
    """Return the sums that the given optimizers have for this rank's shards."""
    sums: Sums = {}
    weights = [shard.tensor for data in located for shard in data.shards]
    for leaf in leaves([*filter(None, tree_leaves(optimizer))]):
        parameters = stepped_by(leaf)
        indices_of = same_storage(parameters)
        for weight in weights:
            # A shard is a view of its parameter: only their memory shows that they belong together.
            for index in indices_of(weight):
                state = sums_of(leaf, parameters[index], weight)
                if state is not None and state[1] == 0:
                    sums[weight.data_ptr()] = state
    return sums


def _total(data: ShardedData, sums: Sums) -> tuple[float, int] | None:
    """Return the sum over the rows of this rank's shards, and how many of these are not 0; None if
    a shard has no sums."""
    total, touched = 0.0, 0
    for rect, weight in data.shards:
        # The address of an empty shard is 0: it has no row that could be untouched.
        if weight.data_ptr() not in sums.keys() | {0}:
            return None
        rows = _row_sums(sums, data, rect)
        # One sum that overflowed would be more than all others.
        rows = rows[rows.isfinite()]
        total += float(rows.sum(dtype=torch.float64))
        touched += int(rows.count_nonzero())
    return total, touched


def _floors(located: Sequence[ShardedData], totals: Sequence[Any]) -> dict[str, float]:
    """Return the sum below which a row was hardly read, by table, for tables whose sums are known.

    Args:
        totals: what :func:`_total` returned for each table, by rank.
    """
    floors = {}
    for data, parts in zip(located, zip(*totals, strict=True), strict=True):
        if None not in parts:
            total, touched = map(sum, zip(*parts, strict=True))
            # A tenth of the mean.
            floors[data.name] = total / 10 / max(touched, 1)
    return floors


def _reported_rects(data: ShardedData, rank: int) -> Sequence[Rect]:
    """Return the rectangles that a rank reports: all of a copy that trains apart, since each copy
    sees other batches; otherwise those that it owns, so that one replica reports for all."""
    return data.tiling[rank] if data.copied else data.owned(rank)


def _flags(sums: Sums, floors: Mapping[str, float], data: ShardedData, rect: Rect) -> Tensor:
    """Return flags of the rows of a shard whose sum of squares is neither 0 nor below the floor of
    its table: bool ``(rect.rows,)`` on the CPU."""
    rows = _row_sums(sums, data, rect)
    # Not `rows >= floor`, which is False for NaN: a row that diverged was read.
    return ((rows != 0) & ~(rows < floors.get(data.name, 0.0))).cpu()


def _row_sums(sums: Sums, data: ShardedData, rect: Rect) -> Tensor:
    """Return the sum of squares of each row of a shard, ``(rect.rows,)``: the largest of its
    columns if each has its own."""
    if not rect.numel:
        return torch.zeros(rect.rows)
    weight = dict(data.shards)[rect]
    total, _ = sums[weight.data_ptr()]
    return total.reshape(rect.rows, -1).amax(1)

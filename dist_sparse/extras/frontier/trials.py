"""`serving()`: within a block, a model has the weights that an artifact would serve; afterwards
its own, bit for bit.

Each rank changes its own shards. Sparsifiers choose the removed rows, over all ranks; rows are
rounded as :func:`~dist_sparse.export` rounds them. Rows that column borders cut are sent in chunks:
no rank holds more than its shards, a copy of them, and a chunk.
"""

import glob
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.enforcer.enforcer import settle_all
from dist_sparse.groups import Group, group_over, world_group
from dist_sparse.optimizers import fused_sums
from dist_sparse.planning.candidates import BY_COLUMN, Candidate, shape_of
from dist_sparse.serving.books import decode_books
from dist_sparse.serving.encodings import ColumnSpread, Dtype, chunks, decode, encode
from dist_sparse.serving.sources import model_lookups, refuse_range
from dist_sparse.sparsifiers.importance import ImportanceSparsifier, Sums
from dist_sparse.tables.decoded import refuse_decoded, weights_of
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ROW, Located, ShardedData, check_writable
from dist_sparse.whole_rows import change_rows_, refuse_cut_copies


@contextmanager
def serving(model: nn.Module, candidate: Candidate) -> Iterator[None]:
    """Within the block, the tables of ``model`` hold the weights that would be served. Collective:
    every rank of the world must enter and leave it. Only rows that column borders cut are sent.

    Rows are removed first: by norm and Adagrad's sums where a fused Adagrad trains the tables,
    otherwise by the L2 norm; an attached enforcer changes nothing about that. Then tables are
    rotated and lose their last columns. Then the rest is rounded, and tables that were rotated
    alone are rotated back. So they may differ in the last bit from what is served.

    Afterwards, also after an error, the weights are what they were, bit for bit; what masks remove
    is zero. Takes a copy of this rank's shards. No optimizer state is written.

    Raises:
        ValueError: a table can't be served or has codes, or the candidate does not fit the tables;
            on every rank, and nothing was changed.

    Example::

        >>> import torch
        >>> from dist_sparse.planning.candidates import Candidate, shape_of
        >>> from dist_sparse.extras.frontier import serving
        >>> model = torch.nn.EmbeddingBag.from_pretrained(
        ...     torch.tensor([[0.0, 0.1], [1.0, 2.0], [0.2, 3.0]])
        ... )
        >>> with serving(model, Candidate(dtype="int4", levels={"weight": 1 / 3})):
        ...     print(model.weight.data)
        tensor([[0.0000, 0.0000],
                [0.9434, 2.0215],
                [0.2012, 3.0176]])
        >>> model.weight[0].data
        tensor([0.0000, 0.1000])
    """
    world = world_group()
    with world.agreeing("a trial") as facts:
        located = {data.name: data for data in ModelTables(model).locate()}
        tables = list(located.values())
        # Called for its errors: export() refuses tables whose lookup it does not know.
        model_lookups(model, tables)
        check_candidate(model, candidate, located)
        refuse_infinite(tables, "fp32")
        facts["candidate"] = asdict(candidate)
        weights: list[Tensor] = []
        for data in tables:
            check_writable(data)
            facts[f"table {data.name!r}"] = [data.shape, str(data.dtype), data.ranks, data.tiling]
            weights += [shard.tensor.detach() for shard in data.shards]
        # Mask dirty rows first: revived weights must be neither scored nor saved.
        settle_all(weights)
        saved = [weight.clone() for weight in weights]
    try:
        with torch.no_grad(), world.jointly("a trial"):
            _remove_rows(model, candidate, located, world)
            bases = _rotate(candidate, located) if candidate.groups else {}
            # A rotation may produce weights that 16 bits can't hold.
            with world.agreeing("a trial"):
                for data in tables:
                    dtype: Any = candidate.dtype_of(shape_of(data))
                    refuse_infinite([data], "int4" if dtype == BY_COLUMN else dtype)
            for data in tables:
                _round(data, candidate, bases.get(data.name))
        yield
    finally:
        for weight, before in zip(weights, saved, strict=True):
            weight.data.copy_(before)


def check_candidate(model: nn.Module, candidate: Candidate, located: Located) -> None:
    """Refuse a candidate that does not fit the tables of a model. Local.

    Raises:
        ValueError: names the table and the rule.
    """
    unknown = sorted({*candidate.alone, *candidate.levels} - located.keys())
    if unknown:
        raise ValueError(
            f"{unknown} of the candidate are not among the model's tables {sorted(located)}."
        )
    if candidate.groups:
        _check_rotated(model, candidate, located)
    elif candidate.columns < 1:
        raise ValueError(
            f"A smaller dense table, {candidate}, can't be tried on a model: it has to be trained."
        )
    # Their lookups would not read what a trial writes.
    refuse_decoded(weights_of(located.values()))
    for data in located.values():
        # Rows are scored and rounded whole, and each copy has rows of its own.
        refuse_cut_copies(data, "tried")


def refuse_infinite(tables: Iterable[ShardedData], dtype: str) -> None:
    """Refuse weights on this rank that are not finite in ``dtype``. Local: call it in
    ``agreeing()``, which raises on all ranks."""
    for data in tables:
        for shard in data.shards:
            refuse_range(data.name, shard.tensor, dtype)


def _check_rotated(model: nn.Module, candidate: Candidate, located: Located) -> None:
    """Refuse tables that can't be rotated as the candidate says."""
    from dist_sparse.extras.rotation.lookups import find_lookup_for_dots
    from dist_sparse.extras.rotation.update import check_group

    for group in candidate.groups:
        check_group([located[name] for name in group])
    for name, is_alone in candidate.alone.items():
        # In a group of several, outputs stay rotated: refused unless only dot products read them.
        if not is_alone:
            find_lookup_for_dots([model], located[name])


def _remove_rows(model: nn.Module, candidate: Candidate, located: Located, world: Group) -> None:
    """Zero the rows that the candidate removes. Collective."""
    # A sparsifier scores all of its tables alike, and only fused kernels have Adagrad's sums.
    by_kernel = defaultdict(list)
    for name in candidate.levels:
        by_kernel[str(located[name].kernel)].append(name)
    # Sorted: each sparsifier communicates, in one order on all ranks.
    for _, names in sorted(by_kernel.items()):
        sparsifier = _SumsSparsifier(model, names)
        unknown = sparsifier.unknown_tables(sparsifier.masks.tables.locate())
        # On all ranks or on none, or they would compare different scores.
        if world.all_reduce(torch.tensor(len(unknown))):
            sparsifier.scored_by = "norm"
        for name in names:
            level = candidate.level(shape_of(located[name]))
            sparsifier.data_groups[name]["sparsity_level"] = level
        sparsifier.step()


def _rotate(candidate: Candidate, located: Located) -> dict[str, Tensor]:
    """Rotate tables and zero the columns that they lose; return the bases of the tables that are
    rotated back. Collective."""
    from dist_sparse.extras.rotation.turning import bases_of, gram_matrices, share_, turn_

    turned_back: dict[str, Tensor] = {}
    for group in candidate.groups:
        ranks = group_over(located[group[0]].ranks)
        bases = bases_of(gram_matrices([located[name] for name in group], ranks), group)
        # As in rotate(): bases may differ in the last bit, and all ranks use the bases of the
        # first.
        share_([*bases.values()], ranks)
        for name, basis in bases.items():
            turn_(located[name], basis, ranks)
            width = candidate.shape(shape_of(located[name]))[1]
            # max(): a shard may begin to the right of the columns that stay.
            for rect, weight in located[name].shards:
                weight.data[:, max(width - rect.col, 0) :] = 0
        if len(group) == 1:
            turned_back |= bases
    return turned_back


def _round(data: ShardedData, candidate: Candidate, basis: Tensor | None) -> None:
    """Round a table to its dtype, and turn it back. Collective over its ranks."""
    ranks = group_over(data.ranks)
    shape = shape_of(data)
    dtype: Any = candidate.dtype_of(shape)
    if dtype == "codes":
        from dist_sparse.extras.codes.learning import learn_books, sample_rows

        # Books of the columns that stay; the removed ones are zeros to their right.
        width = candidate.shape(shape)[1]
        books = learn_books(sample_rows(data, ranks)[:, :width], candidate.codes(shape))
        change = partial(_coded, books, width)
    elif dtype == BY_COLUMN:
        change = partial(_rounded, "int4", _column_scales(data, ranks))
    else:
        change = partial(_rounded, dtype, None)
    change_rows_(data, change, ranks)
    if basis is not None:
        change_rows_(data, lambda rows: rows.double() @ basis.T.to(rows.device), ranks)


def _rounded(dtype: Dtype, scales: Tensor | None, rows: Tensor) -> Tensor:
    of_columns = None if scales is None else scales.to(rows.device)
    return decode(encode(rows, dtype, of_columns), rows.shape[1])


def _coded(books: Tensor, width: int, rows: Tensor) -> Tensor:
    """Return rows encoded by the nearest entries of the books, and decoded again."""
    from dist_sparse.extras.codes.learning import assign

    codes = torch.empty(len(rows), len(books), dtype=torch.uint8, device=rows.device)
    assign(rows[:, :width], books, codes)
    decoded = decode_books(codes, books.to(rows.device), width)
    return F.pad(decoded, (0, rows.shape[1] - width))


def _column_scales(data: ShardedData, ranks: Group) -> Tensor:
    """Return the scales that export() gives the columns of a table. Collective over its ranks."""
    columns = data.shape[1]
    weights = dict(data.shards)
    spread = ColumnSpread(columns)
    for rect in data.owned(ranks.rank):
        for rows in chunks(rect.rows, columns):
            # Padded to the table's width with zeros, which do not count.
            spread.add(F.pad(weights[rect][rows], (rect.col, columns - rect.col_end)))
    spread.counts = ranks.all_reduce(spread.counts)
    return spread.scales()


class _SumsSparsifier(ImportanceSparsifier):
    """Score rows by the sums of a model's fused Adagrad optimizers. It reads them itself instead of
    through an enforcer: the model may have another one attached."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__(sparsity_level=0.0, sparse_block_shape=(1, ROW), score="norm_accumulator")
        self._fused = fused_sums(model)
        self.add_model(model, include=list(map(glob.escape, names)))

    def sums(self) -> Sums:
        return self._fused

"""Gram matrices of sharded tables, and turning or changing their rows, in place and chunk by chunk.

Shards that hold whole rows send nothing but their part of ``G``. Rows that column borders cut are
put together chunk by chunk, by one all-to-all each, from metadata that every rank has: no rank
holds more than a chunk of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dist_sparse.groups import Group, Parcels
from dist_sparse.tables.shards import Rect, ShardedData

# Elements taken at a time: 8 MiB of float64.
_CHUNK = 1 << 20


def gram_matrices(
    tables: Sequence[ShardedData],
    group: Group,
    lookups: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return ``W^T W`` of each table by name, float64 ``(columns, columns)`` on the CPU. Collective
    over ``group``: an all-reduce of all matrices, and as much as :func:`turn_` sends of rows that
    are cut.

    Args:
        lookups: by table how often each row of this rank's shards was looked up: rows weigh as
            much, and 1 more, so that a table without lookups has a matrix too. None weighs all
            alike.
    """
    found = {}
    for data in tables:
        gram = found[data.name] = torch.zeros(data.shape[1], data.shape[1], dtype=torch.float64)
        # Each row is read by one rank: the owner of its first element.
        readers = []
        for rank in range(group.size):
            readers.append([_rows_of(rect) for rect in data.owned(rank) if rect.col == 0])
        for span, rows in _whole_rows(data, group, readers):
            exact = weighted = rows.double()
            if lookups is not None:
                weighted = exact * _weights(data, lookups[data.name], span)
            gram += (exact.T @ weighted).cpu()
    _add_up_([*found.values()], group)
    return found


def share_(matrices: Sequence[Tensor], group: Group) -> None:
    """Overwrite matrices by those of the group's first rank. Collective over ``group``: one
    all-reduce."""
    if group.rank:
        for matrix in matrices:
            matrix.zero_()
    _add_up_(matrices, group)


def turn_(data: ShardedData, basis: Tensor, group: Group) -> None:
    """Replace ``W`` by ``W @ basis`` in place, computed in float64. Collective as
    :func:`change_rows_`."""
    change_rows_(data, lambda rows: rows.double() @ basis.to(rows.device), group)


def change_rows_(data: ShardedData, change: Callable[[Tensor], Tensor], group: Group) -> None:
    """Replace whole rows in place by what ``change`` makes of some of them, ``(n, columns)``, in
    any floating dtype. Collective over ``group`` if column borders cut the table: an all-to-all for
    about a million elements."""
    readers = [list(dict.fromkeys(map(_rows_of, rects))) for rects in data.tiling]
    for span, rows in _whole_rows(data, group, readers):
        changed = change(rows)
        # Column cuts of a rank may be several shards of the same rows.
        for rect, weight in data.shards:
            if _common(span, _rows_of(rect)) == span:
                own = changed[:, rect.col : rect.col_end]
                weight.data[_within(span, rect.row)] = own.to(weight.dtype)


def _add_up_(matrices: Sequence[Tensor], group: Group) -> None:
    """Replace matrices by their sums over ranks, all in one message."""
    # torch can't put an empty list together.
    if matrices:
        vector_to_parameters(group.all_reduce(parameters_to_vector(matrices)), matrices)


def _weights(data: ShardedData, lookups: Sequence[Tensor], span: range) -> Tensor:
    """Return the weights of rows whose first elements this rank has: float64 ``(rows, 1)``."""
    [counts, *_] = [
        counts[_within(span, rect.row)]
        for (rect, _), counts in zip(data.shards, lookups, strict=True)
        if rect.col == 0 and span.start in _rows_of(rect)
    ]
    return 1 + counts.double().unsqueeze(1)


def _whole_rows(
    data: ShardedData, group: Group, readers: Sequence[Sequence[range]]
) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows that this rank reads, chunk by chunk: their global numbers, and
    ``(rows, columns)``, possibly a view. Collective over ``group`` if column borders cut the table.

    Args:
        readers: for each group rank the rows that it reads, each once, all of one shard each.
    """
    # A table of very many columns still moves by a row.
    step = max(1, _CHUNK // data.shape[1])
    if not data.has_whole_rows:
        for top in range(0, data.shape[0], step):
            yield from _exchanged(data, group, readers, range(top, top + step))
        return
    # A reader reads its own shards: nothing is sent.
    held = {_rows_of(rect): weight.data for rect, weight in data.shards}
    for rows in readers[group.rank]:
        for start in range(0, len(rows), step):
            # Numbers of a range are sliced without being made.
            chunk = rows[start : start + step]
            yield chunk, held[rows][_within(chunk, rows.start)]


def _exchanged(
    data: ShardedData, group: Group, readers: Sequence[Sequence[range]], chunk: range
) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows of a chunk that this rank reads, put together. Collective over ``group``: one
    all-to-all."""
    # A rank without a shard sends nothing, but takes part.
    device = data.shards[0].tensor.device if data.shards else torch.device("cpu")
    held = dict(data.shards)
    found: dict[range, Tensor] = {}
    for wanted in readers[group.rank]:
        if rows := _common(wanted, chunk):
            found[rows] = torch.empty(len(rows), data.shape[1], dtype=data.dtype, device=device)
    parcels = Parcels(group)
    arriving: list[tuple[Tensor, Callable[[], Tensor]]] = []
    # Both sides loop in the same order: parcels have no names.
    for sender, reader in product(range(group.size), repeat=2):
        for rect, wanted in product(data.owned(sender), readers[reader]):
            span = _common(wanted, chunk)
            rows = _common(span, _rows_of(rect))
            if not rows:
                continue
            if sender == group.rank:
                parcels.send(reader, held[rect].data[_within(rows, rect.row)].contiguous())
            if reader == group.rank:
                place = found[span][_within(rows, span.start), rect.col : rect.col_end]
                arriving.append((place, parcels.expect(sender, place.shape, data.dtype)))
    parcels.exchange(device)
    for place, read in arriving:
        place.copy_(read())
    yield from found.items()


def _rows_of(rect: Rect) -> range:
    return range(rect.row, rect.row_end)


def _common(rows: range, others: range) -> range:
    """Return the rows in both ranges, empty if there are none."""
    return range(max(rows.start, others.start), min(rows.stop, others.stop))


def _within(rows: range, first: int) -> slice:
    """Return the place of rows in a tensor that begins with the row ``first``."""
    return slice(rows.start - first, rows.stop - first)


# Bases in which few columns hold most of a table: pure functions of Gram matrices ``G = W^T W``,
# in float64.
#
# A basis ``R`` ``(columns, columns)`` replaces a table ``W`` by ``W @ R``, whose columns hold less
# and less. Columns of ``W`` that are zero, such as removed ones, have a zero on the diagonal of
# ``G``: they take no part and become the last ones, exactly zero.


# Part of the largest eigenvalue below which a smaller one is raised, so that a basis can be
# inverted.
_LEAST = 1e-10


def bases_of(grams: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the bases of tables whose rows meet in dot products, by name: of two the balanced
    ones, otherwise one for all.

    Args:
        grams: Gram matrices of all tables, by name.
        names: of the tables that meet.

    Raises:
        ValueError: weights are not finite.
    """
    together = []
    for name in names:
        if not grams[name].isfinite().all():
            raise ValueError(
                f"Table {name!r} can't be rotated: weights are not finite. No mask was changed."
            )
        together.append(grams[name])
    if len(names) == 2:
        return dict(zip(names, paired_bases(*together), strict=True))
    return dict.fromkeys(names, common_basis(together))


def common_basis(grams: Sequence[Tensor]) -> Tensor:
    """Return one orthogonal basis for several tables: the eigenvectors of the sum of
    ``G / trace(G)``.

    Example::

        >>> import torch
        >>> from dist_sparse.rotation.turning import common_basis
        >>> weight = torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
        >>> (weight @ common_basis([weight.T @ weight])).abs().round(decimals=3)
        tensor([[1.4140, 0.0000],
                [2.8280, 0.0000]], dtype=torch.float64)
    """
    total = torch.stack(
        [gram / gram.trace().clamp(min=torch.finfo(gram.dtype).tiny) for gram in grams]
    ).sum(0)
    # A column of zeros takes no part.
    used = total.diagonal().nonzero().flatten()
    # eigh() returns ascending eigenvalues; the first columns are to hold the most.
    return _placed(torch.linalg.eigh(_part(total, used)).eigenvectors.flip(1), used, len(total))


def paired_bases(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bases ``R_a, R_b`` of two tables with ``R_a @ R_b.T`` the identity, in which both
    Gram matrices are the same diagonal: the singular values of all dot products between the two
    tables' rows.

    With ``L L^T = G``: ``A S B^T = svd(L_a^T L_b)``, ``R_a = L_a^-T A S^1/2``,
    ``R_b = L_b^-T B S^1/2``. Columns that are zero in either table become the last ones, as they
    are.

    Example::

        >>> import torch
        >>> from dist_sparse.rotation.turning import paired_bases
        >>> user, item = torch.randn(9, 4).double(), torch.randn(5, 4).double()
        >>> r_user, r_item = paired_bases(user.T @ user, item.T @ item)
        >>> torch.allclose(user @ r_user @ (item @ r_item).T, user @ item.T)
        True
    """
    # A column that one table lacks adds nothing to a dot product.
    used = ((first.diagonal() != 0) & (second.diagonal() != 0)).nonzero().flatten()
    (root_a, inverse_a), (root_b, inverse_b) = _root(_part(first, used)), _root(_part(second, used))
    left, singular, right = torch.linalg.svd(root_a.T @ root_b)
    scale = singular.sqrt()
    basis_a = _placed(inverse_a.T @ left * scale, used, len(first))
    return basis_a, _placed(inverse_b.T @ right.T * scale, used, len(first))


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """``L`` with ``L @ L.T`` equal to ``gram``, and its inverse."""
    values, vectors = torch.linalg.eigh(gram)
    # G = V diag(values) V^T, so L = V diag(sqrt(values)).
    scale = values.clamp(min=_LEAST * float(values.max()) if len(values) else 0).sqrt()
    return vectors * scale, (vectors / scale).T


def _part(gram: Tensor, used: Tensor) -> Tensor:
    return gram[used.unsqueeze(1), used]


def _placed(basis: Tensor, used: Tensor, size: int) -> Tensor:
    """``basis`` over the used columns, which become the first; the others follow as they are."""
    unused = torch.ones(size, dtype=torch.bool).index_fill_(0, used, False).nonzero().flatten()
    whole = torch.zeros(size, size, dtype=basis.dtype)
    whole[used, : len(used)] = basis
    whole[unused, torch.arange(len(used), size)] = 1
    return whole

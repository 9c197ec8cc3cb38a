"""Gram matrices of sharded tables, bases from them, and rows rotated in place.

Shards with whole rows send nothing but their part of ``G``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dist_sparse.groups import Group
from dist_sparse.tables.shards import ShardedData
from dist_sparse.whole_rows import change_rows_, row_span, whole_rows, within


def gram_matrices(
    tables: Sequence[ShardedData],
    group: Group,
    lookups: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return ``W^T W`` of each table by name, float64 ``(columns, columns)`` on the CPU. Collective
    over ``group``: one all-reduce of all matrices, and one all-to-all per chunk of rows that are
    cut.

    Args:
        lookups: by table, the number of lookups of each row of this rank's shards. The weight of a
            row is this number + 1, so that a table without lookups has a matrix too. None gives all
            rows the weight 1.
    """
    grams = {}
    for data in tables:
        gram = grams[data.name] = torch.zeros(data.shape[1], data.shape[1], dtype=torch.float64)
        # Each row counts once: on the rank that owns its first element.
        readers = []
        for rank in range(group.size):
            readers.append([row_span(rect) for rect in data.owned(rank) if rect.col == 0])
        for span, rows in whole_rows(data, group, readers):
            exact = weighted = rows.double()
            if lookups is not None:
                weighted = exact * _row_weights(data, lookups[data.name], span)
            gram += (exact.T @ weighted).cpu()
    _add_up_([*grams.values()], group)
    return grams


def share_(matrices: Sequence[Tensor], group: Group) -> None:
    """Broadcast the matrices of the group's first rank, in place. Collective over ``group``: one
    all-reduce."""
    if group.rank:
        for matrix in matrices:
            matrix.zero_()
    _add_up_(matrices, group)


def turn_(data: ShardedData, basis: Tensor, group: Group) -> None:
    """Replace ``W`` by ``W @ basis`` in place, computed in float64. Collective as
    :func:`~dist_sparse.whole_rows.change_rows_`."""
    change_rows_(data, lambda rows: rows.double() @ basis.to(rows.device), group)


def _add_up_(matrices: Sequence[Tensor], group: Group) -> None:
    """Replace matrices by their sums over ranks, all in one message."""
    # parameters_to_vector() fails for an empty list.
    if matrices:
        vector_to_parameters(group.all_reduce(parameters_to_vector(matrices)), matrices)


def _row_weights(data: ShardedData, lookups: Sequence[Tensor], span: range) -> Tensor:
    """Return the weights of rows, float64 ``(rows, 1)``. This rank has their first elements.

    Args:
        lookups: the counts of each shard's rows.
        span: the numbers of the rows, all of one shard.
    """
    for (rect, _), counts in zip(data.shards, lookups, strict=True):
        # Lookups are counted in the leftmost shards.
        if rect.col == 0 and span.start in row_span(rect):
            return 1 + counts[within(span, rect.row)].double().unsqueeze(1)
    raise AssertionError("no leftmost shard has these rows")


# Bases in which few columns hold most of a table: pure functions of Gram matrices ``G = W^T W``,
# in float64.
#
# A basis ``R`` ``(columns, columns)`` replaces a table ``W`` by ``W @ R``, whose columns are in
# descending order of the information they hold. Columns of ``W`` that are zero, such as removed
# ones, have a zero on the diagonal of ``G``: they take no part and become the last ones, exactly
# zero.


# Eigenvalues below this fraction of the largest one are raised to it, so that a basis has an
# inverse.
_SMALLEST_RATIO = 1e-10


def bases_of(grams: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return by name the bases of tables that are rotated together: the balanced bases of two
    tables, otherwise one basis for all.

    Args:
        grams: Gram matrices of all tables, by name.
        names: of the tables that are rotated together.

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
        >>> from dist_sparse.extras.rotation.turning import common_basis
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
    # flip(): eigh() returns ascending eigenvalues, and the first column is to hold the most.
    return _full_basis(
        torch.linalg.eigh(_submatrix(total, used)).eigenvectors.flip(1), used, len(total)
    )


def paired_bases(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bases ``R_a, R_b`` of two tables with ``R_a @ R_b.T`` the identity, in which both
    Gram matrices are the same diagonal: the singular values of all dot products between the two
    tables' rows.

    With ``L L^T = G``: ``A S B^T = svd(L_a^T L_b)``, ``R_a = L_a^-T A S^1/2``,
    ``R_b = L_b^-T B S^1/2``. Columns that are zero in either table become the last ones, as they
    are.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.rotation.turning import paired_bases
        >>> user, item = torch.randn(9, 4).double(), torch.randn(5, 4).double()
        >>> r_user, r_item = paired_bases(user.T @ user, item.T @ item)
        >>> torch.allclose(user @ r_user @ (item @ r_item).T, user @ item.T)
        True
    """
    # A column that is zero in one table adds nothing to a dot product.
    used = ((first.diagonal() != 0) & (second.diagonal() != 0)).nonzero().flatten()
    root_a, inverse_a = _root(_submatrix(first, used))
    root_b, inverse_b = _root(_submatrix(second, used))
    left, singular, right = torch.linalg.svd(root_a.T @ root_b)
    scale = singular.sqrt()
    basis_a = _full_basis(inverse_a.T @ left * scale, used, len(first))
    return basis_a, _full_basis(inverse_b.T @ right.T * scale, used, len(first))


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``L`` with ``L @ L.T`` equal to ``gram``, and its inverse."""
    values, vectors = torch.linalg.eigh(gram)
    # G = V diag(values) V^T, so L = V diag(sqrt(values)).
    scale = values.clamp(min=_SMALLEST_RATIO * float(values.max()) if len(values) else 0).sqrt()
    return vectors * scale, (vectors / scale).T


def _submatrix(gram: Tensor, used: Tensor) -> Tensor:
    """Return the rows and columns ``used`` of a matrix."""
    return gram[used.unsqueeze(1), used]


def _full_basis(basis: Tensor, used: Tensor, size: int) -> Tensor:
    """Return a basis over the ``used`` columns as one over all ``size`` columns. The used columns
    become the first ones; the others follow unchanged."""
    unused = torch.ones(size, dtype=torch.bool).index_fill_(0, used, False).nonzero().flatten()
    whole = torch.zeros(size, size, dtype=basis.dtype)
    whole[used, : len(used)] = basis
    whole[unused, torch.arange(len(used), size)] = 1
    return whole

"""Bases in which few columns hold most of a table: pure functions of Gram matrices ``G = W^T W``,
in float64.

A basis ``R`` ``(columns, columns)`` replaces a table ``W`` by ``W @ R``, whose columns hold less
and less. Columns of ``W`` that are zero, such as removed ones, have a zero on the diagonal of
``G``: they take no part and become the last ones, exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Part of the largest eigenvalue below which a smaller one is raised, so that a basis can be
# inverted.
_LEAST = 1e-10


def bases_of(grams: Sequence[Tensor]) -> list[Tensor]:
    """Return the bases of tables whose rows meet in dot products: of two the balanced ones,
    otherwise one for all."""
    return list(paired_bases(*grams)) if len(grams) == 2 else [common_basis(grams)] * len(grams)


def common_basis(grams: Sequence[Tensor]) -> Tensor:
    """Return one orthogonal basis for several tables: the eigenvectors of the sum of
    ``G / trace(G)``.

    Example::

        >>> import torch
        >>> from dist_sparse.rotation.bases import common_basis
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
        >>> from dist_sparse.rotation.bases import paired_bases
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
    placed = [
        _placed(inverse.T @ side * scale, used, len(first))
        for inverse, side in ((inverse_a, left), (inverse_b, right.T))
    ]
    return placed[0], placed[1]


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

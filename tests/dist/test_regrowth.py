"""Removed rows come back by scores that live on. (C1, C2)"""

from __future__ import annotations

import torch

from dist_sparse import ImportanceSparsifier, MaskEnforcer
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import build
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.plugin import on_ranks


@on_ranks(2)
def test_rows_come_back_by_their_traffic() -> None:
    """Lookups of removed rows are counted, so that they come back."""
    model = build(trained_cells(2)["row_wise"], torch.optim.SGD)
    sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="frequency")
    sparsifier.add_model(model)
    taken = []
    with MaskEnforcer(sparsifier).attach(optimizer_of(model)):
        for hot in (slice(0, None, 2), slice(1, None, 2)):
            for name in sparsifier.data_groups:
                masks = sparsifier.masks.tables.masks(name)
                for mask, counts in zip(
                    masks, sparsifier.masks.tables.table(name).counts.values(), strict=True
                ):
                    rows = torch.zeros(64, dtype=torch.int32)
                    rows[hot] = 5
                    counts.copy_(rows[mask.rect.row : mask.rect.row_end])
            before = sparsifier.full_mask("user")[:, 0]
            reset_traffic()
            sparsifier.step()
            taken.append(traffic().collectives)
            after = sparsifier.full_mask("user")[:, 0]
            changed = int((before != after).sum())
            assert changed in (18, 19, 36, 37), changed
    assert max(taken) <= 9

"""Masks that follow the traffic for good, and the share of lookups that removed rows have, against
a count by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse import Advanced, sparsify
from dist_sparse.enforcer import rows as rows_module
from dist_sparse.text import percent
from tests.dist.cells import Cell, batch, build
from tests.dist.enforcing import loss_of, optimizer_of, trained_cells
from tests.dist.plugin import on_ranks


def lookups_of(cell: Cell, steps: range) -> dict[str, Tensor]:
    """Lookups of each row over the batches of both ranks."""
    seen = [batch(cell, seed=100 * step + rank, size=2) for step in steps for rank in range(2)]
    found = {}
    for table in cell.tables:
        ids = torch.cat([features[name].values() for features in seen for name in table.features])
        found[table.name] = torch.bincount(ids, minlength=table.rows)
    return found


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_the_share_of_lookups_that_removed_rows_have(name: str) -> None:
    cell = trained_cells(2)[name]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model,
        optimizer,
        level=0.5,
        advanced=Advanced(score="frequency", decay=1, min_rows=0, optimizer_state="reset"),
        end=None,
        every=2,
    )
    removed = {table.name: torch.zeros(table.rows, dtype=torch.bool) for table in cell.tables}
    wanted = []
    recorder, updates = sparse.sparsifier.record(), []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model(batch(cell, seed=100 * step + dist.get_rank(), size=2))).backward()
        optimizer.step()
        if step % 2 == 0:  # until now these rows were removed
            counts = lookups_of(cell, range(step + 1))
            wanted.append(
                {name: (int(n.sum()), int(n[removed[name]].sum())) for name, n in counts.items()}
            )
        sparse.step()
        updates += recorder.take()
        removed = {name: sparse.sparsifier.full_mask(name)[:, 0] == 0 for name in removed}
    counts = lookups_of(cell, range(6))
    shares = {name: int(n[removed[name]].sum()) / int(n.sum()) for name, n in counts.items()}
    whole = sum(int(n[removed[name]].sum()) for name, n in counts.items()) / sum(
        int(n.sum()) for n in counts.values()
    )
    each = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    assert f"lookups of removed rows: {percent(whole)} ({each})" in sparse.summary()
    logged = [{t.name: (t.lookups, t.removed_lookups) for t in update.tables} for update in updates]
    assert logged == wanted and any(removed for _, removed in wanted[-1].values())
    sparse.detach()


def test_embeddings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second forward is counted, in training only, and from the last mask update on."""
    monkeypatch.setattr(rows_module, "EVERY", 2)
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(40, 4), "word": nn.Embedding(30, 4)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level=0.5, begin=0, end=0, advanced=Advanced(min_rows=0))
    ids = [torch.randint(30, (6, 5)) for _ in range(4)]
    for batch_ids in ids:
        loss = model["bag"](batch_ids).sum() + model["word"](input=batch_ids).sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model["bag"](torch.zeros(1, 50, dtype=torch.int64))
        sparse.step()
    text = sparse.summary().splitlines()[-1]
    for name in ("bag", "word"):
        removed = sparse.sparsifier.full_mask(name)[:, 0] == 0
        # The first forward was before the mask update at step 0.
        hit = torch.cat([removed[ids[1]], removed[ids[3]]]).float().mean()
        assert f"{name} {percent(float(hit))}" in text
    sparse.detach()


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_the_default_score_samples_lookups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every forward counted, the log has the lookups since the last mask update, and those of
    removed rows."""
    monkeypatch.setattr(rows_module, "EVERY", 1)
    cell = trained_cells(2)[name]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(model, optimizer, level=0.5, end=None, every=2, advanced=Advanced(min_rows=0))
    removed = {table.name: torch.zeros(table.rows, dtype=torch.bool) for table in cell.tables}
    wanted, seen = [], 0
    recorder, updates = sparse.sparsifier.record(), []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model(batch(cell, seed=100 * step + dist.get_rank(), size=2))).backward()
        optimizer.step()
        if step % 2 == 0:
            counts = lookups_of(cell, range(seen, step + 1))
            # Not known before a table has lost something.
            wanted.append(
                {
                    name: (int(n.sum()), int(n[removed[name]].sum()))
                    if removed[name].any()
                    else (None, None)
                    for name, n in counts.items()
                }
            )
            seen = step + 1
        sparse.step()
        updates += recorder.take()
        removed = {name: sparse.sparsifier.full_mask(name)[:, 0] == 0 for name in removed}
    counts = lookups_of(cell, range(seen, 6))
    share = sum(int(n[removed[name]].sum()) for name, n in counts.items()) / sum(
        int(n.sum()) for n in counts.values()
    )
    assert f"lookups of removed rows: {percent(share)} (" in sparse.summary()
    logged = [{t.name: (t.lookups, t.removed_lookups) for t in update.tables} for update in updates]
    assert logged == wanted and any(removed for _, removed in wanted[-1].values())
    sparse.detach()

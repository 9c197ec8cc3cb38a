"""Several tables lose together the bytes with the smallest scores, exactly, and none more than it
may."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.scores import Segment
from dist_sparse.masking.selection import Candidates, select_smallest


def together(tables: list[Tensor], most: list[int], prices: list[int], need: int) -> list[Tensor]:
    """Removed flags of each table by the library."""
    segments = [Segment(0, range(1), 1) for _ in tables]
    for segment, scores in zip(segments, tables, strict=True):
        segment.add(scores.view(torch.int32).view(-1, 1).clone())
    candidates = [
        Candidates(str(i), k, len(tables[i]), [segments[i]], price=prices[i])
        for i, k in enumerate(most)
    ]
    thresholds = select_smallest(candidates, Group(), pooled_bytes=need)
    found = []
    for segment, threshold, scores in zip(segments, thresholds, tables, strict=True):
        parts = [threshold.removes(segment, at, bits) for at, bits in segment.chunks()]
        found.append(torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool))
        assert int(found[-1].sum()) == (threshold.removed or 0)
        assert len(found[-1]) == len(scores)
    return found


def oracle(tables: list[Tensor], most: list[int], prices: list[int], need: int) -> list[Tensor]:
    """One block after the other."""
    order = sorted(
        (float(score), t, i) for t, scores in enumerate(tables) for i, score in enumerate(scores)
    )
    removed = [torch.zeros(len(scores), dtype=torch.bool) for scores in tables]
    for _, table, i in order:
        if need > 0 and int(removed[table].sum()) < most[table]:
            removed[table][i] = True
            need -= prices[table]
    return removed


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_all_blocks(data: st.DataObject) -> None:
    kinds = (
        st.sampled_from([0.0, 1e-45, 0.5, 1.0, 3e38]),
        st.floats(0, 2.0**100, width=32),
        st.integers(0, 3000).map(lambda i: 1 + i * 2.0**-23),  # equal in their leading bits
    )
    element = data.draw(st.sampled_from(kinds), "kind of scores")
    tables = data.draw(
        st.lists(st.lists(element, min_size=1, max_size=40), min_size=1, max_size=5), "tables"
    )
    scores = [torch.tensor(values, dtype=torch.float32) for values in tables]
    most = [data.draw(st.integers(0, len(values)), "most") for values in tables]
    prices = [data.draw(st.sampled_from([1, 3, 4, 64]), "price") for _ in tables]
    total = sum(k * price for k, price in zip(most, prices, strict=True))
    if total:
        need = data.draw(st.integers(1, total), "need")
        got, want = together(scores, most, prices, need), oracle(scores, most, prices, need)
        assert [flags.tolist() for flags in got] == [flags.tolist() for flags in want]

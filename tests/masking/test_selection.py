"""The threshold is exactly that of the k smallest scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking import selection
from dist_sparse.masking.scores import Segment
from dist_sparse.masking.selection import Candidates, select_smallest

ALONE = Group()


def smallest(scores: Tensor, k: int, cols: int = 1, pieces: int = 1) -> Tensor:
    """Removed flags of ``scores`` by the library, the scores cut into ``pieces`` segments of whole
    rows."""
    rows = scores.numel() // cols
    segments, start = [], 0
    for piece in range(pieces):
        stop = rows * (piece + 1) // pieces
        bits = scores[start * cols : stop * cols].view(torch.int32).clone()
        segments.append(Segment(start, range(cols), cols))
        segments[-1].add(bits.view(-1, cols))
        start = stop
    [threshold] = select_smallest([Candidates("t", k, scores.numel(), segments)], ALONE)
    return torch.cat([threshold.removes(s, at, bits) for s in segments for at, bits in s.chunks()])


def segment(scores: Tensor) -> Segment:
    """One column of scores."""
    made = Segment(0, range(1), 1)
    made.add(scores.view(torch.int32).view(-1, 1))
    return made


def expected(scores: Tensor, k: int) -> Tensor:
    removed = torch.zeros(scores.numel(), dtype=torch.bool)
    removed[torch.sort(scores, stable=True).indices[:k]] = True
    return removed


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_equals_a_stable_sort(data: st.DataObject) -> None:
    few = data.draw(st.booleans(), "few different scores")
    element = (
        st.sampled_from([0.0, 1e-45, 0.5, 1.0, 3e38]) if few else st.floats(0, 2.0**100, width=32)
    )
    cols = data.draw(st.integers(1, 5), "cols")
    values = data.draw(st.lists(element, min_size=cols, max_size=60 * cols), "scores")
    scores = torch.tensor(values[: len(values) // cols * cols], dtype=torch.float32)
    k = data.draw(st.integers(0, scores.numel()), "k")
    pieces = data.draw(st.integers(1, 4), "pieces")
    assert torch.equal(smallest(scores, k, cols, pieces), expected(scores, k))


@pytest.mark.parametrize("k", [1, 300, 511, 512, 513, 4000, 8191])
@pytest.mark.parametrize("order", ["crowd first", "crowd last", "mixed"])
def test_candidates_are_kept_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, k: int, order: str
) -> None:
    # The crowd shares the leading bits of the threshold and fills some chunks but not others.
    monkeypatch.setattr(selection, "_CHUNK", 64)
    crowd, rest = 1.0 + torch.rand(600) / 16, torch.rand(7592) * 100 + 2
    scores = torch.cat([crowd, rest] if order == "crowd first" else [rest, crowd])
    if order == "mixed":
        scores = scores[torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(0))]
    assert torch.equal(smallest(scores, k), expected(scores, k))


def test_many_tables_are_settled_in_different_rounds() -> None:
    torch.manual_seed(0)
    tables = [
        torch.rand(1000),
        torch.zeros(50),
        torch.randint(0, 3, (999,)).float(),
        torch.rand(1),
        torch.rand(77),
    ]
    ks = [400, 20, 500, 1, 0]
    segments = [segment(t) for t in tables]
    candidates = [
        Candidates(str(i), k, t.numel(), [s])
        for i, (k, t, s) in enumerate(zip(ks, tables, segments, strict=True))
    ]
    for threshold, known, table, k in zip(
        select_smallest(candidates, ALONE), segments, tables, ks, strict=True
    ):
        removed = torch.cat([threshold.removes(known, at, bits) for at, bits in known.chunks()])
        assert torch.equal(removed, expected(table, k))


def test_scores_that_are_not_finite_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'user'.*finite"):
        select_smallest(
            [Candidates("user", 1, 3, [segment(torch.tensor([1.0, torch.inf, 2.0]))])], ALONE
        )

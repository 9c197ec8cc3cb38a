"""What is known of indexed scores equals a pass over all of them, whatever was replaced in
between."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.masking.kept_scores import IndexedScores
from dist_sparse.masking.masks import BlockMask
from dist_sparse.masking.scores import KEPT, Segment, first_histogram
from dist_sparse.masking.selection import Threshold
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Rect

SCORES, COLS = 600, 3


def some(count: int, *, ties: bool) -> Tensor:
    """Scores with zeros, close to each other or tied, as int32."""
    found = torch.rand(count).mul_(0.2).add_(1.0)
    found = found.mul_(20).round_().div_(20) if ties else found
    return found.mul_((torch.rand(count) > 0.3).float()).view(torch.int32)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ties=st.booleans(),
    level=st.floats(0, 1),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 1, 30, 300]), st.sampled_from([True, True, True, False])),
        max_size=8,
    ),
)
def test_what_is_known_is_true(
    seed: int, ties: bool, level: float, steps: list[tuple[int, bool]]
) -> None:
    """Counts of the second and third round, and the places of scores in a range, after each change
    of some scores."""
    torch.manual_seed(seed)
    bits = some(SCORES, ties=ties).view(-1, COLS)
    index = IndexedScores(bits.clone(), first_histogram(bits.view(-1)))
    answered = 0
    for turn, (changed, asked) in enumerate(steps):
        places = torch.randperm(SCORES)[:changed]
        if changed:
            index.replace(places, some(changed, ties=ties))
        flat = index.bits.view(-1)
        assert torch.equal(index.histogram, first_histogram(flat))
        if not asked:
            continue
        threshold = int(flat.sort().values[min(SCORES - 1, int(level * SCORES) + turn)])
        for before, shift in ((LEADING_SHIFT, 10), (10, 0)):
            inside = flat[((flat >> before) == (threshold >> before)) & (flat != 0)]
            counts = index.counts(threshold >> before, before, shift, 1024)
            if counts is not None:
                assert torch.equal(counts, torch.bincount((inside >> shift) & 1023, minlength=1024))
        for least, most in (
            (threshold, threshold),
            (threshold + 1, threshold + (1 << 14)),
            (threshold, KEPT - 1),
        ):
            found = index.within(least, most)
            if found is not None:
                answered += 1
                assert torch.equal(
                    found.long().sort().values,
                    ((flat >= least) & (flat <= most)).nonzero().view(-1),
                )
    assert answered or ties or level < 0.5 or not any(asked for _, asked in steps)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    quantile=st.floats(0, 1),
    last=st.sampled_from([None, -1, 0, 50, SCORES]),
)
def test_flags_are_changed_where_they_differ(seed: int, quantile: float, last: int | None) -> None:
    """A threshold decides the same by place as in a pass, and a mask changes at those places
    alone."""
    torch.manual_seed(seed)
    bits = some(SCORES, ties=True)
    segment = Segment(7, range(COLS), COLS)
    segment.add(bits.view(-1, COLS))
    last = None if last is None else last + 7 * COLS
    threshold = Threshold(bits=int(bits.sort().values[int(quantile * (SCORES - 1))]), last=last)
    removed = threshold.removes(segment, 0, bits)
    places = torch.randperm(SCORES)[:200]
    for kind in (torch.int32, torch.int64):
        found = threshold.removes_at(segment, places.to(kind), bits[places])
        assert torch.equal(found, removed[places])
    rect = Rect(7, 0, SCORES // COLS, 2 * COLS)
    before = BlockMask.of_elements(rect._replace(cols=COLS), torch.rand(SCORES // COLS, COLS) > 0.5)
    mask = BlockMask(rect, (1, 2), before.bits)
    after = mask.changed(places, ~removed[places])
    expected = mask.flags().view(-1).clone()
    expected[places] = ~removed[places]
    assert torch.equal(after.flags().view(-1), expected)
    assert torch.equal(mask.keeps(places), mask.flags().view(-1)[places])
    assert after.changed(places, ~removed[places]) is after

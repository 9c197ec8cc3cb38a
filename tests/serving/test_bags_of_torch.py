"""A served nn.EmbeddingBag, against the installed torch: the same values, or a refusal where torch
refuses, reads nonsense, or drops ids in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import load_served
from tests.serving.folders import Source, table, write

IDS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 19])


def at(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((mode, last, fbgemm), id=f"{mode}-{'ends' if last else 'starts'}-{fbgemm}")
        for mode in ("sum", "mean")
        for last in (False, True)
        for fbgemm in (True, False)
    ],
)
def pair(request: Any, tmp_path_factory: Any) -> tuple[nn.EmbeddingBag, Any]:
    """A module of torch, and what is served in its place."""
    mode, last, fbgemm = request.param
    weight, path = table(20, 4, 0.6), tmp_path_factory.mktemp("bag") / "served"
    bag = nn.EmbeddingBag.from_pretrained(weight, mode=mode, include_last_offset=last)
    write(path, ("", "embedding_bag", [Source("t", weight, pooling=mode)]), last=last)
    return bag, load_served(path, fbgemm=fbgemm)


# Ids and offsets, and whether torch accepts what is refused, with starts and with ends.
CASES: dict[str, tuple[Tensor, Tensor | None, tuple[bool, bool]]] = {
    "rising": (IDS, at(0, 4, 4, 12), (False, False)),
    "int32": (IDS.int(), at(0, 4, 12, dtype=torch.int32), (False, False)),
    "ids int32": (IDS.int(), at(0, 4, 12), (False, False)),
    "offsets int32": (IDS, at(0, 4, 12, dtype=torch.int32), (False, False)),
    "a matrix": (IDS.view(3, 4), None, (False, False)),
    "no bags of a matrix": (IDS[:0].view(0, 3), None, (False, False)),
    "bags of a matrix without ids": (IDS[:0].view(3, 0), None, (False, False)),
    "no ids": (IDS[:0], at(0, 0, 0), (False, False)),
    "one offset, no ids": (IDS[:0], at(0), (False, False)),
    "no offsets, no ids": (IDS[:0], at(), (False, False)),
    "first is not 0": (IDS, at(2, 5), (False, False)),
    "only one, not 0": (IDS, at(12), (False, False)),
    "negative": (IDS, at(0, -3, 5), (False, False)),
    "beyond the ids": (IDS, at(0, 4, 20), (False, False)),
    "beyond the ids, inside": (IDS, at(0, 20, 12), (False, False)),
    "beyond int32": (IDS, at(0, 4, 2**32 + 12), (False, False)),
    "beyond no ids": (IDS[:0], at(0, 1), (False, False)),
    "a matrix with offsets": (IDS.view(3, 4), at(0, 4), (False, False)),
    "offsets in a matrix": (IDS, at(0, 4).view(1, 2), (False, False)),
    "one number as offsets": (IDS, torch.tensor(0), (False, False)),
    "no offsets": (IDS, None, (False, False)),
    "three dimensions": (IDS.view(3, 2, 2), None, (False, False)),
    "one id": (torch.tensor(3), at(0), (False, False)),
    "floating offsets": (IDS, at(0, 4).float(), (False, False)),
    # torch returns zeros, or raises, by the order of its checks.
    "falling": (IDS, at(0, 8, 4, 12), (True, True)),
    # torch drops the ids.
    "one offset": (IDS, at(0), (False, True)),
    "no offsets, but ids": (IDS, at(), (True, False)),
    # torch divides the last mean by all of them.
    "ids behind the last": (IDS, at(0, 4, 8), (False, True)),
    "int16": (IDS, at(0, 12, dtype=torch.int16), (True, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_offsets(name: str, pair: tuple[nn.EmbeddingBag, Any]) -> None:
    bag, served = pair
    ids, offsets, accepted = CASES[name]
    is_nonsense = accepted[bag.include_last_offset]
    try:
        expected = bag(ids, offsets)
    except (RuntimeError, ValueError, IndexError):
        expected = None
    if expected is not None and not is_nonsense:
        torch.testing.assert_close(served(ids, offsets), expected, rtol=1e-6, atol=1e-6)
        return
    assert is_nonsense == (expected is not None)
    with pytest.raises(ValueError, match=r"ffsets|of shape"):
        served(ids, offsets)

"""What belongs to a weight is found by any view of it, and by nothing else."""

from __future__ import annotations

import torch

from dist_sparse.tables.memory import ByMemory


def test_any_view_of_a_weight_finds_its_value() -> None:
    storage = torch.zeros(24)
    first, second = storage[:8].view(4, 2), storage[8:].view(4, 4)
    known = ByMemory([(first, "first"), (second, "second")])
    assert known.get(storage[:8].view(4, 2)) == known.get(first.data) == "first"
    assert known.get(storage[8:].view(4, 4).detach()) == "second"
    # Its clone is another weight.
    assert known.get(first.clone()) is None
    assert [*known.values()] == ["first", "second"]


def test_storage_is_not_its_first_table() -> None:
    """FBGEMM keeps all tables of a kernel in one parameter: both begin at the same address."""
    storage = torch.zeros(24)
    known = ByMemory([(storage[:8].view(4, 2), "table")])
    assert known.get(storage) is None


def test_empty_tables_are_told_apart_by_their_shapes() -> None:
    known = ByMemory([(torch.zeros(0, 4), "narrow"), (torch.zeros(0, 8), "wide")])
    assert known.get(torch.zeros(0, 4)) == "narrow"
    assert known.get(torch.zeros(0, 8)) == "wide"


def test_values_of_one_weight_can_be_collected() -> None:
    """Several optimizers may step a weight."""
    weight = torch.zeros(4, 2)
    known: ByMemory[list[int]] = ByMemory()
    known.setdefault(weight, []).append(1)
    known.setdefault(weight.view(4, 2), []).append(2)
    assert known.get(weight) == [1, 2]

"""The index, the counts and the selection of following tables, against loops."""

from __future__ import annotations

import copy
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from dist_sparse.extras.following import FollowingTables, following
from dist_sparse.extras.following.selection import (
    PROTECTED,
    CandidateCounts,
    LookupCounts,
    ranking_keys,
    select_winners,
)
from dist_sparse.extras.following.slot_index import SlotIndex
from dist_sparse.groups import group_over


def test_index_follows_its_state() -> None:
    choose = random.Random(0)
    index, held = SlotIndex(70, 6), dict[int, int]()
    for _ in range(30):
        leaving = sorted(choose.sample(sorted(held), choose.randint(0, len(held))))
        free = sorted(set(range(6)) - {held[number] for number in held if number not in leaving})
        others = [number for number in range(70) if number not in held]
        coming = sorted(choose.sample(others, choose.randint(0, len(free))))
        index.hand_over(
            torch.tensor(leaving, dtype=torch.int64), torch.tensor(coming, dtype=torch.int64)
        )
        held = {number: slot for number, slot in held.items() if number not in leaving}
        expected = torch.tensor([held.get(number, -1) for number in range(70)])
        assert torch.equal(index(torch.arange(70)).long(), expected)
        held |= dict(zip(coming, free, strict=False))
        assert [each.tolist() for each in index.admit()] == [coming, free[: len(coming)]]
        expected = torch.tensor([held.get(number, -1) for number in range(70)])
        assert torch.equal(index(torch.arange(70)).long(), expected)
        assert index.holders()[0].tolist() == sorted(held)
        assert index(torch.tensor([[-1, 70, 3]])).tolist() == [[-2, -2, int(expected[3])]]
        # A load writes into the state, or puts another in its place.
        other = SlotIndex(70, 6)
        other.load_state_dict(index.state_dict())
        assert torch.equal(other(torch.arange(70)), index(torch.arange(70)))


def test_a_copy_follows_its_own_state() -> None:
    """The version of a copied tensor begins anew, and loads may bring it where the other was."""
    ids, loaded = torch.tensor([2, 7, 8]), torch.tensor([7, 8, 1], dtype=torch.int32)
    for loads in range(1, 4):
        index = SlotIndex(100, 3, torch.tensor([2, 5, 9]))
        for _ in range(loads):
            index.load_state_dict(index.state_dict())
        index(ids)
        other = copy.deepcopy(index)
        for _ in range(loads):
            other.load_state_dict({"id_of_slot": loaded})
            assert other(ids).tolist() == [-1, 0, 1]


def test_index_of_hashed_ids() -> None:
    """Equal in their low 32 bits, out of range, and given as int32."""
    ids = torch.tensor([5, 2**32 + 5, 2**39, 2**40 - 1])
    index = SlotIndex(2**40, 6, ids[1:])
    assert index(ids).tolist() == [-1, 0, 1, 2]
    assert index(torch.tensor([2**40, -1, 2**62])).tolist() == [-2, -2, -2]
    assert index(torch.tensor([5, -3], dtype=torch.int32)).tolist() == [-1, -2]
    index.hand_over(ids[1:2], ids[:1])
    assert index.id_of_slot.tolist() == [-7, 2**39, 2**40 - 1, -1, -1, -1]
    assert [each.tolist() for each in index.admit()] == [[5], [0]]
    small = SlotIndex(10, 4, torch.tensor([5]))
    assert small(ids[:2]).tolist() == [0, -2]
    with pytest.raises(ValueError, match=r"Invalid num_embeddings=9223372036854775808: .* \[1, "):
        SlotIndex(2**63, 6)


def test_bytes_an_id() -> None:
    """1 for the count, which one rank has, and the index, which every rank has: below 1.5 on four
    ranks where the table stores a hundredth of its rows."""
    rows, slots = 100_000_000, 1_000_000
    holders = torch.arange(slots) * (rows // slots)
    index = SlotIndex(rows, slots, holders)
    assert 1 + 4 * index.nbytes / rows < 1.5
    index.hand_over(holders[::2], holders[::2] + 1)
    index.admit()
    assert 1 + 4 * index.nbytes / rows < 1.5
    assert LookupCounts(0, 100).counts.nbytes == 100
    # The worst number of slots for the hash table: one more than a power of two.
    most = SlotIndex(rows, 2**16 + 1, torch.arange(2**16 + 1)).nbytes
    assert most <= 16 * (2**16 + 1) + 1000


def test_arguments_of_another_type() -> None:
    meta = torch.device("meta")
    item = EmbeddingBagConfig(name="item", num_embeddings=50, embedding_dim=8, feature_names=["id"])
    wrong: Any
    for wrong in (None, {}):
        with pytest.raises(ValueError, match=r"Invalid model of type \w+: must be a torch"):
            following(wrong, {"item": 3})
        with pytest.raises(ValueError, match=r"Invalid model of type \w+: must be a torch"):
            FollowingTables(wrong)
    for wrong in (3, ["item"], {}, {"user": 3}):
        with pytest.raises(ValueError, match=r"Invalid rows=.*: the collection has the tables"):
            following(EmbeddingBagCollection([item], device=meta), wrong)
    bags = following(EmbeddingBagCollection([item], device=meta), {"item": np.int64(5)})
    wrong = ["item"]
    with pytest.raises(ValueError, match="Invalid protect_ids of type list: must be a dict"):
        FollowingTables(bags, protect_ids=wrong)


def test_selection_is_a_sort() -> None:
    choose = random.Random(0)
    for _ in range(200):
        contests, expected = [], []
        for _ in range(choose.randint(1, 3)):
            size, slots = choose.randint(0, 20), choose.randint(1, 12)
            ids = choose.sample(range(100), size)
            keys = [choose.choice([0, 1, 2, 7, 200, 303, 304]) for _ in ids]
            order = sorted(range(size), key=lambda at: (-keys[at], ids[at]))[:slots]
            both = torch.tensor([keys, ids], dtype=torch.int64)
            contests.append((slots, *both))
            expected.append([at in order for at in range(size)])
        assert [
            each.tolist() for each in select_winners(*zip(*contests, strict=True), group_over(None))
        ] == expected


def test_counts_are_four_bits_of_lookups_and_four_of_age() -> None:
    owned, candidates = LookupCounts(5, 5 + 256), CandidateCounts(5, 5 + 256)
    every = torch.arange(256)
    for halvings in range(5):
        owned.load(every.to(torch.uint8))
        candidates.load(every.to(torch.uint8), every + 5)
        expected = [
            min(15, count // 16 + 1) * 16 + (count % 16 >> halvings) for count in range(256)
        ]
        for counts in (owned, candidates):
            counts.pass_update(halvings)
            assert counts.of(every + 5).tolist() == expected
            assert counts.num_seen() == sum(count % 16 > 0 for count in expected)
            assert counts.looked_up(1).tolist() == []


def test_lookups_saturate() -> None:
    for owned in (LookupCounts(5, 20), CandidateCounts(5, 20)):
        owned.add(torch.tensor([5, 8]), torch.tensor([2**40, 3]))
        owned.add(torch.tensor([8, 19]), torch.tensor([2, 1]))
        assert owned.of(torch.tensor([5, 8, 9, 19])).tolist() == [15, 5, 0, 1]
        assert owned.looked_up(1).tolist() == [5, 8, 19]
        owned.pass_update(1)
        owned.add(torch.tensor([8]), torch.tensor([1]))
        assert owned.of(torch.tensor([5, 8, 19])).tolist() == [16 + 7, 3, 16]
        assert owned.looked_up(1).tolist() == [8]
        assert owned.num_seen() == 2


def test_a_load_knows_what_was_looked_up() -> None:
    """A pass over all counts finds what the run before it had listed, over many parts."""
    owned = LookupCounts(0, 3 * 2**19 + 5)
    ids = torch.tensor([0, 2**19 - 1, 2**19, 3 * 2**19 + 4])
    owned.add(ids, torch.tensor([1, 2, 3, 4]))
    owned.pass_update(0)
    owned.add(ids[1:], torch.tensor([1, 1, 1]))
    other = LookupCounts(0, owned.last)
    other.load(owned.counts)
    for least in range(1, 7):
        assert torch.equal(other.looked_up(least), owned.looked_up(least))


def test_keys_order_counts_as_fractions_do() -> None:
    every = range(256)
    keys = ranking_keys(torch.arange(256, dtype=torch.uint8)).tolist()
    scores = [Fraction(count % 16, count // 16 + 1) for count in every]
    for one in every:
        for two in every:
            assert (keys[one] < keys[two]) == (scores[one] < scores[two])
    assert max(keys) + 1 < PROTECTED
    assert not any(key % 2 for key in keys)


def test_hash_table_is_built_by_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update builds it once, when it admits ids; no lookup after it does, nor one between."""
    index = SlotIndex(70, 4, torch.tensor([2, 5, 9]))
    index(torch.tensor([2]))
    built: list[Any] = []
    monkeypatch.setattr(torch, "bincount", _recorded(torch.bincount, built))
    index.hand_over(torch.tensor([5]), torch.tensor([7, 8]))
    assert index(torch.tensor([2, 5, 7, 8, 9])).tolist() == [0, -1, -1, -1, 2]
    assert not built
    index.admit()
    assert len(built) == 1
    assert index(torch.tensor([2, 5, 7, 8, 9])).tolist() == [0, -1, 1, 3, 2]
    index.admit()
    index(torch.tensor([2]))
    assert len(built) == 1


def _recorded(function: Any, calls: list[Any]) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return function(*args, **named)

    return call

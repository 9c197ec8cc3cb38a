"""States, copies and squashing of sharded tables work as in one process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist_sparse import ROW, DataNormSparsifier
from tests.dist.cells import build, cells, gathered, set_weights, weights
from tests.dist.kinds import names_of, some_cells
from tests.dist.pieces import watched
from tests.dist.plugin import on_ranks
from tests.states import edited, table

# -- states
# ------------------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@on_ranks(2)
def test_state_round_trip(world: int) -> None:
    for name, cell in some_cells(world).items():
        for block, zeros in (((1, ROW), None), ((3, 5), None), ((4, 1), 3)):
            model = build(cell)
            saver = DataNormSparsifier(None, 0.3, block, zeros)
            names = saver.add_model(model, config={names_of(cell)[0]: {"sparsity_level": 0.6}})
            saver.add_data("plain", torch.randn(4, 4), sparse_block_shape=(1, 4))
            saver.step()
            with watched() as sent:
                state = saver.state_dict()
            # Two messages where eight blocks that share a byte are in different shards: the pieces,
            # then whether all ranks could join them.
            cut = name in ("column_wise", "two_shards", "mixed", "grid_shard")
            calls = [call for call, _ in sent.calls]
            assert calls in ([], ["all_to_all_single", "all_gather"] * cut), name
            loader = DataNormSparsifier(None, 0.9, (2, 2))
            loader.add_model(loader_model := build(cell))
            loader.load_state_dict(through_a_file(state))
            assert loader.data_groups == saver.data_groups, name
            assert loader.audit() == saver.audit(), name
            for each in names:
                assert [at for at, _ in loader.local_masks(each)] == [
                    at for at, _ in saver.local_masks(each)
                ]
            set_weights(model, weights(cell, seed=4))  # training goes on as it would have
            set_weights(loader_model, weights(cell, seed=4))
            for sparsifier in (saver, loader):
                for group in sparsifier.data_groups.values():
                    group["sparsity_level"] = 0.7
                sparsifier.step()
            assert loader.audit() == saver.audit(), name
            assert all(torch.equal(gathered(model)[t], gathered(loader_model)[t]) for t in names), (
                name
            )


@on_ranks(2)
def test_a_state_without_a_table(world: int) -> None:
    """Of one rank only: refused on all, with nothing changed."""
    cell = cells(world)["mixed"]
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(build(cell))
    sparsifier.add_data("plain", plain := torch.randn(4, 4))
    state = sparsifier.state_dict()
    sparsifier.step()
    before, config = sparsifier.audit(), repr(sparsifier.data_groups)

    def refused(change: Callable[[dict[str, Any]], Any], match: str, rank: int = 0) -> None:
        spoilt = through_a_file(state)
        if dist.get_rank() == rank:
            change(spoilt)
        with pytest.raises(ValueError, match=match) as raised:
            sparsifier.load_state_dict(spoilt)
        assert world == 1 or f"rank {rank}: " in str(raised.value)
        assert sparsifier.audit() == before and repr(sparsifier.data_groups) == config
        assert sparsifier.get_data("plain") is plain

    def at(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
        def changed(saved: dict[str, Any]) -> None:
            with table(saved, name) as entry:
                change(entry)

        return changed

    def renamed(saved: dict[str, Any]) -> None:
        with edited(saved["sharded"], "tables") as tables:
            tables["other"] = tables.pop("item")

    def unknown(saved: dict[str, Any]) -> None:
        saved["sharded"]["masks"]["other"] = saved["sharded"]["masks"]["item"]
        with edited(saved["sharded"], "tables") as tables:
            tables["other"] = tables["item"]

    refused(renamed, r"are not the tables of the state")
    refused(renamed, r"are not the tables of the state", rank=world - 1)
    refused(
        lambda s: s["sharded"]["masks"].pop("item"),
        r"'item': the state has no mask",
        rank=world - 1,
    )
    refused(lambda s: s.pop("sharded"), r"are not the tables of the state")
    refused(
        lambda s: s["sharded"].update(tables="{"), r"tables of the state must be a mapping as JSON"
    )
    refused(unknown, r"not the tables of the state.*'other'.*register")
    last = world - 1  # table-wise, there
    refused(
        at("word", lambda t: t.update(shape=(30, 12))),
        r"'word' has the shape \(29, 12\);.*\(30, 12\)",
    )
    refused(
        at("word", lambda t: t.pop("shape")), r"'word' has the shape \(29, 12\);.*None", rank=last
    )
    refused(
        lambda s: s.pop("data_groups"),
        r"'plain': the state has no config for it",
        rank=last,
    )
    refused(
        lambda s: s.clear(), r"not the state of a sparsifier: it lacks \['_container'", rank=last
    )
    refused(at("word", lambda t: t["pieces"].clear()), r"Table 'word'.*do not cover", rank=last)
    refused(
        at("word", lambda t: t["pieces"][0].update(bits=torch.zeros(3))),
        r"Table 'word'.*needs [0-9]+ bytes",
        rank=last,
    )
    sparsifier.load_state_dict(through_a_file(state))
    assert sparsifier.audit() != before
    with pytest.raises(ValueError, match="not the tables of the state"):
        DataNormSparsifier().load_state_dict(state)


@on_ranks(2)
def test_copies_are_refused(world: int) -> None:
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(build(cells(world)["mixed"]))
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(sparsifier, io.BytesIO())


# -- squash
# ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_squash(world: int) -> None:
    for name in ("mixed", "two_shards", "data_parallel"):
        cell = cells(world)[name]
        model = build(cell)
        sparsifier = DataNormSparsifier()
        names = sparsifier.add_model(model)
        sparsifier.step()
        masks = {table: sparsifier.full_mask(table) for table in names}
        full = weights(cell, seed=6)
        set_weights(model, full)  # what an optimizer has revived
        with pytest.raises(ValueError, match="does not exist"):
            sparsifier.squash_mask(names=["user", "nobody"])
        sparsifier.squash_mask(names=["user"])
        after = gathered(model)
        assert torch.equal(after["user"], full["user"] * masks["user"])
        assert torch.equal(after["item"], full["item"])
        assert "user" not in sparsifier.data_groups and "item" in sparsifier.data_groups
        with pytest.raises(ValueError, match="does not exist"):
            sparsifier.full_mask("user")
        sparsifier.step()
        assert [stats.name for stats in sparsifier.table_stats()] == names[1:]
        # The mask is dropped, the weights are unchanged.
        sparsifier.squash_mask(leave_parametrized=False)
        left = gathered(model)
        set_weights(model, full)
        assert sparsifier.table_stats() == [] and sparsifier.data_groups == {}
        with watched() as sent:
            sparsifier.step()
        assert not sent.calls
        assert all(torch.equal(gathered(model)[table], full[table]) for table in names)
        assert not all(torch.equal(left[table], full[table]) for table in names)
        assert sparsifier.add_model(model) == names  # and can be registered again
        sparsifier.step()
        assert all(
            stats.removed_blocks == round(stats.blocks / 2) for stats in sparsifier.table_stats()
        )


def test_given_zeros_are_kept() -> None:
    """By add_model() and through a state, though their number is the area of the default block."""
    sparsifier = DataNormSparsifier(sparsity_level=1.0)
    sparsifier.add_model(
        nn.Embedding(6, 8), config={"sparse_block_shape": (1, 8), "zeros_per_block": 4}
    )
    sparsifier.add_data("plain", torch.randn(6, 8), sparse_block_shape=(1, 8), zeros_per_block=4)
    sparsifier.add_data("whole", torch.randn(6, 8), sparse_block_shape=(1, 8))
    sparsifier.step()
    removed = {
        stats.name: int((sparsifier.full_mask(stats.name) == 0).sum())
        for stats in sparsifier.table_stats()
    }
    assert removed == {"weight": 24, "plain": 24, "whole": 48}
    loaded = DataNormSparsifier(sparsity_level=1.0)
    loaded.add_model(nn.Embedding(6, 8))
    loaded.load_state_dict(through_a_file(sparsifier.state_dict()))
    assert loaded.fingerprint() == sparsifier.fingerprint()
    loaded.step()
    assert {name: int((loaded.full_mask(name) == 0).sum()) for name in removed} == removed

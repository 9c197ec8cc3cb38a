"""Dry runs equal real mask updates and change nothing, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.planning.dry_run import DryRun, dry_run


class Two(nn.Module):
    """Two tables; 1x4 and 2xrow blocks do not divide the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.EmbeddingBag(40, 8)
        self.item = nn.Embedding(23, 6)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randint(0, rows, (9, 2), generator=generator) for name, rows in (("user", 40), ("item", 23))}
        for _ in range(4)
    ]


def stepped(model: nn.Module, level: float, block: Any, norm: str = "L2") -> DataNormSparsifier:
    """Return a sparsifier after a real mask update."""
    sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=block, norm=norm)
    sparsifier.add_model(model)
    sparsifier.step()
    return sparsifier


BLOCKS = [(1, ROW), (1, 4), (1, 1), (2, ROW), (5, 3)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("level", [0.0, 0.3, 0.8, 1.0])
def test_it_says_what_a_due_step_does(block: Any, level: float) -> None:
    answer = dry_run(Two(), level=level, block=block, norm="L1", batches=iter(batches()))
    sparsifier = stepped(Two(), level, block, "L1")
    assert [table.stats for table in answer.tables] == sparsifier.table_stats()
    assert answer.batches == 4 and answer.level == level
    for table in answer.tables:
        kept = sparsifier.full_mask(table.stats.name).long()
        ids = torch.cat([batch[table.stats.name].flatten() for batch in batches()])
        assert table.lookups == len(ids) == 72
        assert table.dead_lookups == int((kept[ids].sum(1) == 0).sum())
        assert table.removed_reads == int((kept[ids] == 0).sum())
        assert table.removed_share == pytest.approx(float((kept[ids] == 0).float().mean()))


def test_nothing_is_changed() -> None:
    model = Two()
    mine = stepped(model, 0.5, (1, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]
    masks = mine.fingerprint()
    model.user.weight.grad = torch.ones_like(model.user.weight)
    dry_run(model, level=0.9, batches=batches())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert [parameter._version for parameter in model.parameters()] == versions
    assert mine.fingerprint() == masks and list(mine.data_groups) == ["user", "item"]
    assert {config["sparsity_level"] for config in mine.data_groups.values()} == {0.5}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_batches_come_in_many_forms() -> None:
    pytest.importorskip("torchrec")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="u", num_embeddings=10, embedding_dim=4, feature_names=["b"]),
        EmbeddingBagConfig(name="never", num_embeddings=10, embedding_dim=4, feature_names=["c"]),
    ]
    model = nn.Sequential(EmbeddingBagCollection(tables=tables))
    keyed = KeyedJaggedTensor.from_lengths_sync(
        ["b", "other", "a"], torch.tensor([1, 2, 99, 3, 4, 5]), torch.tensor([1, 1, 0, 1, 3, 0])
    )
    b, a = torch.tensor([1, 2]), torch.tensor([3, 4, 5])
    forms: list[Any] = [
        keyed,
        (torch.rand(2), keyed),
        Batch(dense_features=torch.rand(2, 1), sparse_features=keyed, labels=torch.rand(2)),
        {"a": a, "b": b.int(), "label": torch.rand(2)},
        [{"a": JaggedTensor(a, lengths=torch.tensor([3, 0])), "b": b}],
        {"t": torch.cat([a, b]), "u": b},
    ]
    for form in forms:
        answer = dry_run(model, level=0.5, batches=[form, form])
        assert [table.lookups for table in answer.tables] == [10, 4, 0], form
        assert answer.tables[2].dead_share is None and answer.tables[2].removed_share is None
    with pytest.raises(ValueError, match=r"Batch 2 has ids of 'b' twice"):
        dry_run(model, level=0.5, batches=[keyed, (keyed, {"b": b})])


def test_many_ids_are_counted_exactly() -> None:
    """More than are collected before counting."""
    model = nn.ModuleDict({"t": nn.Embedding(1000, 4)})
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 1000, (600_000,), generator=generator) for _ in range(4)]
    answer = dry_run(model, level=0.5, batches=({"t": part} for part in ids))
    sparsifier = stepped(model, 0.5, (1, ROW))
    removed = sparsifier.full_mask("t").sum(1) == 0
    assert (answer.tables[0].lookups, answer.tables[0].dead_lookups) == (2_400_000, int(removed[torch.cat(ids)].sum()))


class Raising:
    def __iter__(self) -> Iterator[Any]:
        yield batches()[0]
        raise RuntimeError("no more data")


def test_names_of_blocks_and_norms_are_as_everywhere() -> None:
    for block, shape in (("row", (1, ROW)), ("1x4", (1, 4))):
        by_name = dry_run(Two(), level=0.5, block=block, norm="l1")
        assert by_name.block == shape and by_name.norm == "L1"
        assert str(by_name) == str(dry_run(Two(), level=0.5, block=shape, norm="L1"))


def test_what_is_wrong_is_said() -> None:
    for arguments, message in (
        ({"level": 1.5}, r"Invalid level=1.5: must be a number in \[0, 1\]"),
        ({"level": float("nan")}, "Invalid level=nan"),
        ({"level": "0.5"}, "Invalid level='0.5'"),
        ({"level": True}, "Invalid level=True"),
        ({"level": 0.5, "norm": "L3"}, "Invalid norm='L3'"),
        ({"level": 0.5, "block": (0, 4)}, r"Invalid sparse_block_shape=\(0, 4\)"),
        ({"level": 0.5, "include": "zzz"}, "matches none of the tables"),
        ({"level": 0.5, "batches": [{"user": torch.zeros(2, dtype=torch.int64)}, {"x": 1}]}, "Batch 2, of type dict"),
        ({"level": 0.5, "batches": [torch.zeros(2)]}, "Batch 1, of type Tensor"),
        ({"level": 0.5, "batches": [{"user": torch.tensor([40])}]}, r"'user' has ids from 40 to 40; .* \[0, 40\)"),
        ({"level": 0.5, "batches": [{"user": torch.tensor([-1])}]}, "ids from -1 to -1"),
        ({"level": 0.5, "batches": [{"user": torch.rand(3)}]}, "of type torch.float32; they must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            dry_run(Two(), **arguments)
    with pytest.raises(RuntimeError, match="no more data"):
        dry_run(Two(), level=0.5, batches=Raising())
    broken = Two()
    broken.item.weight.data[3, 2] = torch.nan
    with pytest.raises(ValueError, match="Table 'item': the block at row 3, column 0 scores nan"):
        dry_run(broken, level=0.5)


def test_for_people_and_for_programs() -> None:
    answer = dry_run(Two(), level=0.5, batches=batches())
    text = str(answer)
    assert text.startswith("sparsity level 0.5, blocks row")
    assert "40 x 8" in text and "dead rows" in text and "lookups in 4 batches" in text
    assert "dead rows" not in str(dry_run(Two(), level=0.5))
    said = json.loads(json.dumps(answer.to_json()))
    assert said["level"] == answer.level and said["block"] == [1, "ROW"] and said["batches"] == 4
    assert said["kept_bytes"] == sum(table["kept_bytes"] for table in said["tables"])
    assert said["tables"][0]["saved_bytes"] == said["tables"][0]["table_bytes"] - said["tables"][0]["kept_bytes"]
    assert said["tables"][0]["dead_share"] == answer.tables[0].dead_lookups / 72  # type: ignore[operator]
    assert isinstance(answer, DryRun)


def test_an_enforced_model_can_be_planned() -> None:
    from dist_sparse import MaskEnforcer

    model = Two()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.add_model(model)
    enforcer = MaskEnforcer(sparsifier).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    sparsifier.step()
    enforcer.settle()
    answer = dry_run(model, level=0.75)
    assert [table.stats.removed_blocks for table in answer.tables] == [30, 17]
    assert [stats.removed_blocks for stats in sparsifier.table_stats()] == [20, 12]

"""One trained row for all removed ids of a table: what is given and trained, against a slow oracle,
and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import PoolingType

from dist_sparse import Advanced, DataNormSparsifier, compact, export, load_served, sparsify
from dist_sparse.serving.chain import check_artifact
from dist_sparse.serving.manifest import Manifest
from dist_sparse.tables.modules import modules_by_path
from tests.compaction.test_compact_sharded import cell_of
from tests.dist.cells import batch as features_of
from tests.dist.cells import build, gathered
from tests.dist.enforcing import loss_of
from tests.dist.plugin import on_ranks

ROWS, DIM = 40, 4
LENGTHS = torch.tensor([3, 0, 2, 4, 1, 2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="sums", feature_names=["a", "b"], **shared),
                EmbeddingBagConfig(
                    name="means", feature_names=["b"], pooling=PoolingType.MEAN, **shared
                ),
                EmbeddingBagConfig(name="whole", feature_names=["c"], **shared),
            ]
        )
        self.words = EmbeddingCollection(
            tables=[EmbeddingConfig(name="word", feature_names=["a", "c"], **shared)]
        )
        self.bag, self.one = nn.EmbeddingBag(ROWS, DIM, mode="mean"), nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=LENGTHS)
        words = self.words(keyed)
        found = [
            self.bags(keyed).values(),
            self.bag(ids.view(-1, 2)),
            self.one(ids),
            words["a"].values(),
        ]
        return torch.cat([each.flatten() for each in (*found, words["c"].values())])


class Oracle:
    """Whole tables whose removed rows are copies of one row."""

    def __init__(self, weights: dict[str, Tensor], removed: dict[str, Tensor]) -> None:
        self.rows, self.place = {}, {}
        for name, weight in weights.items():
            kept = [row for row in range(ROWS) if not removed[name][row]]
            self.place[name] = torch.tensor(
                [kept.index(row) if row in kept else len(kept) for row in range(ROWS)]
            )
            self.rows[name] = torch.cat([weight[kept], torch.zeros(1, DIM)]).requires_grad_()

    def forward(self, ids: Tensor) -> Tensor:
        whole = {name: self.rows[name][self.place[name]] for name in self.rows}
        a, b, c = ids.split([3, 6, 3])
        pooled = [
            self.pooled(whole[name], part, lengths, mode)
            for name, part, lengths, mode in (
                ("sums", a, LENGTHS[:2], "sum"),
                ("sums", b, LENGTHS[2:4], "sum"),
                ("means", b, LENGTHS[2:4], "mean"),
                ("whole", c, LENGTHS[4:], "sum"),
            )
        ]
        found = [
            torch.cat(pooled, 1),
            F.embedding_bag(ids.view(-1, 2), whole["bag"], mode="mean"),
            whole["one"][ids],
        ]
        return torch.cat([each.flatten() for each in (*found, whole["word"][a], whole["word"][c])])

    @staticmethod
    def pooled(weight: Tensor, ids: Tensor, lengths: Tensor, mode: str) -> Tensor:
        return F.embedding_bag(
            ids, weight, F.pad(lengths.cumsum(0), (1, 0)), mode=mode, include_last_offset=True
        )


def pruned() -> tuple[Any, DataNormSparsifier, dict[str, Tensor]]:
    """A model in which tables have lost rows, and which they have lost."""
    torch.manual_seed(0)
    model = Model()
    sparsifier = DataNormSparsifier(sparsity_level=0.6, sparse_block_shape="row")
    names = sparsifier.add_model(model, config={"whole": {"sparsity_level": 0.0}})
    sparsifier.step()
    return model, sparsifier, {name: (sparsifier.full_mask(name) == 0).all(1) for name in names}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.split(".")[-2]: each.detach().clone() for name, each in model.named_parameters()}


def trained() -> tuple[nn.Module, Oracle, dict[str, Tensor]]:
    model, sparsifier, removed = pruned()
    oracle, ids = Oracle(weights_of(model), removed), torch.randint(ROWS, (12,))
    before = model(ids)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    # Case does not matter.
    removed_read: Any = "Default_Row"
    model = compact(model, sparsifier, optimizer=optimizer, removed=removed_read)
    assert torch.equal(model(ids), before)
    theirs = torch.optim.Adagrad(oracle.rows.values(), lr=0.1)
    for _ in range(8):
        ids = torch.randint(ROWS, (12,))
        for each, found in ((optimizer, model(ids)), (theirs, oracle.forward(ids))):
            each.zero_grad()
            (found - 1).square().sum().backward()
            each.step()
    return model, oracle, removed


def test_trains_as_a_table_with_equal_rows() -> None:
    model, oracle, removed = trained()
    for name, weight in weights_of(model).items():
        count = ROWS - int(removed[name].sum())
        assert len(weight) == count + bool(removed[name].any())
        torch.testing.assert_close(
            weight, oracle.rows[name].detach()[: len(weight)], rtol=1e-5, atol=1e-6
        )
        assert name == "whole" or bool(weight[-1].any())
    for _ in range(3):
        ids = torch.randint(ROWS, (12,))
        torch.testing.assert_close(model(ids), oracle.forward(ids), rtol=1e-5, atol=1e-6)
    with pytest.raises((IndexError, RuntimeError)):
        model.one(torch.tensor([ROWS]))  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("fbgemm", [True, False], ids=["fbgemm", "torch"])
def test_is_served(tmp_path: Path, fbgemm: bool) -> None:
    pytest.importorskip("safetensors")
    model, _, removed = trained()
    ids = torch.randint(ROWS, (12,))
    keyed = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=LENGTHS)
    for dtype in ("fp32", "int8"):
        manifest = export(model, None, tmp_path / dtype, dtype=dtype).manifest  # type: ignore[arg-type]
        served: Any = load_served(tmp_path / dtype, fbgemm=fbgemm)
        found = [served["bags"](keyed).values(), served["bag"](ids.view(-1, 2)), served["one"](ids)]
        words = served["words"](keyed)
        got = torch.cat(
            [each.flatten() for each in (*found, words["a"].values(), words["c"].values())]
        )
        torch.testing.assert_close(
            got, model(ids), rtol=1e-6, atol=1e-6 if dtype == "fp32" else 0.05
        )
        rows = served["one"](torch.arange(ROWS))[removed["one"]]
        assert bool((rows == rows[0]).all()) and bool(rows.any())
        assert dtype == "int8" or torch.equal(rows[0], model.one.stored_weight[-1])  # type: ignore[union-attr, index]
        check_artifact(tmp_path / dtype)
    one = manifest.tables["one"]
    assert (one.kept, one.default_row, one.rows) == (16, True, 40)
    assert one.bytes.after == 17 * (DIM + 4) + 8 and not manifest.tables["whole"].default_row
    program = tmp_path / "program.pt2"
    for path, arguments in (
        ("bags", (ids[[0, 1, 2, *range(3, 9), *range(3, 9), 9, 10, 11]],)),
        ("one", (ids,)),
    ):
        lengths = torch.tensor([3, 0, 2, 4, 2, 4, 1, 2])
        given = (*arguments, lengths) if path == "bags" else arguments
        served[path].to_pt2(program)
        want = served[path].lookup(*given)
        assert torch.equal(torch.export.load(program).module()(*given), want)
    text = (tmp_path / "int8" / "manifest.json").read_text()
    assert Manifest.from_text(text) == manifest


def test_refused(tmp_path: Path) -> None:
    model, _, _ = trained()
    again = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row")
    again.add_model(model, include=["one"])
    again.step()
    with pytest.raises(ValueError, match="'one' has lost rows since it got its default row"):
        export(model, again, tmp_path / "served")
    with pytest.raises(ValueError, match="has default rows: it can't be compacted"):
        compact(model, again, optimizer=())
    other, sparsifier, _ = pruned()
    with pytest.raises(ValueError, match="Invalid removed='one'"):
        compact(other, sparsifier, optimizer=(), removed="one")  # type: ignore[arg-type]
    small = compact(other, sparsifier, optimizer=())
    again = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row")
    again.add_model(small, include=["sums"])
    again.step()
    with pytest.raises(ValueError, match="has already lost rows without a default row"):
        compact(small, again, optimizer=(), removed="default_row")
    padded = nn.Embedding(20, 4, padding_idx=0)
    of_padded = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row")
    of_padded.add_model(padded)
    of_padded.step()
    with pytest.raises(ValueError, match="weight has a padding_idx"):
        compact(padded, of_padded, optimizer=(), removed="default_row")


@on_ranks(2)
def test_is_one_row_of_a_sharded_table() -> None:
    """The same in every sharding: rows and columns on several ranks, fused optimizers."""
    outputs = []
    for name in ("table_wise", "row_wise", "column_wise"):
        cell = cell_of(2, name)
        model: Any = build(cell, torch.optim.SGD, {"lr": 0.1})
        sparsifier = DataNormSparsifier(sparsity_level=0.6, sparse_block_shape="row")
        sparsifier.add_model(model)
        sparsifier.step()
        removed = {
            table.name: (sparsifier.full_mask(table.name) == 0).all(1) for table in cell.tables
        }
        model = compact(model, sparsifier, optimizer=(), removed="default_row")
        for step in range(4):
            out = model(features_of(cell, seed=2 * step + dist.get_rank()))
            loss_of(out).backward()
        outputs.append(out.detach())
        rows = gathered(model)
        for table in cell.tables:
            ids = torch.arange(table.rows)
            lengths = [torch.zeros(table.rows) for each in cell.tables for _ in each.features]
            keys = [feature for each in cell.tables for feature in each.features]
            lengths[keys.index(table.features[0])].fill_(1)
            one = KeyedJaggedTensor(keys, ids, lengths=torch.cat(lengths).int())
            given = modules_by_path(model)["sparse.tables"](one)[table.features[0]].detach()
            flags, shared = (
                removed[table.name],
                rows[table.name][table.rows - int(removed[table.name].sum())],
            )
            assert bool(flags.any()) and bool(shared.any())
            assert torch.equal(given[flags], shared.expand(int(flags.sum()), -1))
            assert torch.equal(given[~flags], rows[table.name][: int((~flags).sum())])
    for each in outputs[1:]:
        torch.testing.assert_close(each, outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unused", [0, 7])
def test_one_removed_row(tmp_path: Path, unused: int) -> None:
    """As many rows are stored as before: the table is compact all the same."""
    model: nn.Module = nn.Sequential(nn.EmbeddingBag(40, 4, mode="sum"))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sparse = sparsify(
        model, optimizer, level="untouched", end=0, advanced=Advanced(trust_record=True)
    )
    used = torch.tensor([[row for row in range(40) if row != unused]])
    model(used).sum().backward()
    optimizer.step()
    sparse.step()
    model = compact(model, sparse, removed="default_row")
    optimizer.step()
    with torch.no_grad():
        wanted = model(torch.arange(40).view(40, 1))
    export(model, None, tmp_path / "served")
    assert torch.equal(load_served(tmp_path / "served")(torch.arange(40).view(40, 1)), wanted)

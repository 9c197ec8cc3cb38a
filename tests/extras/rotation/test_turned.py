"""Artifacts of rotated tables whose outputs are turned back: they serve what the model gives."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import PoolingType

from dist_sparse import Advanced, compact, export, load_served, sparsify
from dist_sparse.extras.rotation import Rotation
from dist_sparse.serving.chain import check_artifact
from dist_sparse.serving.encodings import Dtype
from dist_sparse.serving.manifest import Manifest
from tests.keywords import nested

pytest.importorskip("safetensors")

ROWS = 30


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Any] = {"num_embeddings": ROWS}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="sums", feature_names=["a", "b"], embedding_dim=12, **shared
                ),
                EmbeddingBagConfig(
                    name="means",
                    feature_names=["b"],
                    embedding_dim=16,
                    pooling=PoolingType.MEAN,
                    **shared,
                ),
                EmbeddingBagConfig(name="left", feature_names=["c"], embedding_dim=8, **shared),
            ]
        )
        self.weighted = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="weighted", feature_names=["a", "c"], embedding_dim=12, **shared
                )
            ],
            is_weighted=True,
        )
        self.words = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, feature_names=features, embedding_dim=8, **shared)
                for name, features in (("first", ["a", "c"]), ("second", ["b"]))
            ]
        )
        self.bag, self.one = nn.EmbeddingBag(ROWS, 8, mode="mean"), nn.Embedding(ROWS, 8)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        plain = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())
        words = self.words(plain)
        values = ids.values()
        return {
            "bags": self.bags(plain).values(),
            "weighted": self.weighted(ids).values(),
            "words": torch.cat([words[key].values() for key in words]),
            "bag": self.bag(values.view(-1, 2)),
            "one": self.one(values),
        }


def batch() -> KeyedJaggedTensor:
    torch.manual_seed(3)
    return KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.randint(ROWS, (20,)),
        torch.rand(20),
        lengths=torch.tensor([3, 0, 5, 1, 4, 7]),
    )


def narrowed(compacts: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {
        "block": "col",
        "exclude": "left",
        "schedule": "one_shot",
        "rotate": Rotation("table"),
    }
    sparse = sparsify(model, optimizer, **nested(level=0.5, begin=0, end=1, **how))
    model(batch())
    sparse.step()
    return (compact(model, sparse), None) if compacts else (model, sparse)


def served_of(served: Any, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
    plain = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())
    words = served["words"](plain)
    return {
        "bags": served["bags"](plain).values(),
        "weighted": served["weighted"](ids).values(),
        "words": torch.cat([words[key].values() for key in words]),
        "bag": served["bag"](ids.values().view(-1, 2)),
        "one": served["one"](ids.values()),
    }


@pytest.mark.parametrize("compacts", [False, True], ids=["masked", "compact"])
def test_what_the_model_gives(tmp_path: Path, compacts: bool) -> None:
    model, sparse = narrowed(compacts)
    want = model(batch())
    for dtype, atol in (("fp32", 1e-6), ("fp16", 1e-2), ("int8", 0.1), ("int4", 1.0)):
        manifest = export(model, sparse, tmp_path / dtype, dtype=dtype).manifest  # type: ignore[arg-type]
        for fbgemm in (True, False):
            got = served_of(load_served(tmp_path / dtype, fbgemm=fbgemm), batch())
            for key, values in want.items():
                torch.testing.assert_close(
                    got[key], values, rtol=1e-5, atol=atol, msg=f"{dtype} {key} {fbgemm}"
                )
        check_artifact(tmp_path / dtype)
    if compacts:
        assert manifest.tables["sums"].dim == 8 and manifest.tables["sums"].turned == 12, (
            "a multiple of 4"
        )
        assert (
            manifest.tables["sums"].bytes.rotation == 8 * 12 * 4
            and manifest.tables["left"].bytes.rotation == 0
        )
        taken = manifest.tables["sums"].bytes
        assert (
            taken.after == ROWS * (4 + 4) + taken.rotation
            and manifest.tables["sums"].before == ROWS * 12 * 4
            and manifest.tables["left"].turned is None
        )


@pytest.mark.slow
@pytest.mark.parametrize("fbgemm", [True, False], ids=["fbgemm", "torch"])
def test_exported_program(tmp_path: Path, fbgemm: bool) -> None:
    """Bit for bit what the eager lookup gives."""
    model, _ = narrowed(compacts=True)
    served: Any = load_served(export(model, None, tmp_path / "served").path, fbgemm=fbgemm)
    ids = batch()
    values, lengths = ids.values(), ids.lengths()
    offsets = torch.arange(0, 20, 2)
    of_words = torch.tensor([3, 0, 5, 1, 4, 7])
    arguments: dict[str, tuple[Tensor, ...]] = {
        "bags": (
            torch.cat([values[:8], values[8:14], values[8:14]]),
            torch.tensor([3, 5, 1, 5, 1, 5, 0, 0]),
        ),
        "weighted": (values[:6], torch.tensor([2, 1, 0, 3]), torch.rand(6)),
        "words": (values, of_words),
        "bag": (values, offsets),
        "one": (values,),
    }
    assert len(lengths) == 6
    for path, args in arguments.items():
        want = served[path].lookup(*args)
        if path in ("bags", "words"):  # the two ways in which results are turned
            served[path].to_pt2(tmp_path / "program.pt2")
            assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(*args), want), (
                path
            )
        assert (
            want.shape[1] == sum(served[path].dims)
            if path in ("bags", "weighted")
            else want.shape[1] == 8
        )


def test_a_state_with_older_names_is_refused(tmp_path: Path) -> None:
    """One that was saved when a matrix was named ``rows.turns.0.matrix``."""
    model, _ = narrowed(compacts=True)
    served: Any = load_served(export(model, None, tmp_path / "served").path)
    one = served["one"]
    state = one.state_dict()
    one.load_state_dict(state)
    state["lookup.rows.turns.0.matrix"] = state.pop("lookup.row_lookup.rotation_0")
    with pytest.raises(RuntimeError, match=r"Missing key.*rotation_0[^$]*Unexpected key.*turns"):
        one.load_state_dict(state)


def test_removed_rows_serve_zero(tmp_path: Path) -> None:
    model, sparse = narrowed(compacts=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = sparsify(
        model,
        optimizer,
        level=0.5,
        end=1,
        exclude="left",
        advanced=Advanced(score="norm"),
        schedule="one_shot",
    )
    model(batch())
    rows.step()
    removed = (rows.sparsifier.full_mask("one") == 0).all(1)
    served: Any = load_served(export(model, rows, tmp_path / "served", dtype="int8").path)
    assert int(removed.sum()) == 15 and not served["one"](torch.arange(ROWS))[removed].any()
    assert sparse is None


def test_another_rotation_is_refused(tmp_path: Path) -> None:
    """One whose sizes do not fit, one that is damaged, and one of another model."""
    model, _ = narrowed(compacts=True)
    path = export(model, None, tmp_path / "served").path
    text = (path / "manifest.json").read_text()
    manifest = Manifest.from_text(text)
    table = manifest.tables["sums"]
    for turned, message in ((4, "turned"), (None, "header|bytes"), (16, "header|bytes")):
        tables = {**manifest.tables, "sums": replace(table, turned=turned)}
        (path / "manifest.json").write_text(replace(manifest, tables=tables).to_text())
        with pytest.raises(ValueError, match=message):
            load_served(path)
    (path / "manifest.json").write_text(text)
    load_served(path)
    raw = bytearray((path / "tables.safetensors").read_bytes())
    matrix = model.get_buffer("rotation_of_sums").T.contiguous().numpy().tobytes()
    raw[raw.index(matrix) + 3] ^= 1
    (path / "tables.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match=r"the checksum of 'sums.rotation'"):
        load_served(path)


def test_a_rotation_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    dtype: Dtype = "fp32"
    model, _ = narrowed(compacts=True)
    broken = copy.deepcopy(model)
    broken.get_buffer("rotation_of_sums")[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'sums': its rotation matrix is not finite"):
        export(broken, None, tmp_path / "served", dtype=dtype)
    assert not list(tmp_path.iterdir())

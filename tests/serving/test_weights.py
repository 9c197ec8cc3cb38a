"""Weights of a batch: served as training read them, or refused by name; one rule for each dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.types import LazyAwaitable

from dist_sparse import DataNormSparsifier, export, load_served
from dist_sparse.serving.artifact import open_artifact
from dist_sparse.serving.served import Served
from dist_sparse.tables.modules import modules_by_path
from tests.dist.cells import batch, build, cells, gathered
from tests.dist.plugin import on_ranks
from tests.serving.folders import Source, table, write

KEYS = ["a", "b", "c"]


def served_of(path: Path, kind: Any = "bag", weighted: Any = "optional", mean: bool = False) -> Any:
    of = [
        Source("one", table(100, 8, 0.4), ["a", "b"]),
        Source("two", table(40, 8, 1.0), ["c"], "mean" if mean else "sum"),
    ]
    if kind in ("embedding", "embedding_bag"):
        del of[0]
    served = load_served(write(path / "served", ("tower", kind, of), weighted=weighted))
    assert isinstance(served, Served)
    return served


def some_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths, weights that float16 holds."""
    lengths = torch.randint(0, 4, (15,))
    ids = torch.randint(0, 40, (int(lengths.sum()),))
    return ids, lengths, torch.randint(-8, 8, (len(ids),)) / 4


def modules(served: Any) -> dict[str, Any]:
    """Whatever looks the artifact up, called with ids, lengths and weights."""
    tables, collection = served.to_fbgemm(), served.to_torchrec()

    def keyed(module: Any, *args: Any) -> Tensor:
        ids, lengths, weights = args
        values: Tensor = module(KeyedJaggedTensor(KEYS, ids, weights, lengths)).values()
        return values

    return {
        "tensors": served,
        "lookup": served.lookup,
        "keys": lambda *args: keyed(served, *args),
        "in another order": lambda *args: served(in_another_order(*args)).values(),
        "to_torchrec": lambda *args: keyed(collection, *args),
        "to_fbgemm": lambda ids, lengths, weights: tables(
            ids, F.pad(lengths.cumsum(0), (1, 0)), weights
        ),
    }


def in_another_order(ids: Tensor, lengths: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """The last feature first; weights that do not fit the ids as they are."""
    each = lengths.view(len(KEYS), -1).roll(1, 0)
    last = int(each[0].sum())
    if weights is not None and len(weights) == len(ids):
        weights = weights.roll(last, 0)
    keys = [KEYS[-1], *KEYS[:-1]]
    return KeyedJaggedTensor(keys, ids.roll(last), weights, each.flatten())


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "table_wise", "mixed"])
def test_a_sharded_collection_weighs_what_has_weights(name: str, tmp_path: Path) -> None:
    """Though it is not weighted: training does, and so does every served module."""
    cell = cells(2)[name]
    model = build(cell)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(model)
    sparsifier.step()
    sparsifier.apply_masks()
    export(model, sparsifier, tmp_path / "served")
    dist.barrier()
    features = batch(cell, seed=dist.get_rank())
    weights = torch.randint(1, 100, (len(features.values()),)) / 4
    weighted = KeyedJaggedTensor(
        features.keys(), features.values(), weights, lengths=features.lengths()
    )
    served: Any = load_served(tmp_path / "served")
    collection = served.to_torchrec()
    full = gathered(model)
    for given in (weighted, features):
        trained = modules_by_path(model)["sparse.tables"](given)
        trained = trained.wait() if isinstance(trained, LazyAwaitable) else trained
        for module in (served, collection):
            found = module(given)
            for key in found.keys():  # noqa: SIM118  (a KeyedTensor is no mapping)
                torch.testing.assert_close(found[key], trained[key], rtol=1e-5, atol=1e-5)
    # An oracle in float64, of one feature.
    spec = next(each for each in cell.tables if len(each.features) == 1)
    [key] = spec.features
    jagged = weighted[key]
    rows = full[spec.name].double()[jagged.values()] * jagged.weights().double()[:, None]
    expected = torch.stack([part.sum(0) for part in rows.split(jagged.lengths().tolist())])
    torch.testing.assert_close(served(weighted)[key].double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(served(weighted)[key], served(features)[key])


def test_weights_are_read_where_a_batch_has_some(tmp_path: Path) -> None:
    served = served_of(tmp_path)
    ids, lengths, weights = some_batch()
    ones = torch.ones_like(weights)
    plain = served(ids, lengths)
    weighted = served_of(tmp_path / "weighted", weighted=True)
    expected = weighted(ids, lengths, weights)
    assert not torch.allclose(plain, expected)
    for name, module in modules(served).items():
        assert torch.equal(module(ids, lengths, None), plain), name
        torch.testing.assert_close(module(ids, lengths, weights), expected, msg=name)
        torch.testing.assert_close(module(ids, lengths, ones), plain, msg=name)
    for module in modules(weighted).values():
        with pytest.raises(ValueError, match="is weighted, and the batch has no weights"):
            module(ids, lengths, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_weights_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    """As FBGEMM does in training."""
    served = served_of(tmp_path)
    ids, lengths, weights = some_batch()
    expected = served(ids, lengths, weights)
    for name, module in modules(served).items():
        found = module(ids, lengths, weights.to(dtype))
        torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_other_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Training ignores them, or raises."""
    served = served_of(tmp_path)
    ids, lengths, weights = some_batch()
    for module in modules(served).values():
        with pytest.raises(ValueError, match=r"weights of dtype .*: must be floating-point"):
            module(ids, lengths, weights.to(dtype))


def test_weights_have_the_shape_of_the_ids(tmp_path: Path) -> None:
    """FBGEMM would read behind them, where features come in another order too."""
    ids, lengths, weights = some_batch()
    for module in modules(served_of(tmp_path)).values():
        for wrong in (weights[1:], weights[:, None], torch.cat([weights, weights])):
            with pytest.raises(ValueError, match="Weights must have the shape of the ids"):
                module(ids, lengths, wrong)


REFUSED = {
    "unweighted": ({"weighted": False}, "training did not read them"),
    "means": ({"mean": True}, "means, and TorchRec divides weighted means"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_training_did_not_read(tmp_path: Path, name: str) -> None:
    """An artifact that was written before there was a rule reads none."""
    options, reason = REFUSED[name]
    served: Any = served_of(tmp_path, **options)
    ids, lengths, weights = some_batch()
    # FBGEMM's module has no sums beside means.
    found = modules(served) if name == "unweighted" else {"tensors": served}
    for module in found.values():
        assert len(module(ids, lengths, None))
        with pytest.raises(ValueError, match=f"'tower' takes no weights: .*{reason}"):
            module(ids, lengths, weights)
    with pytest.raises(ValueError, match="takes no weights"):
        served.to_pt2(tmp_path / "served.pt2", weights=True)


def test_sequences_and_embeddings_take_no_weights(tmp_path: Path) -> None:
    ids, lengths, weights = some_batch()
    sequence = served_of(tmp_path, "sequence", False)
    for args in (
        (KeyedJaggedTensor(KEYS, ids, weights, lengths),),
        (ids, lengths, weights),
    ):
        with pytest.raises(ValueError, match="training did not read them"):
            sequence(*args)
    embedding = served_of(tmp_path / "ids", "embedding", False)
    for args in ((ids, None, weights), (ids, lengths)):
        with pytest.raises(ValueError, match="takes ids alone"):
            embedding(*args)


def test_an_unsharded_collection_reads_no_weights(tmp_path: Path) -> None:
    """TorchRec ignores them there; the export records which."""
    config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a"])
    model = nn.ModuleDict(
        {
            "plain": EmbeddingBagCollection(tables=[config]),
            "weighted": EmbeddingBagCollection(tables=[config], is_weighted=True),
        }
    )
    export(model, None, tmp_path / "served")
    served: Any = load_served(tmp_path / "served")
    features = KeyedJaggedTensor(["a"], torch.arange(4), torch.ones(4), torch.tensor([4]))
    with pytest.raises(ValueError, match="'plain' takes no weights"):
        served["plain"](features)
    torch.testing.assert_close(
        served["weighted"](features).values(), model["weighted"](features).values()
    )
    rules = [each.weighted for each in open_artifact(tmp_path / "served").manifest.collections]
    assert rules == [False, True]


def test_batches_of_different_sizes_name_the_way_out(tmp_path: Path) -> None:
    served = served_of(tmp_path)
    ids = torch.arange(4)
    for wrong in (
        {"lengths": torch.ones(4).int(), "stride_per_key_per_rank": [[1], [1], [2]]},
        {
            "lengths": torch.tensor([1, 1, 2]),
            "inverse_indices": (KEYS, torch.zeros(3, 2, dtype=torch.int64)),
        },
    ):
        with pytest.raises(ValueError, match="same batch for each feature, repeated ids included"):
            served(KeyedJaggedTensor(KEYS, ids, **wrong))


@pytest.mark.slow
@pytest.mark.parametrize("fbgemm", [True, False], ids=["fbgemm", "torch"])
def test_a_saved_lookup_takes_weights_or_none(tmp_path: Path, fbgemm: bool) -> None:
    write(
        tmp_path / "served",
        ("", "bag", [Source("t", table(40, 8, 0.5), KEYS)]),
        weighted="optional",
    )
    served: Any = load_served(tmp_path / "served", fbgemm=fbgemm)
    ids, lengths, weights = some_batch()
    for name, args in (("plain", (ids, lengths)), ("weighted", (ids, lengths, weights))):
        served.to_pt2(tmp_path / name, weights=name == "weighted")
        module = torch.export.load(tmp_path / name).module()
        assert torch.equal(module(*args), served(*args))
        other = (ids, lengths) if name == "weighted" else (ids, lengths, weights)
        with pytest.raises(Exception, match=r"args|arguments|inputs|structure"):
            module(*other)
        if name == "weighted":
            for wrong in (weights[1:], weights.double()):
                with pytest.raises(Exception, match=r".+"):
                    module(ids, lengths, wrong)


def test_an_embedding_bag_weighs_sums(tmp_path: Path) -> None:
    bag = nn.EmbeddingBag(40, 8, mode="sum")
    export(bag, None, tmp_path / "sum")
    served: Any = load_served(tmp_path / "sum")
    ids, _, weights = some_batch()
    offsets = torch.arange(0, len(ids), 3)
    torch.testing.assert_close(served(ids, offsets, weights), bag(ids, offsets, weights))
    export(nn.EmbeddingBag(40, 8, mode="mean"), None, tmp_path / "mean")
    served = load_served(tmp_path / "mean")
    with pytest.raises(ValueError, match="takes no weights: it has means"):
        served(ids, offsets, weights)

"""Artifacts in FBGEMM's table batches and TorchRec's quantized collections: bit for bit what
:func:`load_served` serves."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed import global_settings
from torchrec.inference.modules import shard_quant_model
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse import DataNormSparsifier, compact, export, load_served
from dist_sparse.serving.served import Served
from tests.serving.folders import Source, table, write

DTYPES = ["fp32", "fp16", "int8", "int4", "int4/column"]
ROWS = {"two": 100, "dense": 33, "none": 70}


def sources(dtype: str, *, pooling: Any = "sum", pruned: bool = True) -> list[Source]:
    """A table with two features, one that keeps all rows, one with nothing left; two widths."""
    kind: Any
    scale: Any
    kind, _, scale = dtype.partition("/")
    kept = (0.4, 1.0, 0.0) if pruned else (1.0, 1.0, 1.0)
    tables = [
        Source("two", table(100, 8, kept[0]), ["a", "b"]),
        Source("dense", table(33, 4, kept[1]), ["c"]),
        Source("none", table(70, 8, kept[2]), ["d"]),
    ]
    return [replace(one, dtype=kind, scale=scale or "row", pooling=pooling) for one in tables]


def served_of(path: Path, of: list[Source], kind: Any = "bag", weighted: bool = False) -> Served:
    served = load_served(write(path / "served", ("", kind, of), weighted=weighted))
    assert isinstance(served, Served)
    return served


def batch(of: list[Source], size: int = 7) -> tuple[Tensor, Tensor]:
    """Ids of each feature, some bags empty, and lengths."""
    features = [source for source in of for _ in source.features]
    lengths = torch.randint(0, 4, (len(features) * size,))
    counts = lengths.view(len(features), -1).sum(1).tolist()
    ids = [
        torch.randint(0, len(one.weight), (count,))
        for one, count in zip(features, counts, strict=True)
    ]
    return torch.cat(ids), lengths


def offsets_of(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "whole"])
def test_fbgemm_pools_the_same(tmp_path: Path, dtype: str, pooling: str, pruned: bool) -> None:
    of = sources(dtype, pooling=pooling, pruned=pruned)
    served = served_of(tmp_path, of)
    module = served.to_fbgemm()
    ids, lengths = batch(of)
    found = module(ids.clone(), offsets_of(lengths))
    assert found.dtype == torch.float32
    if dtype == "int4/column" and pooling == "mean":
        # Means in torch and in FBGEMM round in another order.
        torch.testing.assert_close(found, served(ids, lengths), rtol=0, atol=1e-6)
    else:
        assert torch.equal(found, served(ids, lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fbgemm_reads_the_same_sequences(tmp_path: Path, dtype: str) -> None:
    of = [one for one in sources(dtype) if one.name != "dense"]  # of one width
    served = served_of(tmp_path, of, "sequence")
    ids, lengths = batch(of)
    found = served.to_fbgemm()(ids.clone(), offsets_of(lengths))
    assert torch.equal(found, served(ids, lengths))


def test_few_rows_are_found_by_a_hash_map(tmp_path: Path) -> None:
    """An array takes 8 bytes an id."""
    of = [
        Source("two", table(5000, 8, 0.004), ["a", "b"]),
        Source("none", table(70, 8, 0.0), ["c"]),
    ]
    served = served_of(tmp_path, of)
    module: Any = served.to_fbgemm()
    assert module.tables.index_remapping_hash_table_cpu is not None
    assert not module.tables.index_remappings_array.numel()
    ids = torch.cat([torch.arange(5000), torch.arange(5000), torch.arange(70).repeat(72)[:5000]])
    found = module(ids.clone(), torch.arange(15001))
    assert torch.equal(found, served(ids, torch.ones_like(ids))) and found.any()
    ids[[3, 7000]] = torch.tensor([-1, 5000])
    with_zeros = ids.clone()
    with_zeros[[3, 7000]] = 0
    assert torch.equal(module(ids, torch.arange(15001)), served(with_zeros, torch.ones_like(ids)))


def test_a_default_row(tmp_path: Path) -> None:
    """The row of all removed ids."""
    model = nn.Sequential(nn.EmbeddingBag(60, 8, mode="sum"))
    sparsifier = DataNormSparsifier(sparsity_level=0.995, sparse_block_shape="row", norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    compact(model, sparsifier, optimizer=(), removed="default_row")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    export(model, None, tmp_path / "served")
    served = load_served(tmp_path / "served")
    ids, offsets = torch.arange(60), torch.arange(61)
    expected = served(ids, offsets[:-1])
    assert expected.any()
    assert torch.equal(served.to_fbgemm()(ids.clone(), offsets), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_torchrec_pools_the_same(tmp_path: Path, dtype: str, weighted: bool) -> None:
    """Sums beside means, features in another order, ids out of range as zeros."""
    of = sources(dtype)
    # Weighted means are not exported.
    of[1] = replace(of[1], pooling="sum" if weighted else "mean")
    served = served_of(tmp_path, of, weighted=weighted)
    ids, lengths = batch(of)
    ids[::9] = 5000
    ids[::11] = -4
    weights = torch.rand(len(ids)) if weighted else None
    jagged = KeyedJaggedTensor(["a", "b", "c", "d"], ids, lengths=lengths, weights=weights)
    expected = served(jagged)
    module = served.to_torchrec()
    for given in (jagged, jagged.permute([2, 0, 3, 1])):
        found = module(given)
        assert sorted(found.keys()) == sorted(expected.keys())
        for key in expected.keys():  # noqa: SIM118  (a KeyedTensor is no mapping)
            torch.testing.assert_close(
                found[key], expected[key], rtol=0, atol=1e-6 if key == "c" or weighted else 0
            )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_torchrec_shards_it(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two devices: on the CPU here."""
    monkeypatch.setattr(global_settings, "PROPOGATE_DEVICE", True)
    of = sources(dtype)
    served = served_of(tmp_path, of)
    model = nn.ModuleDict({"sparse": served.to_torchrec()})
    ids, lengths = batch(of)
    jagged = KeyedJaggedTensor(["a", "b", "c", "d"], ids, lengths=lengths)
    expected = model["sparse"](jagged)
    sharded, plan = shard_quant_model(
        copy.deepcopy(model), world_size=2, compute_device="cpu", sharding_device="cpu"
    )
    assert "rank:1" in str(plan)
    assert not sharded.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    found = sharded["sparse"](jagged)
    found = found.wait() if hasattr(found, "wait") else found
    assert found.keys() == expected.keys() and torch.equal(found.values(), expected.values())


def test_what_they_have_no_place_for_is_refused(tmp_path: Path) -> None:
    mixed = sources("fp32")
    mixed[1] = replace(mixed[1], pooling="mean")
    with pytest.raises(ValueError, match=r"sums and means.*use to_torchrec\(\)"):
        served_of(tmp_path / "mixed", mixed).to_fbgemm()
    odd = served_of(tmp_path / "odd", [Source("t", table(30, 7, 0.5), ["a"], "sum", "int4")])
    for convert in (odd.to_fbgemm, odd.to_torchrec):
        with pytest.raises(ValueError, match=r"'t.*' has 7 columns: in 4 bits"):
            convert()
    sequences = served_of(tmp_path / "sequence", sources("fp32")[:1], "sequence")
    with pytest.raises(ValueError, match=r"has kind 'sequence'.*use to_fbgemm\(\)"):
        sequences.to_torchrec()


def test_rows_of_an_odd_number_of_bytes(tmp_path: Path) -> None:
    for dtype, columns in (("int8", 5), ("int4", 6)):
        of = [Source("t", table(30, columns, 0.5), ["a"], "sum", dtype)]
        odd = served_of(tmp_path / dtype, of)
        with pytest.raises(ValueError, match=r"'t': to_torchrec\(\) needs rows of an even number"):
            odd.to_torchrec()
        ids, lengths = batch(of)
        assert torch.equal(odd.to_fbgemm()(ids, offsets_of(lengths)), odd(ids, lengths))


def test_negative_ids_read_row_0_of_their_table(tmp_path: Path) -> None:
    """FBGEMM alone reads the entry before the table's remap: another table's row."""
    of = [Source("one", table(100, 8, 1.0), ["a"]), Source("two", table(30, 8, 1.0), ["b"])]
    served = served_of(tmp_path, of)
    module: Any = copy.deepcopy(served.to_fbgemm())
    assert module.tables.index_remappings_array.numel()
    ids = torch.tensor([5, -1, 30])
    offsets = torch.tensor([0, 1, 3])
    found = torch.jit.script(module)(indices=ids, offsets=offsets)
    assert torch.equal(found, served(torch.tensor([5, 0, 0]), torch.tensor([1, 2])))
    assert ids.tolist() == [5, -1, 30]


def test_conversions_read_no_files(tmp_path: Path) -> None:
    of = sources("fp32")
    served = served_of(tmp_path, of)
    (tmp_path / "served").rename(tmp_path / "moved")
    ids, lengths = batch(of)
    assert torch.equal(served.to_fbgemm()(ids.clone(), offsets_of(lengths)), served(ids, lengths))

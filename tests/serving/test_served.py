"""Loaded artifacts, against pooling one id at a time, and against the modules that were
exported."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse import DataNormSparsifier, export
from dist_sparse.serving.served import Served, load_served
from tests.serving.folders import Source, bags, table, write

FBGEMM = pytest.mark.parametrize("fbgemm", [True, False], ids=["fbgemm", "torch"])
DTYPES = pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8", "int4", "int4/column"])


def sources(
    dtype: str = "fp32", *, block: int = 0, means: bool = False, whole: bool = False
) -> list[Source]:
    """A table with two features, one that keeps all rows, one with nothing left; two widths."""
    how: dict[str, Any] = {"block": block, "whole": whole}
    tables = [
        Source("two", table(100, 8, 0.4, **how), ["a", "b"]),
        Source("dense", table(33, 4, 1.0, whole=whole), ["c"], "mean" if means else "sum"),
        Source("none", table(70, 8, 0.0, **how), ["d"]),
    ]
    return of_kind(dtype, *tables)


def of_kind(dtype: str, *tables: Source) -> list[Source]:
    """The tables in a dtype, which may name its scale: ``"int4/column"``."""
    kind: Any
    scale: Any
    kind, _, scale = dtype.partition("/")
    return [replace(each, dtype=kind, scale=scale or "row") for each in tables]


def batch(
    features: int, size: int, dtype: torch.dtype = torch.int64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids, some of them out of range, and lengths, some of them 0."""
    some = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (features * size,), generator=some)
    lengths[:1] = 0
    return torch.randint(-3, 120, (int(lengths.sum()),), generator=some).to(dtype), lengths


def pooled(
    of: Sequence[Source], ids: Tensor, lengths: Tensor, weights: Tensor | None = None
) -> Tensor:
    """What a collection should give."""
    features = [source for source in of for _ in source.features]
    each = lengths.view(len(features), -1)
    parts = torch.split(ids, each.sum(1).tolist())
    factors = [None] * len(parts) if weights is None else torch.split(weights, each.sum(1).tolist())
    return torch.cat(
        [
            bags(source.decoded(), part, some, source.pooling, factor)
            for source, part, some, factor in zip(features, parts, each, factors, strict=True)
        ],
        dim=1,
    )


def one(path: Path, **options: Any) -> Served:
    served = load_served(path, **options)
    assert isinstance(served, Served)
    return served


@FBGEMM
@DTYPES
def test_pooled(tmp_path: Path, dtype: str, fbgemm: bool) -> None:
    """Sums in the order of the ids are equal bit for bit; ids are as they were."""
    of = sources(dtype)
    served = one(write(tmp_path / "served", ("", "bag", of)), fbgemm=fbgemm)
    for size, ids_dtype in ((1, torch.int64), (6, torch.int64), (6, torch.int32), (0, torch.int64)):
        ids, lengths = batch(4, size, ids_dtype)
        before = ids.clone()
        assert torch.equal(served(ids, lengths), pooled(of, ids, lengths)) and torch.equal(
            ids, before
        )
    nothing = served(torch.zeros(0).long(), torch.zeros(8).int())
    assert nothing.shape == (2, 28) and nothing.dtype == torch.float32 and not nothing.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_ids_are_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    """7.9 would be cut to 7."""
    served = one(write(tmp_path / "served", ("", "bag", sources())))
    ids, lengths = batch(4, 6)
    with pytest.raises(ValueError, match=r"Invalid ids of dtype .*: must be int32 or int64"):
        served(ids.to(dtype), lengths)


@FBGEMM
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, fbgemm: bool) -> None:
    """FBGEMM's operators would serve other bags, or read behind the weights."""
    bag = ("", "embedding_bag", [Source("t", table(60, 4, 0.5))])
    served = one(write(tmp_path / "bag", bag), fbgemm=fbgemm)
    ids = torch.arange(6)
    lengths, offsets = torch.tensor([2, 4]), torch.tensor([0, 2])
    with pytest.raises(
        ValueError, match="Offsets begin with 0, never fall, and end with the number"
    ):
        served(ids, lengths)
    with pytest.raises(ValueError, match="Weights must have the shape of the ids"):
        served(ids, offsets, torch.ones(5))
    with pytest.raises(ValueError, match="take no offsets"):
        served(ids.view(2, 3), offsets)
    wide = torch.rand(6, 2)
    weights = wide[:, 0]  # not contiguous
    wanted = served(ids, offsets, weights.contiguous())
    assert torch.equal(served(ids, offsets, weights), wanted)


@FBGEMM
def test_a_cast_keeps_zeros(tmp_path: Path, fbgemm: bool) -> None:
    """Scales rounded to another dtype would not."""
    of = sources("int8")
    served = one(write(tmp_path / "served", ("", "bag", of)), fbgemm=fbgemm)
    ids, lengths = batch(4, 6)
    want = served(ids, lengths)
    assert torch.equal(served.bfloat16()(ids, lengths), want) and torch.equal(
        served.double()(ids, lengths), want
    )
    with pytest.raises(ValueError, match="takes ids and their lengths"):
        served(ids)


@FBGEMM
def test_means_beside_sums(tmp_path: Path, fbgemm: bool) -> None:
    """A mean is over all ids of a bag, removed ones too."""
    of = sources(means=True)
    served = one(write(tmp_path / "served", ("", "bag", of)), fbgemm=fbgemm)
    ids, lengths = batch(4, 6)
    torch.testing.assert_close(served(ids, lengths), pooled(of, ids, lengths), rtol=1e-6, atol=1e-6)
    for source in of:
        source.pooling = "mean"
    served = one(write(tmp_path / "means", ("", "bag", of)), fbgemm=fbgemm)
    torch.testing.assert_close(served(ids, lengths), pooled(of, ids, lengths), rtol=1e-6, atol=1e-6)


@FBGEMM
@DTYPES
def test_zeros_within_rows(tmp_path: Path, dtype: str, fbgemm: bool) -> None:
    """Removed blocks are stored as zeros, and are exactly 0 in every dtype; odd columns, ragged
    blocks."""
    of = [
        *sources(dtype, block=4),
        *of_kind(dtype, Source("odd", table(50, 7, 0.6, block=2), ["e"])),
    ]
    path = write(tmp_path / "served", ("", "bag", of))
    ids, lengths = batch(5, 6)
    want = pooled(of, ids, lengths)
    served = one(path, fbgemm=fbgemm)
    assert torch.equal(served(ids, lengths), want)
    each = torch.arange(50).repeat(5)
    single = served(each, torch.ones(250).long())
    for first, source in zip((0, 8, 20, 28), (of[0], of[0], of[2], of[3]), strict=True):
        columns = single[:, first : first + source.weight.shape[1]]
        assert bool((columns[source.weight[:50] == 0] == 0).all())


@FBGEMM
def test_a_keyed_jagged_tensor(tmp_path: Path, fbgemm: bool) -> None:
    """In any order of keys, with features that the collection does not have, and one that two
    tables have."""
    of = sources(means=True)
    of[1].features = ["c", "a"]
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=source.name,
                num_embeddings=len(source.weight),
                embedding_dim=source.weight.shape[1],
                feature_names=list(source.features),
                pooling=PoolingType.MEAN if source.pooling == "mean" else PoolingType.SUM,
            )
            for source in of
        ]
    )
    for source in of:
        collection.embedding_bags[source.name].weight.data.copy_(source.weight)
    served = one(write(tmp_path / "served", ("tower.tables", "bag", of)), fbgemm=fbgemm)
    keys = ["d", "x", "b", "c", "a"]
    lengths = torch.randint(0, 4, (5 * 3,), generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, 33, (int(lengths.sum()),), generator=torch.Generator().manual_seed(2))
    got, want = (
        module(KeyedJaggedTensor(keys, ids, lengths=lengths)) for module in (served, collection)
    )
    assert got.keys() == want.keys() == ["a@two", "b", "c", "a@dense", "d"]
    assert got.length_per_key() == want.length_per_key()
    torch.testing.assert_close(got.values(), want.values(), rtol=1e-6, atol=1e-6)  # of means
    assert torch.equal(got["a@two"], want["a@two"]) and torch.equal(got["b"], want["b"])
    with pytest.raises(ValueError, match=r"Features \['d'\] are not in the KeyedJaggedTensor"):
        served(KeyedJaggedTensor(["a", "b", "c"], ids[:3], lengths=torch.ones(3).int()))
    with pytest.raises(ValueError, match="batches of different sizes"):
        stride = [[1], [1], [2], [1]]
        served(
            KeyedJaggedTensor(
                ["a", "b", "c", "d"],
                ids[:5],
                lengths=torch.ones(5).int(),
                stride_per_key_per_rank=stride,
            )
        )
    with pytest.raises(ValueError, match="must be a KeyedJaggedTensor or tensors"):
        served([1, 2])


def test_a_weighted_keyed_jagged_tensor(tmp_path: Path) -> None:
    of = [Source("t", table(100, 8, 0.4), ["a", "b"])]
    served = one(write(tmp_path / "served", ("", "bag", of), weighted=True))
    ids, lengths = batch(2, 5)
    weights = torch.rand(len(ids))
    got = served(KeyedJaggedTensor(["a", "b"], ids, weights, lengths=lengths))
    torch.testing.assert_close(
        got.values(), pooled(of, ids, lengths, weights), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(ValueError, match="has no weights"):
        served(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
    with pytest.raises(ValueError, match="has no weights"):
        served(ids, lengths)


@FBGEMM
@DTYPES
def test_sequences(tmp_path: Path, dtype: str, fbgemm: bool) -> None:
    """A row for each id, zeros for removed ones."""
    of = of_kind(
        dtype,
        Source("two", table(100, 8, 0.4), ["a", "b"], "none"),
        Source("c", table(40, 8, 1.0), ["c"], "none"),
    )
    served = one(write(tmp_path / "served", ("", "sequence", of)), fbgemm=fbgemm)
    configs = [
        EmbeddingConfig(
            name=each.name,
            num_embeddings=len(each.weight),
            embedding_dim=8,
            feature_names=list(each.features),
        )
        for each in of
    ]
    collection = EmbeddingCollection(tables=configs)
    for source in of:
        collection.embeddings[source.name].weight.data.copy_(source.decoded())
    ids, lengths = batch(3, 4)
    ids = ids.clamp(0, 39)
    jagged = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths)
    got, want = served(jagged), collection(jagged)
    assert list(got) == list(want) == ["a", "b", "c"]
    for key, each in want.items():
        assert torch.equal(got[key].values(), each.values()) and torch.equal(
            got[key].lengths(), each.lengths()
        )
    assert torch.equal(served(ids, lengths), torch.cat([each.values() for each in want.values()]))


@FBGEMM
def test_modules_of_torch(tmp_path: Path, fbgemm: bool) -> None:
    weight = table(60, 6, 0.5)
    for last in (False, True):
        bag = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=last)
        path = write(
            tmp_path / f"bag {last}", ("bag", "embedding_bag", [Source("t", weight)]), last=last
        )
        served = one(path, fbgemm=fbgemm)
        ids = torch.randint(0, 60, (20,), generator=torch.Generator().manual_seed(0))
        offsets = torch.tensor([0, 5, 5, 12, 20])[: 4 + last]
        assert torch.equal(served(ids, offsets), bag(ids, offsets))
        weights = torch.rand(20)
        torch.testing.assert_close(
            served(ids, offsets, weights), bag(ids, offsets, weights), rtol=1e-6, atol=1e-6
        )
        assert torch.equal(served(ids.view(4, 5)), bag(ids.view(4, 5)))
        torch.testing.assert_close(
            served(ids.view(4, 5), None, weights.view(4, 5)),
            bag(ids.view(4, 5), None, weights.view(4, 5)),
        )
    served = one(
        write(tmp_path / "ids", ("ids", "embedding", [Source("t", weight, pooling="none")])),
        fbgemm=fbgemm,
    )
    for ids in (torch.tensor(3), torch.randint(0, 60, (2, 3, 4)), torch.zeros(0).int()):
        assert torch.equal(served(ids), F.embedding(ids, weight))
    with pytest.raises(ValueError, match=r"takes tensors, as its torch\.nn module did"):
        served(KeyedJaggedTensor(["a"], torch.zeros(1).int(), lengths=torch.ones(1).int()))


UNKNOWN = torch.tensor([-1, 60, 5, -7, 2**31 - 1, 0])
"""Ids, all but two of them out of the range of 60 rows."""


@FBGEMM
@pytest.mark.parametrize("ids", [UNKNOWN, UNKNOWN.int()], ids=["int64", "int32"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_unknown_ids_of_bags(tmp_path: Path, fbgemm: bool, ids: Tensor, pooling: Any) -> None:
    """As removed ids, or id 0, or an error; counted by table; collections and modules of torch,
    weighted or not."""
    weight = table(60, 4, 0.5)
    weight[0], weight[5] = 1.0, 2.0
    of = [
        Source("t", weight, ["a", "b"], pooling),
        Source("dense", table(60, 4, 1.0), ["c"], pooling),
    ]
    path = write(tmp_path / "served", ("", "bag", of), weighted=pooling == "sum")
    many, lengths = ids.repeat(3), torch.tensor([6, 0] * 3)
    weights = torch.rand(18) if pooling == "sum" else None
    removed = torch.where((many < 0) | (many > 59), int((weight[:, 0] == 0).nonzero()[0]), many)
    served = one(path, fbgemm=fbgemm)
    got, want = served(many, lengths, weights), pooled(of, many, lengths, weights)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[:, :8], served(removed, lengths, weights)[:, :8])
    assert served.unknown == {"t": 8, "dense": 4}
    clamped = torch.where((many < 0) | (many > 59), 0, many)
    strict = one(path, fbgemm=fbgemm, unknown="Raise")  # case does not matter
    assert torch.equal(strict(clamped, lengths, weights), served(clamped, lengths, weights))
    with pytest.raises(
        ValueError,
        match=r"id -1 of table 't', which has 60 rows \(8 such lookups.*; id -1 of .*dense",
    ):
        strict(many, lengths, weights)
    assert strict.unknown == {"t": 8, "dense": 4}
    modules = write(tmp_path / "bag", ("", "embedding_bag", [Source("t", weight, pooling=pooling)]))
    bag = one(modules, fbgemm=fbgemm)
    assert torch.equal(bag(many.view(6, 3)), bag(removed.view(6, 3)))
    assert bag.unknown == {"t": 12}


@FBGEMM
@pytest.mark.parametrize("ids", [UNKNOWN, UNKNOWN.int()], ids=["int64", "int32"])
def test_unknown_ids_of_sequences(tmp_path: Path, fbgemm: bool, ids: Tensor) -> None:
    weight = table(60, 4, 0.5)
    weight[0], weight[5] = 1.0, 2.0
    of = [Source("t", weight, ["a"], "none")]
    path = write(tmp_path / "served", ("words", "sequence", of), ("ids", "embedding", of))
    zero = load_served(path, fbgemm=fbgemm)
    strict = load_served(path, fbgemm=fbgemm, unknown="raise")
    assert isinstance(zero, dict) and isinstance(strict, dict)
    for name, args in (("words", (ids, torch.tensor([6]))), ("ids", (ids,))):
        assert zero[name](*args).tolist() == [
            [0.0] * 4,
            [0.0] * 4,
            [2.0] * 4,
            [0.0] * 4,
            [0.0] * 4,
            [1.0] * 4,
        ]
        with pytest.raises(ValueError, match="id -1 of table 't', which has 60 rows"):
            strict[name](*args)
    assert zero["ids"](ids.view(2, 3)).shape == (2, 3, 4)
    assert zero["ids"].unknown == {"t": 8} and zero["words"].unknown == {"t": 4}
    with pytest.raises(ValueError, match="unknown='nan'"):
        load_served(path, unknown="nan")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid unknown='raise': a saved lookup"):
        strict["words"].to_pt2(tmp_path / "served.pt2")


@pytest.mark.parametrize("block", ["row", (1, 4)])
def test_what_was_exported(tmp_path: Path, block: Any) -> None:
    """From a sparsified model to a served one: equal, bit for bit, before and after."""
    torch.manual_seed(0)
    config = EmbeddingBagConfig(
        name="t", num_embeddings=500, embedding_dim=16, feature_names=["a", "b"]
    )
    model = torch.nn.ModuleDict(
        {"sparse": EmbeddingBagCollection(tables=[config]), "last": torch.nn.Embedding(90, 8)}
    )
    sparsifier = DataNormSparsifier(sparsity_level=0.8, sparse_block_shape=block, norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    export(model, sparsifier, tmp_path / "served")
    served = load_served(tmp_path / "served")
    assert isinstance(served, dict) and list(served) == ["last", "sparse"]
    ids, lengths = torch.randint(0, 500, (1200,)), torch.randint(0, 3, (600,))
    jagged = KeyedJaggedTensor(["a", "b"], ids[: int(lengths.sum())], lengths=lengths)
    assert torch.equal(served["sparse"](jagged).values(), model["sparse"](jagged).values())
    assert torch.equal(served["last"](ids % 90), model["last"](ids % 90))


def artifacts(folder: Path) -> dict[str, tuple[Path, dict[str, Any], tuple[Tensor, ...]]]:
    """What is saved as programs: paths, how they are loaded, and a batch."""
    ids, lengths = batch(4, 6)
    offsets = torch.arange(0, len(ids), 3)
    weights = torch.rand(len(ids))
    bag = write(folder / "bag", ("", "bag", sources("int8")), weighted=True)
    int4 = write(folder / "int4", ("", "bag", sources("int4", block=2)))
    sequence = [Source("t", table(90, 4, 0.5), ["a", "b", "c", "d"], "none")]
    one_table = [Source("t", table(90, 4, 0.5), pooling="mean")]
    return {
        "fbgemm": (bag, {"fbgemm": True}, (ids, lengths, weights)),
        "torch": (bag, {"fbgemm": False}, (ids, lengths, weights)),
        "int4": (int4, {"fbgemm": False}, (ids, lengths)),
        "sequence": (write(folder / "sequence", ("", "sequence", sequence)), {}, (ids, lengths)),
        "bag of torch": (
            write(folder / "one", ("", "embedding_bag", one_table)),
            {},
            (ids, offsets),
        ),
        "table of torch": (
            write(folder / "ids", ("", "embedding", one_table)),
            {"fbgemm": False},
            (ids,),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fbgemm", "torch", "int4", "sequence", "bag of torch", "table of torch"]
)
def test_pt2_is_equal(tmp_path: Path, name: str) -> None:
    """Another batch than the one that was traced, a batch of one, empty bags, and wrong lengths."""
    path, options, args = artifacts(tmp_path)[name]
    served = one(path, **options)
    served.to_pt2(tmp_path / "served.pt2")
    lengths = 4 if "of torch" not in name else 1
    # A length of 1; offsets begin with 0.
    first = [1, 0, 0, 0] if lengths == 4 else [0]
    single = (args[0][:1], torch.tensor(first), *args[2:])[: len(args)]
    single = (*single[:2], *(each[:1] for each in single[2:]))
    none = (args[0][:0], torch.zeros(lengths).long(), *(each[:0] for each in args[2:]))[: len(args)]
    loaded = torch.export.load(tmp_path / "served.pt2").module()
    for some in (args, single, none):
        assert torch.equal(loaded(*some), served(*some))
    if "of torch" not in name:
        with pytest.raises(Exception, match="must add up to the number of ids"):
            loaded(args[0], args[1] + 1, *args[2:])


def test_several_collections(tmp_path: Path) -> None:
    of = sources()
    path = write(
        tmp_path / "served", ("sparse.pooled", "bag", of), ("sparse.last", "embedding", [of[0]])
    )
    served = load_served(path)
    assert isinstance(served, dict) and list(served) == ["sparse.pooled", "sparse.last"]
    ids, lengths = batch(4, 3)
    assert torch.equal(served["sparse.pooled"](ids, lengths), pooled(of, ids, lengths))
    assert torch.equal(
        served["sparse.last"](ids[:5].clamp(0, 99)), of[0].weight[ids[:5].clamp(0, 99)]
    )


def test_modules_by_path(tmp_path: Path) -> None:
    of = sources()
    path = write(tmp_path / "one", ("sparse", "bag", of))
    ids, lengths = batch(4, 3)
    by_path = load_served(path, by_path=True)
    assert list(by_path) == ["sparse"]
    assert torch.equal(by_path["sparse"](ids, lengths), load_served(path)(ids, lengths))
    several = write(tmp_path / "two", ("a", "bag", of), ("b", "embedding", [of[0]]))
    assert list(load_served(several, by_path=True)) == ["a", "b"]


@pytest.mark.slow
def test_the_documented_use_is_typed(tmp_path: Path) -> None:
    """Without a cast and without narrowing, under ``mypy --strict``."""
    script = tmp_path / "script.py"
    script.write_text(
        "from typing import Literal, assert_type\n"
        "import torch\n"
        "from dist_sparse import load_served, sparsify\n"
        "from dist_sparse.serving.served import Served\n"
        "served = load_served('served', unknown='raise')\n"
        "assert_type(served, Served)\n"
        "assert_type(served(torch.tensor([7]), torch.tensor([1])), torch.Tensor)\n"
        "served.apply_delta('delta').to_pt2('served.pt2')\n"
        "unknown: dict[str, int] = served.unknown\n"
        "collections = load_served(['served', 'delta'], by_path=True)\n"
        "assert_type(collections, dict[str, Served])\n"
        "collections['user'](torch.tensor([7]), torch.tensor([1]))\n"
        "for module in collections.values():\n"
        "    module.apply_delta('delta')\n"
        "bag = torch.nn.EmbeddingBag(100, 8)\n"
        "optimizer = torch.optim.SGD(bag.parameters())\n"
        "sparsify(bag, optimizer, level=0.5, end=1, block='row')\n"
        "sparsify(bag, optimizer, level=0.5, end=1, block=(1, 4))\n"
        # --strict reports an ignored error that is none.
        "sparsify(bag, optimizer, level=0.5, end=1, block='rows')  # type: ignore[arg-type]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "Invalid path=None: must be the path of a folder."),
        ("", "Invalid path='': must be the path of a folder."),
        (5, "Invalid path=5: must be the path of a folder."),
        (["served", 5], "Invalid path=5: must be the path of a folder."),
        (dict.fromkeys([5]), "Invalid path=5: must be the path of a folder."),
        ([], "Invalid path=[]: must name the folder of an artifact first."),
    ],
    ids=repr,
)
def test_refused_paths(path: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_served(path)


def test_refused(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows", ("", "bag", sources()))
    data = bytearray((rows / "tables.safetensors").read_bytes())
    data[-1] ^= 1
    (rows / "tables.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"tables\.safetensors is damaged"):
        load_served(rows)


@pytest.mark.slow
def test_a_process_without_torchrec(tmp_path: Path) -> None:
    """It imports neither TorchRec nor what trains, and with FBGEMM missing it serves the same."""
    of = sources("int8")
    write(tmp_path / "served", ("", "bag", of))
    ids, lengths = batch(4, 3)
    torch.save((ids, lengths, pooled(of, ids, lengths)), tmp_path / "batch")
    program = (
        "import sys, torch\nwithout = len(sys.argv) > 2\nif without: sys.modules['fbgemm_gpu'] ="
        " None  # as if it were not installed\nimport dist_sparse\nserved ="
        " dist_sparse.load_served(sys.argv[1] + '/served')\nids, lengths, want ="
        " torch.load(sys.argv[1] + '/batch')\nassert torch.equal(served(ids, lengths),"
        " want)\nassert type(served.lookup.row_lookup).__name__ == ('LibtorchLookup' if without else"
        " 'FbgemmLookup')\nrooms = ('sparsifiers', 'enforcer', 'schedulers', 'training', 'groups',"
        " 'optim', 'report', 'serving.jagged')\nbad = ['torchrec', *('fbgemm_gpu.' * without,),"
        " *(f'dist_sparse.{room}' for room in rooms)]\nfound = [name for name in sys.modules if"
        " any(name.startswith(each) for each in bad if each)]\nassert not found, found\n"
    )
    for arguments in ([str(tmp_path)], [str(tmp_path), "without"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

"""`export()` in one process: what is stored, what it takes, and what is refused before anything is
written."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.modules.embedding_configs import PoolingType

from benchmarks.structure import walks
from dist_sparse import DataNormSparsifier, compact, export, sparsify
from dist_sparse.cli.main import main
from dist_sparse.serving.artifact import open_artifact
from dist_sparse.serving.manifest import Collection, Feature
from tests.serving.stored import crcs, dense

DTYPES = ("fp32", "fp16", "int8", "int4")
ROW_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}


def model_of(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    made = {
        "user": nn.EmbeddingBag(1000, 12),
        "item": nn.Embedding(301, 7),
        "few": nn.EmbeddingBag(3, 5, mode="mean"),
    }
    return nn.ModuleDict(made).to(dtype)


def pruned(
    model: nn.Module, block: Any = "row", level: float = 0.8, **options: Any
) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=block, norm="L2")
    sparsifier.add_model(model, **options)
    sparsifier.step()
    return sparsifier


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", ["row", (1, 4), (2, 3), (1, 1), ("COL", 2)], ids=str)
def test_tables(tmp_path: Path, dtype: str, block: Any) -> None:
    model = model_of()
    exported = export(model, pruned(model, block), tmp_path / "served", dtype)
    found = dense(tmp_path / "served")
    for name, table in exported.manifest.tables.items():
        weight = model[name].weight.data
        kept = (weight != 0).any(1)
        assert (table.kept, table.rows) == (int(kept.sum()), len(weight))
        assert (found[name][weight == 0] == 0).all()
        if dtype in ("fp32", "fp16"):
            assert torch.equal(found[name], weight if dtype == "fp32" else weight.half().float())
        else:
            steps = open_artifact(tmp_path / "served").tensors(name)["scale_bias"][:, 0]
            assert (found[name] - weight).abs().max() <= steps.max() / 2
        tail = 4 if dtype in ("int8", "int4") else 0
        row = table.dim // 2 + table.dim % 2 if dtype == "int4" else table.dim * ROW_BYTES[dtype]
        assert table.bytes.after == table.kept * (row + tail) + table.bytes.index
        assert table.bytes.before == weight.nbytes
    assert exported.manifest.bytes == (tmp_path / "served" / "tables.safetensors").stat().st_size
    assert (
        sum(table.bytes.after for table in exported.manifest.tables.values())
        < exported.manifest.bytes
    )
    assert exported.manifest == open_artifact(tmp_path / "served").manifest


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float64])
def test_tables_of_other_types(tmp_path: Path, source: torch.dtype) -> None:
    model = model_of(source)
    exported = export(model, pruned(model, (1, 4)), tmp_path / "served")
    for name, found in dense(tmp_path / "served").items():
        assert torch.equal(found, model[name].weight.data.float())
        assert exported.manifest.tables[name].bytes.before == model[name].weight.nbytes


def test_dense_tables_have_no_bitmap(tmp_path: Path) -> None:
    """Never sparsified, beside others and alone; and at a level of 0."""
    model = model_of()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row")
    sparsifier.add_model(model, include="user")
    sparsifier.step()
    tables = export(model, sparsifier, tmp_path / "one").manifest.tables
    assert tables["user"].bytes.index == 128
    assert tables["item"].bytes.index == 0 and tables["item"].kept == 301
    for sparse in (None, pruned(model_of(), level=0.0)):
        unpruned = model_of() if sparse is None else sparse.masks.tables.sources[0].model
        exported = export(unpruned, sparse, tmp_path / str(sparse is None))
        assert {name: table.bytes.after for name, table in exported.manifest.tables.items()} == {
            name: module.weight.nbytes for name, module in unpruned.items()
        }


def test_edges(tmp_path: Path) -> None:
    """Nothing kept, rows that a finer mask emptied, kept rows of zeros, negative zeros, a padding
    row."""
    model = nn.ModuleDict({"none": nn.Embedding(40, 4), "some": nn.Embedding(40, 8, padding_idx=7)})
    weight = model["some"].weight.data
    weight[3], weight[5] = -0.0, 0.0
    weight[9, :4], weight[9, 4:] = 0.0, 5.0
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 4), sparsity_level=0.0)
    sparsifier.add_model(
        model, config={"none": {"sparsity_level": 1.0}, "some": {"sparsity_level": 0.1}}
    )
    sparsifier.step()
    tables = export(model, sparsifier, tmp_path / "served").manifest.tables
    assert tables["none"].kept == 0 and tables["none"].bytes.after == 8
    assert tables["some"].kept == 37, "rows 3, 5 and 7 have no block left"
    assert all(
        torch.equal(found, model[name].weight.data)
        for name, found in dense(tmp_path / "served").items()
    )
    dead = sparsify(model, torch.optim.SGD(model.parameters(), 0.1), level=0.5, end=0, block="row")
    with dead:
        dead.step()
        kept = torch.nonzero(model["some"].weight.data.any(1)).flatten()
        model["some"].weight.data[kept[0]] = -0.0
        tables = export(model, dead, tmp_path / "zeros").manifest.tables
    assert tables["some"].kept == 20, "by the mask, not by what is zero"
    assert torch.equal(
        dense(tmp_path / "zeros")["some"].view(torch.int32),
        model["some"].weight.data.view(torch.int32),
    )


def test_compact_tables(tmp_path: Path) -> None:
    """Ids of the artifact are those of the original table, once compacted and twice, with finer
    masks on top."""
    tables = {
        "user": nn.EmbeddingBag(1000, 12),
        "none": nn.Embedding(40, 8),
        "whole": nn.Embedding(40, 8),
    }
    model = nn.ModuleDict(tables)
    config = {
        "user": {"sparsity_level": 0.5},
        "none": {"sparsity_level": 1.0},
        "whole": {"sparsity_level": 0.0},
    }
    sparsifier = pruned(model, config=config)
    before, whole = (
        export(model, sparsifier, tmp_path / "before"),
        model["user"].weight.data.clone(),
    )
    model = compact(model, sparsifier, optimizer=())
    for sparse, name in ((None, "none"), (sparsifier, "consumed")):
        assert export(model, sparse, tmp_path / name).manifest == before.manifest
        assert crcs(tmp_path / name) == crcs(tmp_path / "before")
    again = pruned(model, include=["user"], level=0.4)
    kept = whole.any(1)
    whole[kept] = model["user"].stored_weight.data
    assert export(model, again, tmp_path / "again").manifest.tables["user"].kept == 300
    model = compact(model, again, optimizer=())
    finer = pruned(model, (1, 4), include=["user"], level=0.7)
    table = export(model, finer, tmp_path / "finer").manifest.tables["user"]
    kept = whole.any(1)
    whole[kept] = model["user"].stored_weight.data
    assert torch.equal(dense(tmp_path / "finer")["user"], whole)
    assert table.rows == 1000 and table.kept == int(whole.any(1).sum()) < 300
    assert table.bytes.before == 48000


def test_plain_data(tmp_path: Path) -> None:
    """Registered by add_data: its mask counts once it is in the weights."""
    model = model_of()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 12))
    sparsifier.add_data("user", model["user"])
    sparsifier.step()
    message = r"'user' has .* removed weights that are not zero.* call remove_untouched\(\) again.*"
    with pytest.raises(ValueError, match=message + r"squash_mask\(\) of data that add_data\(\)"):
        export(model, sparsifier, tmp_path / "served")
    sparsifier.squash_mask()
    assert export(model, sparsifier, tmp_path / "served").manifest.tables["user"].kept == 500
    assert torch.equal(dense(tmp_path / "served")["user"], model["user"].weight.data)


def test_tables_of_another_name_are_refused(tmp_path: Path) -> None:
    """Their masks would be dropped."""
    model = model_of()
    part, data = DataNormSparsifier(sparsity_level=0.5), DataNormSparsifier(sparsity_level=0.5)
    part.add_model(model["user"])
    data.add_data("user_emb", model["user"])
    for sparsifier in (part, data):
        with pytest.raises(
            ValueError, match=r"whole model that was sparsified\. .*by add_model\(model\)"
        ):
            export(model, sparsifier, tmp_path / "served")


def test_an_enforcer_is_settled_first(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(100, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    sparse = sparsify(model, optimizer, level=0.5, end=0, block=(1, 4))
    model(torch.arange(100).view(10, 10)).sum().backward()
    optimizer.step()
    sparse.step()
    with torch.no_grad():
        model[0].weight.add_(1.0)  # by the user: no forward or step has masked it since
    export(model, sparse, tmp_path / "served")
    assert torch.equal(dense(tmp_path / "served")["0"], model[0].weight.data)
    sparse.detach()
    optimizer.step()
    with pytest.raises(ValueError, match="not zero"):
        export(model, sparse, tmp_path / "detached")
    sparse.sparsifier.apply_masks()
    export(model, sparse.sparsifier, tmp_path / "detached")


def test_collections(tmp_path: Path) -> None:
    """Paths, kinds, pooling, features in the order of the output, one that two tables share."""
    bags = [
        EmbeddingBagConfig(
            name=name, num_embeddings=20, embedding_dim=4, feature_names=features, pooling=pooling
        )
        for name, features, pooling in (
            ("user", ["u1", "both"], PoolingType.SUM),
            ("ad", ["both", "a"], PoolingType.MEAN),
        )
    ]
    words = [EmbeddingConfig(name="word", num_embeddings=9, embedding_dim=4, feature_names=["w"])]
    model = nn.Module()
    model.words = EmbeddingCollection(tables=words)
    model.below = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=bags)})
    model.weighted = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="score", num_embeddings=9, embedding_dim=4, feature_names=["s"])
        ],
        is_weighted=True,
    )
    model.last = nn.EmbeddingBag(5, 3, mode="mean", include_last_offset=True)
    manifest = export(model, pruned(model), tmp_path / "served").manifest
    assert manifest.collections == (
        Collection(
            path="below.bags",
            kind="bag",
            tables=("user", "ad"),
            features=tuple(
                Feature(name=name, table=table)
                for name, table in (("u1", "user"), ("both", "user"), ("both", "ad"), ("a", "ad"))
            ),
        ),
        Collection(path="last", kind="embedding_bag", include_last_offset=True, tables=("last",)),
        Collection(
            path="weighted",
            kind="bag",
            weighted=True,
            tables=("score",),
            features=(Feature(name="s", table="score"),),
        ),
        Collection(
            path="words",
            kind="sequence",
            tables=("word",),
            features=(Feature(name="w", table="word"),),
        ),
    )
    assert manifest.collections[0].outputs == ("u1", "both@user", "both@ad", "a")
    pooling = {name: table.pooling for name, table in manifest.tables.items()}
    assert pooling == {"user": "sum", "ad": "mean", "score": "sum", "word": "none", "last": "mean"}


class Scaled(nn.Embedding):
    """Returns other values than its rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 10


class ScaledBags(EmbeddingBagCollection):
    """A user's own."""


def refused(path: Path) -> dict[str, tuple[str, Callable[[], object]]]:
    """What must be refused, by a name: part of the message, and the call."""
    model = model_of()
    sparsifier = pruned(model)
    served = path / "served"
    codes, part = torch.ones(3, 3, dtype=torch.int8), nn.ModuleDict({"user": model["user"]})

    def with_value(value: float, dtype: str) -> None:
        other = model_of()
        other["item"].weight.data[300, 2] = value
        export(other, None, served, dtype)

    def single(module: nn.Module) -> None:
        export(nn.Sequential(module), None, served)

    def hooked(module: nn.Module) -> None:
        module.register_forward_hook(lambda module, args, output: output * 3)
        single(module)

    def collection_of(kind: type[EmbeddingBagCollection]) -> EmbeddingBagCollection:
        return kind(
            [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
        )

    def tied() -> nn.ModuleDict:
        other = model_of()
        other["copy"] = nn.Embedding(301, 7, _weight=other["item"].weight.data)
        other["copy"].weight = other["item"].weight
        return other

    return {
        "dtype": (r"Invalid dtype='int16'.*Did you mean 'int8'", lambda: export(model, sparsifier, served, "int16")),
        "sparse": (r"Invalid sparse of type dict: must be what remove_untouched\(\) or", lambda: export(model, {}, served)),
        "model": ("torch.nn.Module", lambda: export(sparsifier, sparsifier, served)),
        "no tables": ("holds no tables", lambda: export(nn.Linear(3, 3), None, served)),
        "integers": ("'0'.*torch.int8", lambda: single(nn.Embedding(3, 3, _weight=codes, _freeze=True))),
        "path": ("Invalid path=None: must be the path of a folder", lambda: export(model, sparsifier, None)),
        "since": ("Invalid since=5: must be the path of a folder", lambda: export(model, sparsifier, served, since=5)),
        "a step of since": ("Invalid since=None: must be", lambda: export(model, sparsifier, served, since=[path, None])),
        "exists": ("exists already", lambda: export(model, sparsifier, path)),
        "another model": ("'user'.* another tensor", lambda: export(model_of(), sparsifier, served)),
        "part": ("'item' is not one of the model's tables", lambda: export(part, sparsifier, served)),
        "no rows": ("'0' has no weights", lambda: single(nn.EmbeddingBag(0, 8))),
        "max": ("'0'.*mode='max'", lambda: single(nn.EmbeddingBag(3, 3, mode="max"))),
        "max_norm": ("'0'.*max_norm=1.0", lambda: single(nn.Embedding(3, 3, max_norm=1.0))),
        "padding": ("'0'.*padding_idx=1", lambda: single(nn.EmbeddingBag(3, 3, padding_idx=1))),
        "tied": ("copy.weight is a table of another module", lambda: export(tied(), None, served)),
        "a subclass": ("0.weight can't be exported: the Scaled at '0' is a subclass", lambda: single(Scaled(3, 3))),
        "a hook": ("0.weight can't be exported: the Embedding at '0' has forward hooks", lambda: hooked(nn.Embedding(3, 3))),
        "a collection's subclass": ("the ScaledBags at '0' is a subclass", lambda: single(collection_of(ScaledBags))),
        "a collection's hook": ("the EmbeddingBagCollection at '0' has forward hooks", lambda: hooked(collection_of(EmbeddingBagCollection))),
        "nan": ("'item' can't be exported in fp32: it has the value nan", lambda: with_value(torch.nan, "fp32")),
        "infinite": ("'item' can't be exported in int8: it has the value -inf", lambda: with_value(-torch.inf, "int8")),
        "overflow": ("'item' can't be exported in fp16: it has the value 65536", lambda: with_value(65536.0, "fp16")),
        "grid": ("'item' can't be exported in int4: it has the value 32769", lambda: with_value(32769.0, "int4")),
    }  # fmt: skip


def test_refused(tmp_path: Path) -> None:
    for name, (message, call) in refused(tmp_path).items():
        with pytest.raises(ValueError, match=message):
            call()
            pytest.fail(f"{name} was not refused")
        assert not [*tmp_path.iterdir()], name


def test_missing_parent_folders_are_made(tmp_path: Path) -> None:
    model = model_of()
    exported = export(model, None, tmp_path / "models" / "new" / "served")
    assert open_artifact(exported.path).manifest == exported.manifest
    export(model, None, tmp_path / "models" / "new" / "again")
    assert sorted(each.name for each in (tmp_path / "models" / "new").iterdir()) == [
        "again",
        "served",
    ]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Not the temporary name beside it."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "served"
    with pytest.raises(NotADirectoryError) as refused:
        export(model_of(), None, path)
    assert str(refused.value) == f"[Errno {errno.ENOTDIR}] Not a directory: '{path}'"


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    model = model_of()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            export(model, None, tmp_path / "served")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


def test_what_it_says(tmp_path: Path) -> None:
    model = model_of()
    sparsifier = pruned(model, (1, 4), level=0.5)
    exported = export(model, sparsifier, tmp_path / "served")
    assert repr(exported) == str(exported)
    shown = str(exported).splitlines()
    assert shown[0] == str(tmp_path / "served")
    # The manifest is on disk too.
    assert shown[-1].startswith("total: ") and " in tables.safetensors, " in shown[-1]


def test_serve_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    exported = export(model, pruned(model, (1, 4)), tmp_path / "served", "int8")
    whole = export(model, pruned(model, level=0.0), tmp_path / "whole")
    assert str(whole).endswith("; no row was removed") and "no row" not in str(exported)
    assert main(["serve-check", str(tmp_path / "served")]) == 0
    out = capsys.readouterr().out
    name = exported.manifest.hash
    assert out == "\n".join(str(exported).splitlines()[1:]) + f"\nartifact {name[:12]}\nok\n"
    assert main(["serve-check", str(tmp_path / "served"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = found.pop("sizes")
    for table, entry in exported.manifest.tables.items():
        assert sizes[table]["after"] == entry.bytes.after
    assert found == {"hash": name, **json.loads(exported.manifest.to_text())}
    with open(tmp_path / "served" / "tables.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    for path, message in (
        (tmp_path / "served", "tables.safetensors is damaged"),
        (tmp_path, "it has no manifest.json. Folders inside have one: served, whole."),
        (tmp_path / "served" / "manifest.json", "manifest.json is not the folder of an artifact"),
    ):
        assert main(["serve-check", str(path)]) == 1
        captured = capsys.readouterr()
        said = " ".join(captured.err.split())
        assert said.startswith("dist-sparse serve-check: ") and message in said
        assert captured.out == ""


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model = model_of()
    sparsifier = pruned(model, (1, 4))
    for name in ("one", "two"):
        export(model, sparsifier, tmp_path / name, "int8")
    assert crcs(tmp_path / "one") == crcs(tmp_path / "two")
    assert str(tmp_path) not in (tmp_path / "one" / "manifest.json").read_text()


@pytest.mark.slow
def test_it_needs_neither_torchrec_nor_fbgemm(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom dist_sparse import DataNormSparsifier, export\nmodel ="
        " torch.nn.EmbeddingBag(99, 8)\nsparsifier = DataNormSparsifier(sparse_block_shape=(1,"
        " 4))\nsparsifier.add_model(model)\nsparsifier.step()\nexport(model, sparsifier,"
        " sys.argv[1], 'int4')\nassert not {'torchrec', 'fbgemm_gpu'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "served")], timeout=120, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_it_walks_the_model_three_times(tmp_path: Path) -> None:
    """Twice to find the tables, and once for the modules that look them up."""
    model = model_of()
    sparsifier = pruned(model)
    assert walks(model, lambda: export(model, sparsifier, tmp_path / "served")) <= 3

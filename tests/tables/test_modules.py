"""The tables of a model, in one process: names, globs, dense parameters, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dist_sparse import DataNormSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, ShardedData, check_data, check_tiling

torchrec = pytest.importorskip("torchrec")

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    DenseTableBatchedEmbeddingBagsCodegen,
)
from torchrec import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embedding_types import ShardedEmbeddingModule  # noqa: E402
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection  # noqa: E402
from torchrec.distributed.types import ShardingEnv2D, ShardingStrategy  # noqa: E402
from torchrec.inference.modules import quantize_embeddings  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection  # noqa: E402
from torchrec.modules.itep_modules import GenericITEPModule  # noqa: E402
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection  # noqa: E402

from dist_sparse.torchrec import check_versions  # noqa: E402


def bags(*names: str, **options: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=6, embedding_dim=4, feature_names=[n])
        for n in names
    ]
    return EmbeddingBagCollection(tables=tables, **options)


def sequences(*names: str) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=n, num_embeddings=6, embedding_dim=4, feature_names=[n])
            for n in names
        ]
    )


class TwoTower(nn.Module):
    """Tables of four kinds, a dense part with matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.ModuleDict({"tables": bags("user", "age"), "words": nn.EmbeddingBag(9, 4)})
        self.item = nn.ModuleDict({"tables": sequences("item"), "position": nn.Embedding(5, 4)})
        self.over = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        self.scale = nn.Parameter(torch.ones(()))


TABLES = ["user", "age", "query/words", "item", "item/position"]
DENSE = ["scale", "over/0/weight", "over/0/bias", "over/1/weight", "over/1/bias"]


def names(model: nn.Module, **selection: Any) -> list[str]:
    return [data.name for data in ModelTables(model, **selection).locate()]


@pytest.mark.slow
def test_plain_modules_need_no_torchrec() -> None:
    code = (
        "import sys, torch; from dist_sparse.tables.modules import ModelTables; "
        "model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 2)); "
        "located = ModelTables(model, dense=True).locate(); "
        "assert [data.name for data in located] == ['0', '1/weight', '1/bias'], located; "
        "assert not {'torchrec', 'fbgemm_gpu', 'dist_sparse.torchrec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_tables_have_their_own_names_and_parameters_their_paths() -> None:
    model = TwoTower()
    located = ModelTables(model, dense=True).locate()
    assert sorted(data.name for data in located) == sorted(TABLES + DENSE)
    assert names(model) == TABLES
    state = model.state_dict()
    for data in located:
        assert data.fqn is not None
        check_tiling(data)
        assert (data.ranks, data.sharding, data.kernel, data.replicated) == (
            None,
            "replicated",
            None,
            False,
        )
        assert data.tiling == ((Rect(0, 0, *data.shape),),)
        assert data.shards[0].tensor.data_ptr() == state[data.fqn].data_ptr()
    shapes = {data.name: data.shape for data in located}
    assert shapes["over/0/weight"] == (3, 4)
    assert shapes["over/0/bias"] == (1, 3)
    assert shapes["scale"] == (1, 1)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"include": "user"}, ["user"]),
        ({"include": ["query.tables.*", "item"]}, ["user", "age", "item"]),
        ({"exclude": ["item*"]}, ["user", "age", "query/words"]),
        (
            {"include": "*", "exclude": "*.embedding_bags.a*"},
            ["user", "query/words", "item", "item/position"],
        ),
        ({"include": [], "dense": "over.*.weight"}, ["over/0/weight", "over/1/weight"]),
        ({"include": "age", "dense": ["over/0/*"], "exclude": "*bias"}, ["age", "over/0/weight"]),
        ({"dense": False}, TABLES),
    ],
)
def test_globs_select_by_name_or_path(selection: dict[str, Any], expected: list[str]) -> None:
    assert names(TwoTower(), **selection) == expected


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            {"include": ["user", "itme"]},
            r"Invalid include pattern 'itme': matches none of the tables user \(query.*dense=",
        ),
        (
            {"exclude": "over*"},
            r"Invalid exclude pattern 'over\*': matches none of the tables user",
        ),
        (
            {"dense": "user"},
            (
                r"Invalid dense pattern 'user': matches none of the parameters scale, over/0/weight"
                r" \(over.0.weight\)"
            ),
        ),
        ({"exclude": "*"}, "include and exclude leave none of the tables user"),
        ({"include": []}, "include and exclude leave none"),
        ({"include": True}, "Invalid include=True: must be a string or a sequence of strings"),
        ({"exclude": [3]}, r"Invalid exclude=\[3\]"),
        ({"exclude": {"user": 1}}, r"Invalid exclude=\{'user': 1\}"),
        ({"dense": 3}, "Invalid dense=3: must be a string or a sequence of strings"),
    ],
)
def test_patterns_that_select_nothing_are_errors(selection: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelTables(TwoTower(), **selection).locate()


def test_a_model_without_tables_is_an_error() -> None:
    with pytest.raises(
        ValueError,
        match=r"Linear holds no tables: no TorchRec collection, nn.Embedding.*by Advanced\(dense=\)\.$",
    ):
        ModelTables(nn.Linear(2, 2)).locate()
    assert names(nn.Linear(2, 2), dense=True) == ["weight", "bias"]
    with pytest.raises(
        ValueError, match=r"Invalid model of type Tensor: must be a torch.nn.Module"
    ):
        ModelTables(torch.ones(2, 2))  # type: ignore[arg-type]


def test_equal_table_names_get_the_module_path() -> None:
    model = nn.ModuleDict(
        {"a": bags("id", "x"), "b": nn.ModuleDict({"c": sequences("id")}), "x": nn.Embedding(3, 2)}
    )
    assert names(model) == ["a/id", "a/x", "b/c/id", "x"]
    clash = nn.ModuleDict({"a": bags("b/t", "t"), "a/b": bags("t"), "c": bags("b/t")})
    with pytest.raises(
        ValueError,
        match=(
            r"Two tables would be called 'a/b/t': a.embedding_bags.b/t.weight,"
            r" a/b.embedding_bags.t.weight. Rename"
        ),
    ):
        ModelTables(clash).locate()


def test_the_model_itself_can_be_a_table_or_a_collection() -> None:
    assert names(nn.Embedding(3, 2)) == ["weight"]
    assert [data.fqn for data in ModelTables(bags("id")).locate()] == ["embedding_bags.id.weight"]


def test_shared_modules_and_parameters_count_once() -> None:
    table = nn.Embedding(4, 3)
    head = nn.Linear(3, 4, bias=False)
    head.weight = table.weight
    assert names(nn.ModuleDict({"in": table, "again": table, "out": head}), dense=True) == ["in"]


def test_wrappers_leave_no_trace_in_names() -> None:
    wrapped = nn.ModuleDict(
        {"tower": checkpoint_wrapper(nn.ModuleDict({"words": nn.Embedding(3, 2)}))}
    )
    assert [data.fqn for data in ModelTables(wrapped).locate()] == ["tower.words.weight"]
    assert [
        data.fqn for data in ModelTables(torch.compile(nn.Sequential(bags("id")))).locate()
    ] == ["0.embedding_bags.id.weight"]


def test_views_are_those_of_the_moment() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(3, 2)})
    source = ModelTables(model)
    old = source.locate()[0].shards[0].tensor
    model["words"].weight = nn.Parameter(torch.ones(3, 2))
    source.locate()[0].shards[0].tensor.zero_()
    assert old.any()
    assert not model["words"](torch.arange(3)).any()


def test_writes_between_forward_and_backward_go_unnoticed() -> None:
    model = nn.Embedding(3, 2)
    before = model.weight.detach().clone()
    out = (model(torch.arange(3)) ** 2).sum()
    ModelTables(model).locate()[0].shards[0].tensor.zero_()
    out.backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, 2 * before) and not model.weight.any()


def test_a_table_without_rows_is_held_by_nobody() -> None:
    data = ModelTables(nn.Embedding(0, 4)).locate()[0]
    assert (data.shape, data.tiling, data.shards) == ((0, 4), ((),), ())


def _parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Embedding(4, 3))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3), nn.LazyLinear(2))


REFUSED_TENSORS = {
    "meta": (
        lambda: bags("id", device=torch.device("meta")),
        "Table 'id' is on the meta device: it has no weights yet; materialize",
    ),
    "integer": (
        lambda: nn.Embedding.from_pretrained(torch.ones(3, 2, dtype=torch.int32)),
        "type torch.int32 are not supported; floating",
    ),
    "complex": (
        lambda: nn.Embedding.from_pretrained(torch.ones(3, 2, dtype=torch.complex64)),
        "type torch.complex64 are not",
    ),
    "parametrized": (_parametrized, "weight is computed"),
    "lazy": (_lazy, "1.weight is not initialized yet; run a forward first"),
    "n-d": (
        lambda: nn.Conv1d(2, 2, 2),
        r"weight has the shape \(2, 2, 2\); must have \(0, 1, 2\) dim",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_weights_that_are_refused(case: str) -> None:
    make, message = REFUSED_TENSORS[case]
    with pytest.raises(ValueError, match=message):
        ModelTables(make(), dense=case in ("lazy", "n-d")).locate()


class OtherBags(EmbeddingBagCollectionInterface):
    """Somebody's own collection."""

    def forward(self, features: Any) -> Any: ...
    def embedding_bag_configs(self) -> Any: ...
    def is_weighted(self) -> bool: ...


class OtherSharded(ShardedEmbeddingModule[Any, Any, Any, Any]):
    """Somebody's own sharded module."""

    def __init__(self) -> None:
        super().__init__()

    def create_context(self) -> Any: ...
    def input_dist(self, ctx: Any, *args: Any, **kwargs: Any) -> Any: ...
    def compute(self, ctx: Any, dist_input: Any) -> Any: ...
    def output_dist(self, ctx: Any, output: Any) -> Any: ...
    @property
    def unsharded_module_type(self) -> Any: ...


def _made(kind: type[nn.Module], **attributes: Any) -> nn.Module:
    """An instance that has not run its constructor, which would need a GPU or a process group."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.__dict__.update(attributes)
    return module


def _quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_embeddings(nn.Sequential(bags("id")), dtype=torch.int8, inplace=True)[0]


REFUSED_MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quantized": (_quantized, "it is quantized; sparsify the float model"),
    "fused": (
        lambda: FusedEmbeddingBagCollection(
            bags("id").embedding_bag_configs(), torch.optim.SGD, {"lr": 0.1}
        ),
        "a separate table batch; use EmbeddingBagCollection",
    ),
    "itep": (
        lambda: ITEPEmbeddingBagCollection(
            bags("id"), GenericITEPModule({"id": 12}, enable_pruning=False)
        ),
        r"in-training pruning \(ITEP\) moves ids",
    ),
    "pec": (lambda: _made(PECEmbeddingCollection), "PEC collections handle colliding ids"),
    "fully sharded": (
        lambda: _made(
            ShardedEmbeddingBagCollection,
            _env=Mock(spec=ShardingEnv2D, sharding_strategy=ShardingStrategy.FULLY_SHARDED),
        ),
        "fully sharded 2-D parallelism frees weights",
    ),
    "unknown collection": (
        OtherBags,
        "OtherBags.*not a module that dist_sparse knows; EmbeddingBagCollection and",
    ),
    "unknown sharded": (OtherSharded, "OtherSharded.*not a module that dist_sparse knows"),
    "bare table batch": (
        lambda: DenseTableBatchedEmbeddingBagsCodegen([(4, 4)], use_cpu=True),
        "no table names; use TorchRec's",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MODULES)
def test_modules_that_are_refused(case: str) -> None:
    make, message = REFUSED_MODULES[case]
    model = nn.ModuleDict({"odd": make(), "even": bags("id")})
    with pytest.raises(ValueError, match=message) as raised:
        ModelTables(model).locate()
    assert str(raised.value).startswith(
        f"The tables of {type(model['odd']).__name__} at 'odd' can't be sparsified: "
    )
    assert str(raised.value).endswith("It can be left out: exclude=['odd'].")
    assert names(model, exclude="odd") == ["id"]
    with pytest.raises(ValueError, match=message):
        ModelTables(model["odd"]).locate()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            ("2.13.0+cpu", "1.9.0", "1.9.0"),
            r"The torch is wrong: torchrec 1.9.0 needs 2.14.\*; installed: torch 2.13.0",
        ),
        (("2.13.0", "1.8.0", "1.7.0"), r"The fbgemm-gpu is wrong: torchrec 1.8.0 needs 1.8.\*"),
        (("2.12.1", "1.8.0", "1.8.0+cu130"), r"The torch is wrong: torchrec 1.8.0 needs 2.13.\*"),
        (("2.12.1", "1.7.2", "1.7.0"), "knows those of 1.8, 1.9; installed: torch 2.12.1, torchre"),
        (("2.15.0", "1.10.0", "1.10.0"), "To go on at your own risk, set DIST_SPARSE_UNKNOWN_REL"),
        (("2.15.0.dev20260901", "1.10.0a0", "INTERNAL"), "A prerelease or development build may"),
        (("2.14.0a0+gitabc", "1.9.0", "1.9.0"), "A prerelease or development build may read"),
        (("2.14.0", "1.9.0a0", "1.9.0"), "A prerelease or development build may read"),
        (("2.14.0", "1.9.0", "1.9.0rc1"), "A prerelease or development build may read"),
    ],
)
def test_versions_that_do_not_fit_are_refused(versions: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ImportError, match=message):
        check_versions(*versions)


def test_versions_that_fit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_versions("2.13.0+cpu", "1.8.0", "1.8.0")
        check_versions("2.14.1", "1.9.2", "1.9.0+cu130")


def test_unknown_releases_at_ones_own_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_SPARSE_UNKNOWN_RELEASES", "1")
    with pytest.warns(UserWarning, match="knows those of 1.8, 1.9; installed: torch 2.15.0"):
        check_versions("2.15.0", "1.10.0", "1.10.0")
    with pytest.warns(UserWarning, match="A prerelease or development build may read"):
        check_versions("2.15.0.dev20260901", "1.10.0a0", "INTERNAL")
    # Known not to fit: no risk to take.
    with pytest.raises(ImportError, match=r"The torch is wrong: torchrec 1.9.2 needs 2.14.\*"):
        check_versions("2.13.0", "1.9.2", "1.9.0")


def test_a_weight_shared_with_a_dense_module_is_a_table_whichever_comes_first() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 9, bias=False)
            self.emb = nn.Embedding(9, 4)
            self.out.weight = self.emb.weight

    assert [data.name for data in ModelTables(Tied()).locate()] == ["emb"]


def test_a_weight_is_registered_once() -> None:
    model = nn.ModuleDict({"sub": nn.ModuleDict({"emb": nn.Embedding(9, 4)})})
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    with pytest.raises(ValueError, match="'emb' is registered already, as 'sub/emb'"):
        sparsifier.add_model(model["sub"])
    assert list(sparsifier.data_groups) == ["sub/emb"]


def test_dtypes_that_cannot_be_scored_are_refused_before_anything_changes() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": nn.Embedding(9, 4)})
    model["b"].weight = nn.Parameter(
        model["b"].weight.data.to(torch.float8_e4m3fn), requires_grad=False
    )
    sparsifier = DataNormSparsifier()
    with pytest.raises(ValueError, match=r"'b'.*float8"):
        sparsifier.add_model(model)
    assert not sparsifier.data_groups


def test_a_table_that_has_grown_is_refused_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 4)})
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    model["a"] = nn.Embedding(12, 4)
    with pytest.raises(ValueError, match=r"'a' was registered with the shape \(9, 4\)"):
        sparsifier.step()


def test_metadata_that_overlaps_is_refused() -> None:
    rects = ((Rect(0, 0, 5, 4),), (Rect(4, 0, 5, 4),))
    data = ShardedData(
        name="t",
        shape=(9, 4),
        dtype=torch.float32,
        sharding="row_wise",
        ranks=(0, 1),
        tiling=rects,
        shards=(),
    )
    with pytest.raises(ValueError, match=r"'t': the shards rows .* overlap"):
        check_data(data)
    with pytest.raises(ValueError, match="'t': the shards leave a gap"):
        check_data(replace(data, tiling=((Rect(0, 0, 3, 4),), (Rect(4, 0, 5, 4),))))


def test_a_flat_slice_is_no_table() -> None:
    """FSDP with use_orig_params leaves a part of a weight in its place, as a vector."""
    table = nn.EmbeddingBag(8, 4)
    table.weight.data = table.weight.data.flatten()[:16]
    with pytest.raises(ValueError, match=r"weight has the shape \(16,\); must have \(2,\) dim"):
        ModelTables(nn.ModuleDict({"t": table})).locate()

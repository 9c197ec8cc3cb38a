"""The private names of TorchRec and FBGEMM: all present here, all in one list, used in one package."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torchrec")

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

import dist_sparse
from dist_sparse.torchrec.collections import REFUSED, ROW_WRITERS, FbgemmBatch
from dist_sparse.torchrec.kernels import HOST, POOLING, SPARSE_TYPES
from tests.torchrec import contract
from tests.torchrec.contract import (
    NAMES,
    SINCE,
    STORAGE_METHODS,
    is_in,
    methods_that_use,
    missing_names,
)

PACKAGE = Path(dist_sparse.__file__).parent
PARTS = [*NAMES.values(), *(part for added in SINCE.values() for part in added.values())]
READ = {name for part in PARTS for names in part.values() for name in names.split()}
PRIVATE = {name for name in READ if name.startswith("_")}

# Torch has them too, and every wrapper of an optimizer.
SHARED = {"_config", "_in_backward_optimizers", "_optimizer"}


def attributes(file: Path) -> set[str]:
    """Private names that a file reads of objects other than ``self``, by attribute or as text."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name for name in found if str(name).startswith("_") and not str(name).startswith("__")}


def test_the_installed_releases_have_all_names() -> None:
    assert missing_names() == []


def test_a_release_that_lacks_names_fails_with_one_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is missing: attributes, classes, modules, or modules of refused collections."""
    gone = {
        "torchrec.distributed": {
            "embeddingbag.ShardedEmbeddingBagCollection": "_lookups _looks",
            "embeddingbag.Sharded": "_lookups _env",
            "embedding": "_optimizer_classes _optimizer_kinds",
        },
        "torchrec": {"nowhere.Sharded": "_lookups"},
    }
    monkeypatch.setattr(contract, "NAMES", gone)
    monkeypatch.setattr(contract, "REFUSED", {"torchrec.modules.moved": "it moves ids", **REFUSED})
    assert missing_names() == [
        "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection._looks",
        "torchrec.distributed.embeddingbag.Sharded",
        "torchrec.distributed.embedding._optimizer_kinds",
        "torchrec.nowhere.Sharded",
        "torchrec.modules.moved",
    ]


def test_an_attribute_that_a_release_renames_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``__init__`` sets it, so that no class has it: the methods' code is read."""
    assert not hasattr(ShardedEmbeddingBagCollection, "_lookups")
    path = "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection"

    class Renamed:
        def __init__(self) -> None:
            self._looking_up: list[int] = []

        @property
        def fused_optimizer(self) -> None:
            return None

    monkeypatch.setattr(f"{path}", Renamed)
    names = NAMES["torchrec.distributed"]["embeddingbag.ShardedEmbeddingBagCollection"].split()
    lacking = [*names[:-1], *(["_skip_data_parallel_grad_sync"] if is_in("1.9") else [])]
    assert sorted(missing_names()) == [f"{path}.{name}" for name in sorted(lacking)]
    assert names[-1] == "fused_optimizer"


def test_the_list_has_every_private_name_that_is_read() -> None:
    for file in sorted((PACKAGE / "torchrec").glob("*.py")):
        assert attributes(file) <= PRIVATE, file.name


def test_no_other_package_reads_a_private_name() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.parent.name not in ("torchrec", "launch"):
            assert attributes(file) & PRIVATE <= SHARED, file


def test_every_known_optimizer_is_fbgemms() -> None:
    """A name that FBGEMM does not have would be dead, or misspelled."""
    assert set(EmbOptimType.__members__) >= ROW_WRITERS


def test_numbers_are_those_of_fbgemms_enums() -> None:
    assert EmbeddingLocation.HOST.value == HOST
    assert {name: SparseType(name).as_int() for name in SPARSE_TYPES} == SPARSE_TYPES
    assert {name: PoolingMode[name.upper()].value for name in POOLING} == POOLING


def test_no_new_method_of_fbgemms_writes_rows() -> None:
    """The enforcer knows these methods. One that a release adds may write rows that no hook
    announces: read it before adding it here."""
    storage = {"weights_dev", "weights_uvm", "split_embedding_weights"}
    known = [methods for release, methods in STORAGE_METHODS.items() if is_in(release)]
    assert methods_that_use(SplitTableBatchedEmbeddingBagsCodegen, storage) == set().union(*known)


class Matrix:
    def numel(self) -> int:
        return 8


@pytest.mark.parametrize(
    "optimizer",
    ["EMAINPLACE_ROWWISE_ADAGRAD", "ENSEMBLE_ROWWISE_ADAGRAD", "OPTIMIZER_OF_NEXT_YEAR"],
)
def test_an_optimizer_that_may_write_any_row_is_refused(optimizer: str) -> None:
    batch = SimpleNamespace(
        pooling_mode=SimpleNamespace(name="SUM"),
        optimizer=SimpleNamespace(name=optimizer),
        weights_dev=Matrix(),
        weights_host=Matrix(),
        weights_uvm=Matrix(),
    )
    tables = SimpleNamespace(embedding_tables=[SimpleNamespace(name="user")])
    kernel = SimpleNamespace(emb_module=batch, _config=tables, _feature_table_map=[0])
    with pytest.raises(ValueError, match=rf"\['user'\] have the fused optimizer {optimizer}, whi"):
        FbgemmBatch(kernel)

"""Within a trial a model has what an artifact would serve, on every sharding; afterwards its own
weights again."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from dist_sparse import DataNormSparsifier, MaskEnforcer, export, load_served
from dist_sparse.extras.frontier import frontier, serving
from dist_sparse.planning.candidates import BY_COLUMN, Candidate
from dist_sparse.serving.encodings import decode, encode
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import Cell, build, cells, gathered, plain
from tests.dist.copies import build_copies, copied_cells
from tests.dist.enforcing import optimizer_of
from tests.dist.plugin import on_ranks
from tests.serving.stored import dense

ROWS = Candidate(dtype="int8", levels={"user": 0.7, "word": 0.5})
MORE = Candidate(dtype="int4", levels={"user": 0.8, "item": 0.9})
HALVES = Candidate(dtype="fp16", levels={"word": 0.6})
COLUMNS = Candidate(dtype=BY_COLUMN, levels={"user": 0.7})
TRIED = (ROWS, MORE, HALVES, COLUMNS)
NAMES = ("column_wise_uneven", "two_shards", "mixed", "row_wise_fp16")
FEATURES = ["user_id", "item_id", "last_item_id", "genre", "query"]


def artifact(model: nn.Module, candidate: Candidate, path: Path) -> dict[str, Tensor]:
    """What is served of a model that is sparsified as the candidate says, in one process."""
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape="row", norm="L2")
    sparsifier.add_model(
        model, config={name: {"sparsity_level": level} for name, level in candidate.levels.items()}
    )
    sparsifier.step()
    form: Any = {"dtype": candidate.dtype}
    if candidate.dtype == BY_COLUMN:
        form = {"dtype": "int4", "scale": "column"}
    export(model, sparsifier, path, **form)
    return dense(path)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], **close: Any) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name].float(), weight.float(), **{"rtol": 0, "atol": 0, **close}
        )


def tables_of(cell: Cell) -> str:
    return f"{cell.bags} {cell.data_type}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Tensor]]]:
    """What one process exports of the unsharded models."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    for cell in (cells(2)[name] for name in NAMES):
        if tables_of(cell) not in found:
            path = tmp_path_factory.mktemp("served")
            some = enumerate(TRIED)
            found[tables_of(cell)] = [
                artifact(plain(cell), each, path / str(i)) for i, each in some
            ]
    return found


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_what_an_artifact_serves(name: str, served: dict[str, list[dict[str, Tensor]]]) -> None:
    cell = cells(2)[name]
    model = build(cell)
    before = gathered(model)
    # The table's own dtype rounds once more.
    half = torch.finfo(torch.float16).eps if "fp16" in name else 0.0
    for candidate, expected in zip(TRIED, served[tables_of(cell)], strict=True):
        with serving(model, candidate):
            same(gathered(model), expected, rtol=half)
        same(gathered(model), before)


@pytest.mark.parametrize("dtype", ["codes of 4", "codes of 8"])
def test_codes_are_what_quantize_would_export(dtype: str, tmp_path: Path) -> None:
    """Codes that nothing was trained through, and int4 of the table that is too small for them."""
    quantize = pytest.importorskip("dist_sparse.extras.codes").quantize
    torch.manual_seed(0)
    model = nn.ModuleDict({"large": nn.Embedding(20_000, 8), "small": nn.Embedding(30, 8)})
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with serving(model, Candidate(dtype=dtype)):
        tried = {name: weight.clone() for name, weight in model.state_dict().items()}
    handle = quantize(model, [], codes={"large": 8 // int(dtype[-1])}, begin=0, end=0)
    handle.step()
    export(model, handle, tmp_path / "served", dtype="int4")
    served = load_served(tmp_path / "served")
    for name in model:
        ids = torch.arange(len(before[f"{name}.weight"]))
        assert torch.equal(tried[f"{name}.weight"], served[name](ids)), name
    same(model.state_dict(), before)


@pytest.mark.parametrize("columns", [1.0, 0.5])
def test_codes_of_rotated_columns_lose_no_more_than_codes_of_all(columns: float) -> None:
    """Half of the columns hold everything, so that the same bytes stand for less."""
    pytest.importorskip("dist_sparse.extras.codes")
    pytest.importorskip("dist_sparse.extras.rotation")
    torch.manual_seed(0)
    model = nn.EmbeddingBag.from_pretrained(torch.randn(20_000, 4) @ torch.randn(4, 8))
    before = model.weight.clone()
    groups = () if columns == 1 else (("weight",),)
    with serving(model, Candidate(dtype="codes of 4", columns=columns, groups=groups)):
        error = (model.weight - before).square().mean() / before.square().mean()
    assert 0 < error < 0.2


@on_ranks(2)
@pytest.mark.parametrize("name", ["ec_row_wise", "ec_column_wise"])
def test_rotated_columns(name: str, tmp_path: Path) -> None:
    """A pair that meets in dot products, as it is exported; and a table alone, turned back as its
    hook turns outputs back."""
    rotate = pytest.importorskip("dist_sparse.extras.rotation").rotate
    model = build(cells(2)[name])
    groups, columns = (("user", "item"), ("word",)), 0.25
    with serving(model, Candidate(dtype="int8", columns=columns, groups=groups)):
        tried = gathered(model)
    sparsifier = DataNormSparsifier(sparsity_level=1 - columns, sparse_block_shape="col", norm="L2")
    sparsifier.add_model(model, include=["user", "item", "word"])
    optimizer = torch.optim.SGD([model.module.over.weight, model.module.over.bias], lr=0.1)
    with MaskEnforcer(sparsifier).attach(optimizer):
        rotate(sparsifier, [list(group) for group in groups])
        sparsifier.step()
        real = {
            table: decode(encode(rows, "int8"), rows.shape[1])
            for table, rows in gathered(model).items()
        }
    basis = model.module.get_buffer("rotation_of_word")
    turned = real["word"] @ basis.T
    assert (real["user"][:, 4:] == 0).all() and (real["word"] != turned).any()
    same(tried, real | {"word": turned}, atol=1e-6)


def look_up_users(model: nn.Module, ids: Tensor) -> None:
    """A training step over these users."""
    lengths = torch.zeros(len(FEATURES), dtype=torch.int64)
    lengths[FEATURES.index("user_id")] = len(ids)
    model(KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("attached", [False, True])
def test_rows_by_what_adagrad_has_summed(attached: bool) -> None:
    """A fused Adagrad trains all tables that lose rows: those that were never looked up are removed
    first. Also while an enforcer of somebody else masks them."""
    cell = cells(2)["row_wise"]
    model = build(cell)
    ids = torch.tensor([5, 20, 36])
    look_up_users(model, ids)
    sparsifier = DataNormSparsifier(sparsity_level=0.0)
    sparsifier.add_model(model)
    enforcer = MaskEnforcer(sparsifier)
    if attached:
        enforcer.attach(optimizer_of(model))
    before = gathered(model)
    with serving(model, Candidate(levels={"user": 1 - 3 / 37})):
        left = gathered(model)["user"].any(1).nonzero().flatten()
    enforcer.detach()
    assert (
        left.tolist() == ids.tolist()
        and len(set(ids.tolist()) & set(largest(before["user"], 3))) < 3
    )
    same(gathered(model), before)


@on_ranks(2)
def test_removed_weights_are_tried_as_zeros() -> None:
    """What an optimizer has revived of them since the last forward no forward reads, so no trial
    scores it."""
    model = build(cells(2)["row_wise"])
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model)
    with MaskEnforcer(sparsifier).attach(optimizer_of(model)):
        sparsifier.step()
        look_up_users(model, torch.tensor([5, 20, 36]))
        assert sparsifier.count_revived()["user"]
        with serving(model, Candidate(levels={"user": 0.1})):
            assert not any(sparsifier.count_revived().values())
        assert not any(sparsifier.count_revived().values())


def largest(weight: Tensor, count: int) -> list[int]:
    return weight.square().sum(1).topk(count).indices.tolist()


def test_lookups_of_codes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not read the weights that a trial changes."""
    coded = pytest.importorskip("dist_sparse.extras.codes.coded_training")
    monkeypatch.setattr(coded, "LEAST_ROWS", 1)
    model = nn.EmbeddingBag(40, 8)
    handle = coded.quantize(model, [], codes=2, begin=0)
    with (
        pytest.raises(ValueError, match="Table 'weight' has codes: call detach"),
        serving(model, Candidate(dtype="int4")),
    ):
        pass
    calls: list[Any] = []
    with pytest.raises(ValueError, match="Table 'weight' has codes: call detach"):
        frontier(model, calls.append, budgets=[0.5])
    assert not calls
    handle.detach()
    with serving(model, Candidate(dtype="int4")):
        pass


@pytest.mark.skipif(
    find_spec("dist_sparse.extras.rotation") is None, reason="the extra rotation was deleted"
)
@on_ranks(2)
def test_errors() -> None:
    """Refused on every rank before anything is written; an error within the block puts the weights
    back too."""
    model, rank = build(cells(2)["mixed"]), dist.get_rank()
    before = gathered(model)
    for candidate, message in (
        (
            Candidate(dtype="int4" if rank else "int8"),
            r"candidate: dtype is int4 on rank 1 and int8 on rank 0",
        ),
        (
            Candidate(levels={"users": 0.5}),
            r"\['users'\] of the candidate are not among the model's tables \['item'",
        ),
        (
            Candidate(columns=0.5),
            "A smaller dense table, fp32, 50.0% of the columns, dense from the start, can't be",
        ),
        (
            Candidate(columns=0.5, groups=(("user", "item"),)),
            r"can't be rotated together: widths 8 and 16",
        ),
    ):
        with pytest.raises(ValueError, match=message), serving(model, candidate):
            raise AssertionError("entered")
    with pytest.raises(KeyError), serving(model, Candidate(dtype="int4", levels={"user": 0.5})):
        assert not (gathered(model)["user"] == before["user"]).all()
        raise KeyError
    located = {data.name: data for data in ModelTables(model).locate()}
    if rank == 1:
        located["word"].shards[0].tensor[3, 4] = torch.inf
    broken = gathered(model)
    candidate = Candidate(dtype="int8", columns=0.5, groups=(("user",),))
    message = r"rank 1: ValueError: Table 'word' can't be exported.*inf"
    with pytest.raises(ValueError, match=message), serving(model, candidate):
        raise AssertionError("entered")
    same(gathered(model), broken)


@on_ranks(2)
def test_a_frontier(tmp_path: Path) -> None:
    """The same on every rank; rank 0 writes; ranks that measure otherwise are an error."""
    cell = cells(2)["mixed"]
    model, rank = build(cell), dist.get_rank()
    before = gathered(model)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {
            "error": sum(
                float((full - before[name]).abs().sum()) for name, full in gathered(model).items()
            )
        }

    options = {
        **{
            "budgets": [0.3],
            "methods": ["bits", "rows", "rotated"],
            "rotate": [["user", "tiny"]],
            "protect": ["item", "tiny"],
        },
        "lower_is_better": ["error"],
    }
    result = frontier(model, evaluate, out=tmp_path, **options)  # type: ignore[arg-type]
    everyone: list[object] = [None, None]
    dist.all_gather_object(everyone, str(result))
    assert everyone[0] == everyone[1] and {point.method for point in result.points} == {
        "bits",
        "rows",
        "rotated",
    }
    assert {"user", "word"} == {name for each in result.trials for name in each.candidate.levels}
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert len(lines) == len(result.trials)
    with pytest.raises(ValueError, match=r"metrics.*on rank 1 and .* on rank 0"):
        frontier(model, lambda model: {"error": float(rank)}, **options)  # type: ignore[arg-type]
    assert all(torch.equal(full, before[name]) for name, full in gathered(model).items())


@on_ranks(4)
def test_copies_cut_by_columns() -> None:
    """2-D parallelism: rows can't be put together, since each copy has its own."""
    model = build_copies(copied_cells()["column_wise"])
    with (
        pytest.raises(ValueError, match="2-D parallelism trains copies"),
        serving(model, Candidate(dtype="int8")),
    ):
        raise AssertionError("entered")

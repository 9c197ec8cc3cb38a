"""Is bad input refused on every rank, within seconds, with nothing changed? One rank is bad, each in turn. (C6, C7)

Each case makes a good sparsifier, spoils something on the bad rank, and says which words the error must hold. The frame
checks that every rank raises them, that masks, weights and configs are the same bit for bit, and that a good step works
once the fault is mended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import ROW, BaseDataSparsifier, DataNormSparsifier, ScoreSparsifier
from dist_sparse.groups import set_timeout
from tests.dist.cells import LOCAL, Cell, build, cells
from tests.dist.cells import gathered as gathered_model
from tests.dist.harness import run_cases, run_ranks
from tests.dist.pieces import (
    Tiling,
    by_cols,
    by_rows,
    check_outcomes,
    gathered,
    local_tensors,
    quiet,
    sharded,
    snapshot,
    write,
)
from tests.oracle import oracle_mask

pytestmark = pytest.mark.dist

SOON = 8.0  # seconds; the library's own timeout is longer, so that waiting for it shows
TIMEOUT = 25.0
ROWS, COLS = 9, 12
ROWWISE = by_rows(ROWS, COLS, 4)
COLWISE = by_cols(ROWS, COLS, 5)


def weights(seed: int = 0, rows: int = ROWS, cols: int = COLS) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def is_bad(bad: int) -> bool:
    return dist.get_rank() == bad


def raised_by(call: Callable[[], Any]) -> str:
    """The message of the ValueError that ``call`` raises soon."""
    start = time.monotonic()
    with pytest.raises(ValueError) as raised:
        call()
    seconds = time.monotonic() - start
    assert seconds < SOON, f"after {seconds:.1f} s: {raised.value}"
    return str(raised.value)


@dataclass
class Scene:
    """Tables ``a`` and ``b`` under a sparsifier that has taken a good step.

    Args:
        tiling: of table ``a``; ``b`` is row-wise.
        config: of the sparsifier.
        kind: of sparsifier.
        extra: more data, by name.
    """

    tiling: Tiling = field(default_factory=lambda: ROWWISE)
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: type[BaseDataSparsifier] = DataNormSparsifier
    extra: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.sparsifier = self.kind(**self.config)
        self.tensors: dict[str, Any] = {
            "a": sharded(weights(0).to(self.dtype), self.tiling),
            "b": sharded(weights(1), ROWWISE),
            **self.extra,
        }
        for name, tensor in self.tensors.items():
            self.sparsifier.add_data(name, tensor)
        self.sparsifier.step()

    def put(self, name: str, row: int, col: int, value: float) -> None:
        """Writes one element of a table, if this rank holds it."""
        for (top, left), local in local_tensors(self.tensors[name]):
            if 0 <= row - top < local.shape[0] and 0 <= col - left < local.shape[1]:
                local[row - top, col - left] = value

    def refused(self, *words: str, mend: Callable[[], Any]) -> str:
        """Takes a step that must be refused, mends the fault, and takes a good one."""
        before = snapshot(self.sparsifier, self.tensors)
        message = raised_by(self.sparsifier.step)
        for word in words:
            assert re.search(word, message), f"{word!r} is not in: {message}"
        assert snapshot(self.sparsifier, self.tensors) == before, "something has changed"
        mend()
        self.good()
        return message

    def good(self) -> None:
        """A good step, after all weights have been written anew."""
        full = {}
        for seed, (name, tensor) in enumerate(self.tensors.items()):
            write(tensor, weights(10 + seed, *tensor.shape).to(tensor.dtype))
            full[name] = gathered(tensor)
        self.sparsifier.step()
        self.sparsifier.audit()
        if isinstance(self.sparsifier, DataNormSparsifier):
            for name, whole in full.items():
                config = self.sparsifier.data_groups[name]
                level, block, zeros = (
                    config[key] for key in ("sparsity_level", "sparse_block_shape", "zeros_per_block")
                )
                want = oracle_mask(whole, level, block, zeros, self.sparsifier.norm)
                assert torch.equal(self.sparsifier.full_mask(name), want), name


# -- at step(): configs, names and shapes that differ ------------------------------------------------------------------


def other_config(bad: int, key: str, value: Any) -> None:
    scene = Scene()
    good = scene.sparsifier.data_groups["a"][key]
    if is_bad(bad):
        scene.sparsifier.data_groups["a"][key] = value

    def mend() -> None:
        scene.sparsifier.data_groups["a"][key] = good

    message = scene.refused(
        "config of table 'a'", "rank 0", "rank 1", re.escape(str(value).strip("(),")[:3]), mend=mend
    )
    assert "table 'b'" not in message


def other_level(bad: int) -> None:
    other_config(bad, "sparsity_level", 0.75)


def other_block(bad: int) -> None:
    other_config(bad, "sparse_block_shape", (2, 2))


def other_zeros(bad: int) -> None:
    other_config(bad, "zeros_per_block", 2)


def unknown_level(bad: int) -> None:
    scene = Scene()
    if is_bad(bad):
        scene.sparsifier.data_groups["a"]["sparsity_level"] = "half"

    def mend() -> None:
        scene.sparsifier.data_groups["a"]["sparsity_level"] = 0.5

    scene.refused(f"rank {bad}: ValueError", "sparsity_level='half' of 'a'", "must be a number", mend=mend)


def other_norm(bad: int) -> None:
    scene = Scene()
    if is_bad(bad):
        scene.sparsifier.norm = "L2"

    def mend() -> None:
        scene.sparsifier.norm = "L1"

    scene.refused("config of table 'a'", "L1", "L2", "rank 1", mend=mend)


def other_repair(bad: int) -> None:
    """With drifted replicas, a rank that raised would leave one that repairs waiting."""
    scene = Scene(extra={"twin": _dtensor()})
    if is_bad(bad):
        scene.sparsifier.repair = "broadcast"
        scene.tensors["twin"].to_local().add_(1.0)

    def mend() -> None:
        scene.sparsifier.repair = "raise"

    scene.refused("sparsifier.repair is", "broadcast", "rank 1", mend=mend)


def other_names(bad: int) -> None:
    """The bad rank calls one table otherwise. Once they have other names, ranks can't be mended: they start anew."""
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), ROWWISE), "typo" if is_bad(bad) else "b": sharded(weights(1), ROWWISE)}
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "table 'b'" in message and "table 'typo'" in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before
    Scene().good()


def more_names(bad: int) -> None:
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), ROWWISE)} | ({"b": sharded(weights(1), ROWWISE)} if is_bad(bad) else {})
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "table 'b'" in message and "nothing on rank" in message, message
    assert snapshot(sparsifier, tensors) == before
    Scene().good()


def other_order(bad: int) -> None:
    """No fault: the order in which tables were added does not matter."""
    sparsifier = DataNormSparsifier()
    names = ["a", "b"] if not is_bad(bad) else ["b", "a"]
    tensors = {name: sharded(weights(ord(name)), ROWWISE) for name in names}
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    full = {name: gathered(tensors[name]) for name in ("a", "b")}
    sparsifier.data_groups["a"]["sparsity_level"] = 0.8
    sparsifier.step()
    counts = {stats.name: stats.removed_blocks for stats in sparsifier.table_stats()}
    for name, level in (("a", 0.8), ("b", 0.5)):
        want = oracle_mask(full[name], level)
        assert torch.equal(sparsifier.full_mask(name), want), name
        assert counts[name] == int((want == 0).sum()) // 4
    sparsifier.audit()


def other_shape(bad: int) -> None:
    rows = ROWS + 1 if is_bad(bad) else ROWS
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0, rows), by_rows(rows, COLS, 4))}
    sparsifier.add_data("a", tensors["a"])
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "shape of table 'a'" in message and str(ROWS + 1) in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before


def other_tiling(bad: int) -> None:
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), by_rows(ROWS, COLS, 5 if is_bad(bad) else 4))}
    sparsifier.add_data("a", tensors["a"])
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "sharding of table 'a'" in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before


# -- at step(): values -------------------------------------------------------------------------------------------------


def not_finite(bad: int, value: float, row: int, col: int, scene: Scene) -> None:
    """``(row, col)`` lies on rank 0; the mirror of it on rank 1 is the last row and column less these."""
    row, col = (row, col) if bad == 0 else (ROWS - 1 - row, COLS - 1 - col)
    scene.put("a", row, col, value)
    scene.refused(
        f"rank {bad}: ValueError: Table 'a'", "row [0-9]+, column [0-9]+", "must be finite", mend=lambda: None
    )


def nan_row_wise(bad: int) -> None:
    not_finite(bad, torch.nan, 1, 2, Scene())


def nan_in_a_whole_row(bad: int) -> None:
    not_finite(bad, torch.nan, 1, 2, Scene(config={"sparse_block_shape": (1, ROW)}))


def inf_row_wise(bad: int) -> None:
    not_finite(bad, -torch.inf, 2, 2, Scene(config={"norm": "L2"}))


def inf_by_element(bad: int) -> None:
    not_finite(bad, torch.inf, 2, 2, Scene(config={"sparse_block_shape": (1, 1)}))


def inf_fp16(bad: int) -> None:
    not_finite(bad, torch.inf, 2, 2, Scene(dtype=torch.float16))


def nan_column_wise(bad: int) -> None:
    """In a block that is cut by a column border: the partial sums are NaN."""
    not_finite(bad, torch.nan, 3, 4, Scene(COLWISE, {"sparse_block_shape": (1, ROW)}))


def nan_in_a_slab(bad: int) -> None:
    """In a block that is cut by a row border, and loses some elements only: the element scores cross ranks."""
    not_finite(bad, torch.nan, 3, 1, Scene(ROWWISE, {"sparse_block_shape": (6, 4), "zeros_per_block": 5}))


def overflow_of_the_whole(bad: int) -> None:
    """Each part of a cut row is a good float32, their sum is none. No rank is at fault, so none is named."""
    scene = Scene(COLWISE, {"sparse_block_shape": (1, ROW), "norm": "L2"})
    for col in (1, COLS - 2):
        scene.put("a", 4, col, (2.5e38 * COLS) ** 0.5)
    scene.refused("Table 'a'", "float32", "must be finite", mend=lambda: None)


def no_overflow_alone(bad: int) -> None:
    """The control: one part of that size is fine."""
    scene = Scene(COLWISE, {"sparse_block_shape": (1, ROW), "norm": "L2"})
    scene.put("a", 4, 1, (2.5e38 * COLS) ** 0.5)
    scene.sparsifier.step()
    scene.good()


def nan_in_plain_data(bad: int) -> None:
    """Plain data of one rank fails: the others' plain masks, made already, go back with all the rest."""
    scene = Scene()
    plain = weights(5)
    scene.sparsifier.add_data("mine", plain)
    scene.sparsifier.step()
    scene.sparsifier.data_groups["mine"]["sparsity_level"] = 0.9
    mask = scene.sparsifier.get_mask("mine")
    kept = mask.clone()
    if is_bad(bad):
        plain[0, 0] = torch.nan
    before = snapshot(scene.sparsifier, scene.tensors)
    message = raised_by(scene.sparsifier.step)
    assert f"rank {bad}: ValueError: Table 'mine'" in message, message
    assert snapshot(scene.sparsifier, scene.tensors) == before
    assert scene.sparsifier.get_mask("mine") is mask and torch.equal(mask, kept)
    plain[0, 0] = 1.0
    scene.good()
    assert int((mask == 0).sum()) != int((kept == 0).sum())


def nan_in_a_local_table(bad: int) -> None:
    """A table that every rank has for itself, registered before those that lie over the ranks."""
    sparsifier = DataNormSparsifier()
    local = nn.ModuleDict({"own": nn.Embedding(8, 4)})
    sparsifier.add_model(local)
    tensors = {"a": sharded(weights(0), ROWWISE)}
    sparsifier.add_data("a", tensors["a"])
    sparsifier.step()
    if is_bad(bad):
        local["own"].weight.data[1, 1] = torch.nan
    masks = sparsifier.get_mask("own")
    before = gathered(tensors["a"]), sparsifier.local_masks("a")[0][1]
    message = raised_by(sparsifier.step)
    assert f"rank {bad}: ValueError: Table 'own'" in message, message
    assert torch.equal(gathered(tensors["a"]), before[0])
    assert torch.equal(sparsifier.local_masks("a")[0][1], before[1])
    assert torch.equal(sparsifier.get_mask("own"), masks)
    local["own"].weight.data[1, 1] = 1.0
    sparsifier.step()


# -- at step(): replicas -----------------------------------------------------------------------------------------------


def _dtensor() -> DTensor:
    return distribute_tensor(weights(3), DeviceMesh("cpu", [0, 1]), [Replicate()], src_data_rank=None)


def drifted(bad: int) -> None:
    """One element of one replica, by as little as can be."""
    scene = Scene(extra={"twin": _dtensor()})
    local = scene.tensors["twin"].to_local()
    if is_bad(bad):
        kept = local[5].nonzero()[0]
        local[5, kept] = torch.nextafter(local[5, kept], torch.tensor(9.0))
    message = scene.refused(r"drifted", r"twin rows \[0, 9\).*on ranks \[1\]", "repair", mend=lambda: None)
    assert "a rows" not in message and "b rows" not in message


def drifted_in_sign_of_zero(bad: int) -> None:
    scene = Scene(extra={"twin": _dtensor()})
    local = scene.tensors["twin"].to_local()
    gone = (scene.sparsifier.get_mask("twin") == 0).nonzero()[0].tolist()
    if is_bad(bad):
        local[gone[0], gone[1]] = -0.0
    scene.refused("drifted", r"twin .*on ranks \[1\]", mend=lambda: None)


def drifted_table(bad: int) -> None:
    """Data-parallel tables of a model."""
    cell = cells(2)["data_parallel"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    sparsifier.step()
    table = sparsifier.get_data("item")
    if is_bad(bad):
        table[7, 3] += 1
    before = {name: (sparsifier.get_data(name).clone(), sparsifier.get_mask(name)) for name in sparsifier.data_groups}
    message = raised_by(sparsifier.step)
    assert re.search(r"drifted.*item rows.*on ranks \[1\]", message) and "user rows" not in message, message
    for name, (weight, mask) in before.items():
        assert torch.equal(sparsifier.get_data(name), weight) and torch.equal(sparsifier.get_mask(name), mask)
    good = [None, None]
    dist.all_gather_object(good, before["item"][0])
    sparsifier.repair = "broadcast"
    sparsifier.step()
    full = gathered_model(model)["item"]
    want = oracle_mask(good[0], 0.5)
    assert torch.equal(sparsifier.get_mask("item"), want)
    assert torch.equal(sparsifier.get_data("item"), good[0] * want)
    assert torch.equal(full, sparsifier.get_data("item"))
    sparsifier.audit()


def drifted_dense(bad: int) -> None:
    """Parameters that DDP replicates; two of them at once, one of them 1-D."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(net, dense=True)
    sparsifier.step()
    if is_bad(bad):
        net.module[0].bias.data[2] = 3.0
        net.module[1].weight.data[0, 0] = 3.0
    message = raised_by(sparsifier.step)
    assert re.search(r"0/bias rows .*on ranks \[1\]", message) and "1/weight rows" in message, message
    assert "0/weight rows" not in message
    good = [None, None]
    dist.all_gather_object(good, net.module[1].weight.detach().clone())
    sparsifier.repair = "broadcast"
    sparsifier.step()
    assert torch.equal(net.module[1].weight, good[0] * sparsifier.get_mask("1/weight"))


def not_finite_replica(bad: int) -> None:
    """A replica that is NaN on one rank has drifted too, but what is said first is that it is not finite."""
    scene = Scene(extra={"twin": _dtensor()})
    if is_bad(bad):
        scene.tensors["twin"].to_local()[2, 2] = torch.nan
    scene.refused(f"rank {bad}: ValueError: Table 'twin'", "finite", mend=lambda: None)


# -- at step(): what users write ---------------------------------------------------------------------------------------


class Moody(BaseDataSparsifier):
    """Removes negative weights; raises when it is told to, having edited the mask already."""

    mood = ""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name).copy_(data >= 0)
        if self.mood and name == "b":
            raise KeyError(self.mood)


class MoodyScore(ScoreSparsifier):
    mood = ""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        if self.mood == "negative":
            return data
        if self.mood == "shape":
            return data[:, :1].abs()
        if self.mood:
            raise OSError(self.mood)
        return data.abs()


def moody(bad: int, kind: type[Any], mood: str, *words: str) -> None:
    scene = Scene(kind=kind)
    if is_bad(bad):
        scene.sparsifier.mood = mood

    def mend() -> None:
        scene.sparsifier.mood = ""

    scene.refused(f"rank {bad}: ", *words, mend=mend)


def raises_in_update_mask(bad: int) -> None:
    moody(bad, Moody, "not today", "KeyError", "not today")


def raises_in_score(bad: int) -> None:
    moody(bad, MoodyScore, "disk is full", "OSError", "disk is full")


def negative_scores(bad: int) -> None:
    moody(bad, MoodyScore, "negative", "Table 'a'", "not negative")


def scores_of_another_shape(bad: int) -> None:
    moody(bad, MoodyScore, "shape", "score", "shape")


# -- zeros_per_block over a column border ------------------------------------------------------------------------------


def zeros_over_a_column_border(bad: int) -> None:
    scene = Scene(COLWISE)
    for key, value in (("sparse_block_shape", (1, 2)), ("zeros_per_block", 1)):
        scene.sparsifier.data_groups["a"][key] = value

    def mend() -> None:
        scene.sparsifier.data_groups["a"]["sparse_block_shape"] = (2, 1)

    scene.refused("Table 'a'", "zeros_per_block=1", r"column border.* \[5\]", r"fit: \[1\]", mend=mend)


# -- at add_model() ----------------------------------------------------------------------------------------------------


def model_case(words: list[str], **arguments: Any) -> Callable[[int], None]:
    """add_model() with bad arguments on the bad rank and none on the other."""

    def case(bad: int) -> None:
        cell = cells(2)["mixed"]
        model = build(cell)
        sparsifier = DataNormSparsifier()
        sparsifier.add_data("before", weights(7))
        refused_model(sparsifier, model, cell, arguments if is_bad(bad) else {}, [w.format(bad=bad) for w in words])

    return case


def refused_model(sparsifier: Any, model: nn.Module, cell: Cell, arguments: Any, words: list[str]) -> None:
    full = gathered_model(model)
    before = repr(sparsifier.data_groups), repr(sparsifier.defaults)
    message = raised_by(lambda: sparsifier.add_model(arguments.pop("model", model), **arguments))
    for word in words:
        assert re.search(word, message), f"{word!r} is not in: {message}"
    assert (repr(sparsifier.data_groups), repr(sparsifier.defaults)) == before
    assert all(torch.equal(full[name], weight) for name, weight in gathered_model(model).items())
    sparsifier.step()  # there is nothing sharded yet
    names = sparsifier.add_model(model, config={"sparsity_level": 0.25})
    assert names == [table.name for table in cell.tables]
    sparsifier.step()
    for name in names:
        assert torch.equal(sparsifier.full_mask(name), oracle_mask(full[name], 0.25)), name


def a_name_twice(bad: int) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    if is_bad(bad):
        sparsifier.add_data("item", weights(7))
    message = raised_by(lambda: sparsifier.add_model(model))
    assert re.search(rf"rank {bad}: ValueError: The names \['item'\] are registered already", message), message
    assert list(sparsifier.data_groups) == (["item"] if is_bad(bad) else [])
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    message = raised_by(lambda: sparsifier.add_model(model))  # on all ranks: the table is known under this module
    assert "registered already" in message


def a_name_twice_in_add_data(bad: int) -> None:
    """add_data never communicates: it raises where it is called, and the others go on when that rank does."""
    scene = Scene()
    if is_bad(bad):
        message = raised_by(lambda: scene.sparsifier.add_data("a", scene.tensors["b"]))
        assert "'a' is registered already" in message
        message = raised_by(lambda: scene.sparsifier.add_data("b", weights(1)))
        assert "'b' belongs to a sharded table" in message
        message = raised_by(lambda: scene.sparsifier.add_data("c", scene.tensors["b"], sparse_block_shape=(0, 2)))
        assert "sparse_block_shape=(0, 2) of 'c'" in message
        message = raised_by(lambda: scene.sparsifier.add_data("c", scene.tensors["b"], zeros_per_block=5))
        assert "zeros_per_block=5 of 'c'" in message
    scene.good()


def a_model_without_tables(bad: int) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    arguments = {"model": nn.Linear(2, 2)} if is_bad(bad) else {}
    refused_model(sparsifier, model, cell, arguments, [f"rank {bad}: ValueError: Linear holds no tables"])


def a_local_model(bad: int) -> None:
    """A model that every rank has for itself: the ranks must agree all the same."""
    model = nn.ModuleDict({"own": nn.Embedding(8, 4)})
    sparsifier = DataNormSparsifier()
    message = raised_by(lambda: sparsifier.add_model(model, include="nope" if is_bad(bad) else None))
    assert f"rank {bad}: ValueError: Invalid include pattern 'nope'" in message, message
    assert sparsifier.add_model(model) == ["own"]


# -- groups of ranks that overlap --------------------------------------------------------------------------------------


def two_groups(case: tuple[int, str]) -> None:
    """Table ``pair`` lies over ranks 0 and 1, ``all`` over four. What is wrong with one of them, all four must hear."""
    bad, table = case
    sparsifier = DataNormSparsifier()
    tensors: dict[str, Any] = {"all": sharded(weights(0), by_rows(ROWS, COLS, 2, 4, 7))}
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        tensors["pair"] = distribute_tensor(weights(1), mesh, [Replicate()], src_data_rank=None)
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    sparsifier.step()
    if is_bad(bad):
        local_tensors(tensors[table.removeprefix("drifted ")])[0][1][0, 1] = 7.0 if "drifted" in table else torch.nan
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert ("drifted" in message) if "drifted" in table else (f"rank {bad}: ValueError: Table '{table}'" in message)
    assert snapshot(sparsifier, tensors) == before
    for name, tensor in tensors.items():
        write(tensor, weights(ord(name[0])))
    sparsifier.step()
    for name in tensors:
        assert torch.equal(sparsifier.full_mask(name), oracle_mask(weights(ord(name[0])), 0.5)), name
    sparsifier.audit()


GROUP_CASES = [(0, "pair"), (1, "pair"), (0, "all"), (3, "all"), (1, "drifted pair")]


STEP_CASES = (
    other_level,
    other_block,
    other_zeros,
    unknown_level,
    other_norm,
    other_repair,
    other_names,
    more_names,
    other_order,
    other_shape,
    other_tiling,
    nan_row_wise,
    nan_in_a_whole_row,
    inf_row_wise,
    inf_by_element,
    inf_fp16,
    nan_column_wise,
    nan_in_a_slab,
    overflow_of_the_whole,
    no_overflow_alone,
    nan_in_plain_data,
    nan_in_a_local_table,
    drifted,
    drifted_in_sign_of_zero,
    drifted_table,
    drifted_dense,
    not_finite_replica,
    raises_in_update_mask,
    raises_in_score,
    negative_scores,
    scores_of_another_shape,
    zeros_over_a_column_border,
    a_name_twice,
    a_name_twice_in_add_data,
    a_model_without_tables,
    a_local_model,
)
MODEL_CASES = {
    "include_matches_nothing": model_case(["rank {bad}", "include pattern 'itme'", "user"], include="itme"),
    "exclude_matches_nothing": model_case(["rank {bad}", "exclude pattern 'itme'", "user"], exclude=["item", "itme"]),
    "include_and_exclude_leave_nothing": model_case(["rank {bad}", "leave none of the tables"], exclude="*"),
    "unknown_key": model_case(["rank {bad}", r"unknown keys \['sparsity'\]", "known are"], config={"sparsity": 0.5}),
    "unknown_glob": model_case(["rank {bad}", "'itme' matches no table"], config={"itme": {"sparsity_level": 0.5}}),
    "mixed_config": model_case(["rank {bad}", "not both"], config={"item": {}, "sparsity_level": 0.5}),
    "not_a_block": model_case(
        ["rank {bad}", r"sparse_block_shape=\(0, 4\) of 'user'", "two positive ints"],
        config={"sparse_block_shape": (0, 4)},
    ),
    "row_of_rows": model_case(
        ["rank {bad}", r"'ROW', 4\) of 'user'", "two positive ints"], config={"sparse_block_shape": (ROW, 4)}
    ),
    "too_many_zeros": model_case(
        ["rank {bad}", "zeros_per_block=5 of 'word'"], config={"word": {"zeros_per_block": 5}}
    ),
    "no_level": model_case(
        ["rank {bad}", "sparsity_level=nan of 'tiny'"], config={"t*": {"sparsity_level": torch.nan}}
    ),
    "other_tables": model_case(["table 'item' is nothing on rank|nothing on rank", "rank 1"], exclude="item"),
    "other_level_of_one": model_case(["table 'tiny'", "0.75", "rank 1"], config={"tiny": {"sparsity_level": 0.75}}),
}
CASES: dict[str, Callable[[int], None]] = {case.__name__: case for case in STEP_CASES} | MODEL_CASES


def run_all() -> dict[str, str | None]:
    quiet()
    set_timeout(TIMEOUT)
    turns = {f"{name}-{bad}": (case, bad) for name, case in CASES.items() for bad in (0, 1)}
    return run_cases(turns, lambda turn: turn[0](turn[1]))


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    return run_ranks(2, run_all, local_world_size=LOCAL[2])


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(outcomes: list[dict[str, str | None]], case: str, bad: int) -> None:
    check_outcomes(outcomes, f"{case}-{bad}")


def run_groups() -> dict[str, str | None]:
    quiet()
    set_timeout(TIMEOUT)
    return run_cases({f"{table} on {bad}": (bad, table) for bad, table in GROUP_CASES}, two_groups)


def test_all_ranks_of_overlapping_groups_hear_of_it() -> None:
    outcomes = run_ranks(4, run_groups, local_world_size=LOCAL[4], timeout=60)
    for name in outcomes[0]:
        check_outcomes(outcomes, name)

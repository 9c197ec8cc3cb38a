"""Masks of whole models in one process: states, squashing, copies and reads that must be
cheap."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import BaseDataSparsifier, DataNormSparsifier, ImportanceSparsifier, MaskEnforcer
from dist_sparse.extend import ScoreSparsifier
from dist_sparse.tables.modules import ModelTables
from tests.states import table


def tables(**rows: int) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.EmbeddingBag(count, 4) for name, count in rows.items()})


def updated(model: nn.Module, level: float = 0.5) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape="row", norm="l2")
    sparsifier.add_model(model)
    sparsifier.step()
    return sparsifier


def saved(sparsifier: BaseDataSparsifier) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(sparsifier.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def test_a_load_that_is_not_strict_leaves_registered_tables_alone() -> None:
    state = saved(updated(tables(a=10), level=0.8))
    sparsifier = updated(tables(a=10), level=0.2)
    before, config = sparsifier.fingerprint(), copy.deepcopy(sparsifier.data_groups)
    sparsifier.load_state_dict(state, strict=False)
    assert sparsifier.fingerprint() == before and sparsifier.data_groups == config


def test_a_squashed_table_may_leave_the_model() -> None:
    model = tables(a=10, b=8)
    sparsifier = DataNormSparsifier(sparse_block_shape="row")
    sparsifier.add_model(model, include=["a", "b"])
    sparsifier.squash_mask(names=["a"])
    del model["a"]
    sparsifier.step()
    assert sparsifier.table_stats()[0].removed_blocks == 4
    sparsifier.squash_mask()
    assert sparsifier.masks.tables.sources == [], "nothing holds the model any more"


def test_reads_of_one_table_do_not_walk_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tables(**{f"t{i}": 6 for i in range(20)})
    sparsifier = updated(model)
    weight = model["t7"].weight
    monkeypatch.setattr(ModelTables, "locate", lambda *_: pytest.fail("walks the model"))
    assert int(sparsifier.get_mask("t7").sum()) == 12
    assert sparsifier.get_data("t7").data_ptr() == weight.data_ptr()
    assert len(sparsifier.local_masks("t7")) == 1
    sparsifier.add_data("plain", torch.ones(2, 4))
    model["t7"].weight = nn.Parameter(torch.ones(6, 4))
    assert sparsifier.get_data("t7").sum() == 24, "a replaced parameter is found"


def test_reads_of_a_table_whose_module_was_replaced_find_the_new_one() -> None:
    model = tables(a=10, b=8)
    sparsifier = updated(model)
    model["b"] = nn.EmbeddingBag.from_pretrained(torch.full((8, 4), 3.0))
    assert float(sparsifier.get_data("b").mean()) == 3.0


class Interrupted(BaseDataSparsifier):
    """Is stopped in the middle of its second name."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name)[0] = 0
        if name == "b":
            raise KeyboardInterrupt


def test_an_interrupted_update_leaves_the_masks_of_plain_data() -> None:
    sparsifier = Interrupted([("a", torch.ones(2, 2)), ("b", torch.ones(2, 2))])
    with pytest.raises(KeyboardInterrupt):
        sparsifier.step()
    assert all(bool((sparsifier.get_mask(name) == 1).all()) for name in "ab")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda t: t["pieces"][0].update(bits=~t["pieces"][0]["bits"]),
            "not the ones that were saved",
        ),
        (
            lambda t: t["pieces"][0].update(
                bits=torch.zeros_like(t["pieces"][0]["bits"]), hash=None
            ),
            "remove 10 blocks",
        ),
        (
            lambda t: t["pieces"].append(
                {**t["pieces"][0], "bits": ~t["pieces"][0]["bits"] & 3, "hash": None}
            ),
            "overlap",
        ),
        (lambda t: t["pieces"][0].update(rect=torch.zeros(1).expand(4)), "Invalid rect"),
        (lambda t: t["pieces"][0].update(rect=(0, 0, 10, True)), "Invalid rect"),
        (lambda t: t.update(block=(0, 4)), "Invalid block"),
        (lambda t: t.update(block="1x4"), "Invalid block"),
    ],
)
def test_masks_that_do_not_fit_are_refused(spoil: Callable[[Any], Any], message: str) -> None:
    state = saved(updated(tables(a=10)))
    with table(state, "a") as entry:
        spoil(entry)
    sparsifier = updated(tables(a=10), level=0.2)
    before = sparsifier.fingerprint()
    with pytest.raises(ValueError, match=message):
        sparsifier.load_state_dict(state)
    assert sparsifier.fingerprint() == before


@pytest.mark.parametrize(
    "config",
    [
        {"sparse_block_shape": (0, 1)},
        {"sparse_block_shape": "x"},
        {"zeros_per_block": -1},
        {"sparsity_level": float("nan")},
        {"sparsity_level": 10**400},
    ],
)
def test_configs_that_no_update_can_follow_are_not_loaded(config: dict[str, Any]) -> None:
    state = saved(updated(tables(a=10)))
    with table(state, "a") as entry:
        entry["config"].update(config)
    sparsifier = updated(tables(a=10), level=0.2)
    before = copy.deepcopy(sparsifier.data_groups)
    with pytest.raises(ValueError, match="Invalid"):
        sparsifier.load_state_dict(state)
    assert sparsifier.data_groups == before


def test_nothing_is_written_if_one_table_can_not_be() -> None:
    model = tables(a=10, b=10)
    sparsifier = DataNormSparsifier(sparse_block_shape="row")
    sparsifier.add_model(model)
    model["b"].weight.data = torch._neg_view(torch.ones(10, 4))
    before = model["a"].weight.detach().clone()
    with pytest.raises(ValueError, match=r"'b'.*negated view"):
        sparsifier.step()
    assert (
        torch.equal(model["a"].weight, before) and sparsifier.table_stats()[0].removed_blocks == 0
    )


def test_two_names_for_one_memory_are_refused_in_one_call_too() -> None:
    model = tables(a=10, b=10)
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    with pytest.raises(ValueError, match="'b' is registered already, as 'a'"):
        DataNormSparsifier().add_model(model)


class Half(DataNormSparsifier):
    """Masks of a user's own, below ScoreSparsifier."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name)[::2] = 0


def test_update_mask_below_score_sparsifier_is_for_plain_data() -> None:
    sparsifier = Half([("plain", torch.ones(4, 2))])
    sparsifier.step()
    assert sparsifier.get_mask("plain")[:, 0].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="override score\\(\\), or inherit BaseDataSparsifier"):
        sparsifier.add_model(tables(a=4))


class Opposite(DataNormSparsifier):
    """Removes the largest blocks: its score counts, not the norm that it inherits."""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        return 1 / (1 + data.double().abs())


def test_a_score_below_a_norm_is_used() -> None:
    weight = torch.tensor([[3.0, 3.0], [1.0, 1.0]])
    sparsifier = Opposite([("w", weight)], sparse_block_shape="1xrow", norm="L2")
    assert isinstance(sparsifier, ScoreSparsifier) and sparsifier.measure is None
    sparsifier.step()
    assert sparsifier.get_mask("w")[:, 0].tolist() == [0, 1]


class Wrapped(ImportanceSparsifier):
    """A score of a user's own, from the one that it inherits."""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        return super().score(name, data, offset=offset, **config)


def test_an_inherited_score_does_not_write_float64_weights() -> None:
    table = nn.EmbeddingBag(6, 4, dtype=torch.float64)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    sparsifier = Wrapped(sparsity_level=0.0)
    sparsifier.add_model(table)
    with MaskEnforcer(sparsifier).attach(optimizer):
        table(torch.tensor([[1, 3, 4]])).sum().backward()
        optimizer.step()
        before = table.weight.detach().clone()
        sparsifier.step()
        assert torch.equal(table.weight.detach(), before)


def test_revived_weights_are_counted() -> None:
    model = tables(a=10, b=8)
    sparsifier = updated(model)
    assert sparsifier.count_revived() == {"a": 0, "b": 0}
    model["a"].weight.data += 1.0
    assert sparsifier.count_revived() == {"a": 5 * 4, "b": 0}
    sparsifier.apply_masks()
    assert sparsifier.count_revived() == {"a": 0, "b": 0}


def test_block_shapes_as_text() -> None:
    sparsifier = DataNormSparsifier(sparse_block_shape="row")
    assert sparsifier.defaults["sparse_block_shape"] == (1, "ROW")
    sparsifier.add_data("w", torch.ones(4, 8), sparse_block_shape="2x4")
    assert sparsifier.data_groups["w"]["sparse_block_shape"] == (2, 4)
    assert sparsifier.data_groups["w"]["zeros_per_block"] == 8
    with pytest.raises(ValueError, match="Invalid block '0x4'"):
        DataNormSparsifier(sparse_block_shape="0x4")

"""Artifacts and deltas of following tables serve what the model's forward gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import LazyAwaitable

from dist_sparse import export, load_served
from dist_sparse.extras.following import FollowingTables
from tests.dist.cells import gathered
from tests.dist.plugin import on_ranks
from tests.extras.following.models import FEATURES, IDS, OWN, SHARE, batch, build, kinds
from tests.extras.following.test_sharded import HOW
from tests.extras.following.test_training import train

pytestmark = pytest.mark.whole

EVERY = [(1, "row_wise", True), (2, "column_wise", False)]
EVERY += [(world, kind, True) for world in (2, 4) for kind in kinds(world)]


def every_id() -> KeyedJaggedTensor:
    """A bag for each id of each feature; more bags have no id."""
    keys = [key for keys in FEATURES.values() for key in keys]
    most, values, lengths = max(IDS.values()), [], []
    for table, features in FEATURES.items():
        for _ in features:
            values.append(torch.arange(IDS[table]))
            lengths.append((torch.arange(most) < IDS[table]).long())
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))


def check_served(served: Any, model: Any) -> None:
    """Every id reads what the model's forward gives, bit for bit: without a slot 0, whatever the
    nursery has."""
    model.eval()
    indexes = model.module.tables.following_ids.slots.values()
    scales = [index.nursery_scale for index in indexes]
    with torch.no_grad():
        for index in indexes:
            index.nursery_scale = 0.0
        expected = by_key(model.module.tables(every_id()))
    for index, scale in zip(indexes, scales, strict=True):
        index.nursery_scale = scale
    for table, slots in OWN.items():
        for key in FEATURES[table]:
            assert 0 < int(expected[key].any(1).sum()) <= slots
    if served is not None:
        found = by_key(served(every_id()))
        assert all(torch.equal(found[key], rows) for key, rows in expected.items())
    model.train()


def by_key(found: Any) -> dict[str, Tensor]:
    """The outputs of a collection of either kind."""
    if isinstance(found, LazyAwaitable):
        found = found.wait()
    if isinstance(found, KeyedTensor):
        return found.to_dict()
    return {key: each.values() for key, each in found.items()}


@on_ranks()
@pytest.mark.parametrize(("world", "kind", "bags"), EVERY)
def test_artifact_and_delta(world: int, kind: str, bags: bool, tmp_path: Path) -> None:
    built = build(world, kind, bags=bags, nursery=SHARE)
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    train(built, slots, range(7), world)
    base = export(built.model, None, tmp_path / "base")
    table = base.manifest.tables["item"]
    assert (table.rows, table.kept) == (IDS["item"], OWN["item"])
    served = load_served(tmp_path / "base") if dist.get_rank() == 0 else None
    assert gathered(built.model)["item"][OWN["item"] :].any(), "the nursery has rows"
    check_served(served, built.model)
    # With a batch in flight: slots that are reserved are no one's yet.
    train(built, slots, range(7, 8), world)
    built.optimizer.zero_grad()
    loss, _ = built.model(batch(8, world))
    loss.backward()
    in_flight = batch(9, world)
    built.model.module.tables.following_ids(in_flight)
    slots.step()
    delta = export(built.model, None, tmp_path / "delta", since=base)
    whole = export(built.model, None, tmp_path / "whole")
    assert delta.delta is not None
    assert delta.delta.tables["item"].gone > 0
    assert delta.manifest.to_text() == whole.manifest.to_text()
    assert whole.manifest.tables["item"].kept < OWN["item"]
    if served is not None:
        served.apply_delta(tmp_path / "delta")
    check_served(served, built.model)
    train(built, slots, range(9, 10), world)
    export(built.model, None, tmp_path / "next", since=delta)
    if served is not None:
        served.apply_delta(tmp_path / "next")
    check_served(served, built.model)

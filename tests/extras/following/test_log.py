"""Lookups of following tables by fate, in the log, the report and as loops count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_sparse.extras.following import FollowingTables
from tests.dist.plugin import on_ranks
from tests.extras.following.models import FEATURES, IDS, SLOTS, batch, build
from tests.extras.following.oracle import Oracle
from tests.extras.following.test_sharded import HOW, everywhere

report = pytest.importorskip("dist_sparse.extras.report")
pytestmark = pytest.mark.whole


@on_ranks(1, 2)
def test_fates(world: int, tmp_path: Path) -> None:
    built = build(world, "row_wise")
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    oracles = {table: Oracle(IDS[table], SLOTS[table], **HOW) for table in SLOTS}
    expected: list[dict[str, Any]] = []
    with report.RunLog(tmp_path, slots=slots, model=built.model) as log:
        fates = {table: [0, 0, 0] for table in SLOTS}
        seen = {table: set[int]() for table in SLOTS}
        for step in range(12):
            features = batch(step, world)
            for bags in everywhere(features):
                for table, oracle in oracles.items():
                    for number in (n for key in FEATURES[table] for bag in bags[key] for n in bag):
                        [slot] = oracle.look_up([number])
                        fates[table][0] += 1
                        fates[table][1] += slot < 0 and number in seen[table]
                        fates[table][2] += slot < 0 and number not in seen[table]
            built.optimizer.zero_grad()
            loss, _ = built.model(features)
            loss.backward()
            built.optimizer.step()
            if step % 2:
                # It counts what was looked up so far, and changes nothing.
                slots.summary()
            slots.step()
            for table, oracle in oracles.items():
                before = {number for number in oracle.id_of_slot if number >= 0}
                oracle.step()
                after = {number for number in oracle.id_of_slot if number >= 0}
                if step % 3 == 2:
                    seen[table] = {n for n, times in oracle.counts.items() if times}
                    came, went = len(after - before), len(before - after)
                    expected.append({"name": table, "came": came, "went": went})
                    expected[-1]["fates"], fates[table] = fates[table], [0, 0, 0]
            log.step(step, loss=loss)
    if torch.distributed.get_rank() == 0:
        from dist_sparse.extras.report.summary import inspect_text

        run = report.read_run(tmp_path)
        assert [step for step, _ in run.slots] == [2, 5, 8, 11]
        changes = [change for _, update in run.slots for change in update.tables]
        for change, one in zip(changes, expected, strict=True):
            found = [change.lookups, change.removed, change.unseen]
            assert (change.name, change.came, change.went) == (
                one["name"],
                one["came"],
                one["went"],
            )
            assert (found, change.out_of_range) == (one["fates"], 0), (
                found,
                one,
                changes,
                expected,
            )
        assert "% hit removed rows" in " ".join(inspect_text(run).split())
        assert "mask" not in inspect_text(run), "it has none"
        assert "hit removed rows" in report.write_report(run).read_text()
    assert slots.updates is None
    with pytest.raises(ValueError, match=r"Invalid slots of type Linear: must be a Following"):
        report.RunLog(tmp_path / "other", slots=torch.nn.Linear(1, 1))

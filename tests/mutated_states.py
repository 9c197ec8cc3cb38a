"""Mutations of the state of a SparseTraining, and what a load may do with one: three outcomes, and
no other.

A mutated state is refused with nothing changed, or is equivalent to the good one, or is another
valid state: masks are updated and audited with it. Afterwards the good state still loads. Ranks
draw the same mutations.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dist_sparse import SparseTraining
from dist_sparse.groups import world_group
from dist_sparse.sparsifiers.pieces import hash_tensor
from dist_sparse.tables.chunked import ChunkedTensor

__all__ = ["outcomes"]

Json = Any

JUNK: tuple[Json, ...] = (
    *(None, True, False, -1, 0, 1, 2, 5, 10**9, 10**400, 0.5, 1.1, -0.0, math.nan, math.inf, 1e308),
    # Numbers that no int64 holds.
    *(10**20, 2**63, [1, 10**20], [10**20, 1]),
    *("", "x", "norm", "global", "0.5", [], [1], [1, 1], [[]], {}, {"a": 1}),
)


def outcomes(
    training: SparseTraining, good: dict[str, Any], move_on: Callable[[], object], cases: range
) -> Counter[str]:
    """Load one mutated state after the other, and count what happened.

    Args:
        training: its state is another than ``good``.
        good: a state that it can load.
        move_on: takes some training steps.
        cases: seeds.

    Raises:
        AssertionError: a load had another outcome; names the case and the mutation.
    """
    counts: Counter[str] = Counter()
    training.load_state_dict(good)
    known = _everything(training)[1:]
    for case in cases:
        move_on()
        rng = random.Random(case)
        state = _copied(good)
        # The rank that is wrong, or all.
        only = rng.choice([None, 0, 1]) if dist.is_initialized() else None
        what = _mutate(state, rng)
        if only is not None and dist.get_rank() != only:
            state = _copied(good)
        before = _everything(training)
        try:
            training.load_state_dict(state)
            said = "accepted"
        except ValueError as error:
            said = "refused"
            text = str(error)
            assert _everything(training) == before, (
                f"case {case} ({what}) was refused, and changed something: {text}"
            )
        except Exception as error:
            raise AssertionError(
                f"case {case} ({what}): {type(error).__name__}: {error}"
            ) from error
        everywhere = world_group().all_gather_json(said)
        assert len(set(everywhere)) == 1, f"case {case} ({what}): {everywhere}"
        if said == "accepted":
            said = "equivalent" if _everything(training)[1:] == known else "another valid state"
            try:
                training.sparsifier.audit()
                move_on()
                training.sparsifier.enable_mask_update = True
                training.sparsifier.step()
                training.sparsifier.audit()
            except Exception as error:
                raise AssertionError(
                    f"case {case} ({what}) broke: {type(error).__name__}: {error}"
                ) from error
        counts[said] += 1
        try:
            training.load_state_dict(good)
        except Exception as error:
            raise AssertionError(
                f"after case {case} ({what}) a good state is refused: {error}"
            ) from error
        assert _everything(training)[1:] == known, (
            f"after case {case} ({what}) a good state loads otherwise"
        )
    return counts


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(state)


def _everything(training: SparseTraining) -> list[Any]:
    """Weights, and all that a state restores."""
    sparsifier = training.sparsifier
    weights = [
        hash_tensor(shard.tensor)
        for data in sparsifier.masks.tables.locate().values()
        for shard in data.shards
    ]
    counts = {
        name: [*map(hash_tensor, sparsifier.masks.tables.table(name).counts.values())]
        for name in sparsifier.data_groups
    }
    settings = [sparsifier.scored_by, sparsifier.scope, dict(sparsifier.floors)]
    schedule = {
        key: value for key, value in training.scheduler.state_dict().items() if key != "_last_param"
    }
    masks = {
        name: [hash_tensor(mask.bits) for mask in sparsifier.masks.tables.masks(name)]
        for name in counts
    }
    return [weights, counts, settings, repr(schedule), repr(sparsifier.data_groups), masks]


def _mutate(state: dict[str, Any], rng: random.Random) -> str:
    """Change one thing of a state; say what."""
    sharded = state["sparsifier"]["sharded"]
    kind = rng.choices(["schedule", "tables", "pieces", "whole"], [45, 30, 20, 5])[0]
    if kind == "schedule":
        parsed = json.loads(state["schedule"])
        what = _mutate_tree(parsed, rng)
        state["schedule"] = json.dumps(parsed)
    elif kind == "tables":
        parsed = json.loads(sharded["tables"])
        what = _mutate_tree(parsed, rng)
        sharded["tables"] = json.dumps(parsed)
    elif kind == "pieces":
        what = _mutate_pieces(sharded, rng)
    else:
        holder = rng.choice([state, state["sparsifier"], sharded])
        what = _mutate_entry(holder, rng.choice(sorted(holder)), rng)
    return f"{kind}: {what}"


def _mutate_tree(tree: Json, rng: random.Random) -> str:
    path: list[str | int] = []
    while True:
        keys: list[Any] = sorted(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys)
        path.append(key)
        inside = tree[key]
        if not isinstance(inside, (dict, list)) or not inside or rng.random() < 0.25:
            return f"{path[:-1]} {_mutate_entry(tree, key, rng)}"
        tree = inside


def _mutate_entry(holder: Json, key: Any, rng: random.Random) -> str:
    value = holder[key]
    kinds = ["replace", "replace", "nudge"] + (
        ["delete", "add", "rename"] if isinstance(holder, dict) else ["extend"]
    )
    kind = rng.choice(kinds)
    if kind == "nudge" and not isinstance(value, (int, float)):
        kind = "replace"
    if kind == "delete":
        del holder[key]
    elif kind == "add":
        holder["newer"] = rng.choice(JUNK)
    elif kind == "rename":
        holder[f"{key}2"] = holder.pop(key)
    elif kind == "extend":
        holder.append(copy.deepcopy(value))
    elif kind == "nudge":
        holder[key] = rng.choice([value + 1, value - 1, value * 1.1, -value])
    else:
        holder[key] = rng.choice(JUNK)
    return (
        f"{kind} {key!r}: {str(value)[:40]} ->"
        f" {str(holder.get(key) if isinstance(holder, dict) else holder)[:40]}"
    )


def _mutate_pieces(sharded: dict[str, Any], rng: random.Random) -> str:
    part = rng.choice(sorted({"masks", "counts"} & set(sharded)))
    name = rng.choice(sorted(sharded[part]))
    held: ChunkedTensor = sharded[part][name]
    kind = rng.choice(["drop", "twice", "junk", "rect", "tensor", "flip", "hash", "list"])
    if kind == "list":
        held.kept = rng.choice([None, 5, {}, "x", [5]])
    elif not held.kept:
        return f"{part} of {name}: none here"
    elif kind == "drop":
        held.kept.pop()
    elif kind == "twice":
        held.kept.append(dict(held.kept[0]))
    elif kind == "junk":
        key = rng.choice(sorted(held.kept[0]))
        held.kept[0][key] = rng.choice(JUNK)
    elif kind == "rect":
        rect = list(held.kept[0]["rect"])
        rect[rng.randrange(4)] += rng.choice([-1, 1, 100])
        held.kept[0]["rect"] = tuple(rect)
    else:
        _mutate_tensor(held.kept[0], "bits" if part == "masks" else "counts", kind, rng)
    return f"{part} of {name}: {kind}"


def _mutate_tensor(piece: dict[str, Any], key: str, kind: str, rng: random.Random) -> None:
    tensor = piece[key]
    if kind == "tensor":
        piece[key] = rng.choice(
            [
                tensor[:-1],
                tensor.float(),
                tensor.view(1, -1),
                torch.cat([tensor, tensor]),
                tensor.tolist(),
            ]
        )
        return
    if tensor.numel():
        tensor[rng.randrange(tensor.numel())] ^= 1 << rng.randrange(6)
    if kind == "hash":
        piece["hash"] = None

"""What ids should read that training never looked up.

In each of three data sets, a real share of the test lookups is of such ids, because the data is
split by time or by user. The benchmark compares the initial values, which a model without this
package has; zeros, as removed rows read; means of the rows that training read; and one row for all
such ids, trained in two ways. Settings are chosen with seeds and data that the report does not use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

from benchmarks.following_case import auc
from benchmarks.measure import keep
from benchmarks.tables_data import TRAINED, arrays_of, lastfm, with_negatives
from dlrm import model as dlrm_model
from dlrm import movielens
from dlrm.batches import DataError, Dataset
from two_tower.data import NEGATIVES
from two_tower.model import Towers, build, keyed
from two_tower.train import loss as towers_loss

__all__ = ["CASES", "Case", "fill", "main", "mapped", "measured", "reads", "report", "trained"]

Row = dict[str, Any]
Reads = Mapping[str, Tensor]
"""By table: how often training looked up each id."""

SEEDS, TUNING_SEEDS = range(5), (100, 101)
FILLS = ("initial values", "zeros", "mean", "mean by reads")
"""Methods that share one trained model: it never looked these ids up."""

RARE, COMPACTED = "row for rare ids", "row from half time"
RARE_SETTINGS = [(0.25, 0.1), (0.25, 0.5), (1.0, 0.02), (1.0, 0.1)]
"""Which part of the ids that were read, the rarest first, has its lookups sent to the shared row;
and with which probability."""

L2, TOWERS_LR = 0.15, 0.8
"""Of 6 settings for two towers, the best on the tuning data of Gowalla."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set and its model.

    Args:
        load: returns the examples in a folder; those for tuning if its second argument is true.
        towers: two towers instead of a DLRM.
        group: consecutive examples that stay together: an interaction and its negatives.
        batch: groups in a step.
        passes: over the training part.
    """

    name: str
    load: Callable[[Path, bool], Dataset]
    towers: bool = False
    group: int = 1 + NEGATIVES
    batch: int
    passes: int = 1
    dim: int


def _movielens(folder: Path, tuning: bool) -> Dataset:
    inside = folder / "ml-100k"
    data = movielens.load(inside if inside.is_dir() else movielens.fetch())
    if tuning:  # an earlier time
        cut = int(TRAINED * len(data.train))
        return replace(data, train=data.train[:cut], test=data.train[cut:])
    return data


def _lastfm(folder: Path, tuning: bool) -> Dataset:
    return lastfm(folder / "lastfm.npz", TRAINED if tuning else 1.0)  # an earlier time


def _pairs(folder: Path, tuning: bool) -> Dataset:
    data = _lastfm(folder, tuning)
    user, artist, _ = data.sparse
    return replace(data, sparse=(user, replace(artist, name="item")))


def _gowalla(folder: Path, tuning: bool) -> Dataset:
    names = ("train_user", "train_item", "test_user", "test_item")
    arrays = list(arrays_of(folder / "gowalla.npz", names).values())
    user, item = (np.concatenate([arrays[place], arrays[place + 2]]) for place in (0, 1))
    first = np.arange(len(user)) < len(arrays[0])
    group = np.random.default_rng(0).permutation(user.max() + 1) % 15
    # A third of the users; those for tuning are others. A fifth of them are new in the test.
    mine = group % 3 == tuning
    train = first & (group[user] // 3 != 0)
    chosen = mine[user] & (train | ~first)
    ids = {"user": user[chosen], "item": item[chosen]}
    return with_negatives("Gowalla", ids, "item", train[chosen], np.zeros((1, chosen.sum())))


CASES = (
    Case(name="MovieLens-100K by time, DLRM", load=_movielens, group=1, batch=128, dim=32),
    Case(name="Last.FM by time, DLRM", load=_lastfm, batch=128, dim=16),
    Case(
        name="Last.FM by time, two towers", load=_pairs, towers=True, batch=1024, passes=8, dim=16
    ),
    Case(
        name="Gowalla by user, two towers", load=_gowalla, towers=True, batch=1024, passes=8, dim=16
    ),
)


class _Model:
    """A model of the examples, with a row for each id and, after them, one for all others."""

    def __init__(self, case: Case, data: Dataset, seed: int) -> None:
        self.towers, self.done = case.towers, 0
        rows = {each.name: each.rows + 1 for each in data.sparse}
        if case.towers:
            torch.manual_seed(seed)
            self.model, self.optimizer = build(Towers(*rows.values(), case.dim), 1)
        else:
            sparse = tuple(replace(each, rows=rows[each.name]) for each in data.sparse)
            made = dlrm_model.build(
                replace(data, sparse=sparse),
                sharding=dict.fromkeys(rows, "row_wise"),
                seed=seed,
                world=1,
                dim=case.dim,
            )
            self.model, self.optimizer = made.model, made.optimizer
        state = self.model.state_dict().items()
        self.tables: dict[str, Tensor] = {
            key.split(".")[-2]: value.local_shards()[0].tensor
            for key, value in state
            if isinstance(value, ShardedTensor)
        }
        if case.towers:  # an item has a bias beside its row
            self.tables["item bias"] = self.model.module.bias.detach()[:, None]
        for table in self.tables.values():
            table[-1] = 0  # as the default row of compact() begins

    def step(self, data: Dataset, index: Tensor, steps: int) -> None:
        """Train on a batch; ``steps`` is the number of all steps."""
        self.optimizer.zero_grad()
        if self.towers:
            rate = TOWERS_LR * min(1.0, 2 * (1 - self.done / steps))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            user, items = (each.ids[index].view(-1, 1 + NEGATIVES) for each in data.sparse)
            towers_loss(self.model, keyed(user[:, 0], items), items, L2).backward()
        else:
            self.model(data.batch(index))[0].backward()
        self.optimizer.step()
        self.done += 1

    @torch.no_grad()
    def logits(self, data: Dataset, index: Tensor) -> Tensor:
        """Return the logits of examples."""
        if self.towers:
            user, item = (each.ids[index] for each in data.sparse)
            product = self.tables["user"][user] * self.tables["item"][item]
            return product.sum(1) + self.tables["item bias"][item, 0]
        self.model.eval()
        return torch.cat([self.model(data.batch(each))[1][1] for each in index.split(4096)])


def mapped(data: Dataset, flags: Mapping[str, Tensor]) -> Dataset:
    """Return the data with flagged lookups, by table, sent to the shared row after the others."""
    sparse = [
        replace(each, ids=torch.where(flags[each.name], each.rows, each.ids))
        for each in data.sparse
    ]
    return replace(data, sparse=tuple(sparse))


def reads(data: Dataset, index: Tensor) -> dict[str, Tensor]:
    """Return how often examples look up each id; the shared row is not counted."""
    found = {}
    for each in data.sparse:
        ids, _ = each.take(index)
        found[each.name] = torch.bincount(ids, minlength=each.rows + 1)[: each.rows]
    return found


def _unread(data: Dataset, counts: Reads) -> dict[str, Tensor]:
    return {each.name: (counts[each.name] == 0)[each.ids] for each in data.sparse}


def _rare(data: Dataset, part: float, share: float, draw: torch.Generator) -> dict[str, Tensor]:
    """Return a share of the lookups of the rarest ids. Tables whose ids all occur in training need
    no shared row."""
    flags = {}
    for name, counts in reads(data, data.train).items():
        feature = next(each for each in data.sparse if each.name == name)
        unread = int((counts == 0).sum())
        chosen = unread + int(part * (len(counts) - unread)) if unread else 0
        rare = torch.zeros(len(counts), dtype=torch.bool)
        rare[counts.argsort(stable=True)[:chosen]] = True
        flags[name] = rare[feature.ids] & (torch.rand(len(feature.ids), generator=draw) < share)
    return flags


def trained(
    case: Case, data: Dataset, seed: int, method: str = "", setting: tuple[float, float] = (0, 0)
) -> tuple[_Model, dict[str, Tensor]]:
    """Return the model, trained by a method, and how often it read each id's own row."""
    model, draw = _Model(case, data, seed), torch.Generator().manual_seed(seed)
    groups = data.train.view(-1, case.group)
    half = len(groups) // (2 * case.batch)
    halves: list[Tensor] = []
    for _ in range(case.passes):
        order = torch.randperm(len(groups), generator=draw)[: 2 * half * case.batch]
        halves += groups[order].flatten().chunk(2)
    counts = {each.name: torch.zeros(each.rows, dtype=torch.int64) for each in data.sparse}
    shown = data
    for number, part in enumerate(halves):
        if method == RARE:
            shown = mapped(data, _rare(data, *setting, draw))
        if method == COMPACTED and number == case.passes:
            shown = mapped(data, _unread(data, counts))
        for index in part.split(case.batch * case.group):
            model.step(shown, index, half * len(halves))
        for name, more in reads(shown, part).items():
            counts[name] += more
    return model, counts


def fill(tables: Mapping[str, Tensor], counts: Reads, how: str) -> None:
    """Write what unread ids shall read into the last row of each table."""
    for name, table in tables.items():
        read = counts[name.removesuffix(" bias")].float()
        weights = {"zeros": 0 * read, "mean": (read > 0).float(), "mean by reads": read}[how]
        table[-1] = weights @ table[:-1] / weights.sum().clamp(min=1)


def measured(
    case: Case, data: Dataset, seed: int, setting: tuple[float, float]
) -> tuple[list[Row], dict[str, float]]:
    """Return the quality of all methods with one seed, and which share of the test reads unread
    ids: of each table's lookups, and of the examples."""
    model, counts = trained(case, data, seed)
    flags = _unread(data, counts)
    is_new, shares = _new(data, flags)
    rows = []
    for how in FILLS:
        shown = data
        if how != "initial values":
            shown = mapped(data, flags)
            fill(model.tables, counts, how)
        rows.append(_quality(how, model.logits(shown, data.test), data, is_new))
    for method in (RARE, COMPACTED):
        model, counts = trained(case, data, seed, method, setting)
        shown = mapped(data, _unread(data, counts))
        rows.append(_quality(method, model.logits(shown, data.test), data, is_new))
        # How much is due to the row, and how much to the different training?
        fill(model.tables, counts, "zeros")
        name = f"zeros instead of the {method}"
        rows.append(_quality(name, model.logits(shown, data.test), data, is_new))
    return [{"case": case.name, "seed": seed, **row} for row in rows], shares


def _new(data: Dataset, flags: Reads) -> tuple[Tensor, dict[str, float]]:
    """Return which test examples have a flagged lookup, and the shares of the test."""
    found, shares = torch.zeros(len(data.test), dtype=torch.bool), {}
    for each in data.sparse:
        taken, lengths = replace(each, ids=flags[each.name]).take(data.test)
        found[torch.arange(len(found)).repeat_interleave(lengths)[taken]] = True
        if taken.any():
            shares[each.name] = float(taken.float().mean())
    return found, {**shares, "examples": float(found.float().mean())}


def _quality(method: str, logits: Tensor, data: Dataset, is_new: Tensor) -> Row:
    labels = data.labels[data.test]
    return {
        "method": method,
        "AUC": auc(logits, labels),
        "log loss": float(log_loss(logits, labels)),
        "AUC, unread": auc(logits[is_new], labels[is_new]),
        "log loss, unread": float(log_loss(logits[is_new], labels[is_new])),
    }


FIGURES = ("AUC", "log loss", "AUC, unread", "log loss, unread")


def report(found: Sequence[Row]) -> str:
    """Return a table for each data set."""
    notes = (
        f"Mean and standard deviation of seeds {min(SEEDS)} to {max(SEEDS)}, which draw weights and"
        " order. Unread: of the test examples with at least one id that training never looked up."
        " In brackets: the mean difference to zeros, seed by seed; bold if it is beyond the noise,"
        " which is the larger one of the standard deviations of that difference and of zeros."
    )
    texts = [notes]
    for name in dict.fromkeys(row["case"] for row in found):
        rows = [row for row in found if row["case"] == name]
        lines = [f"## {name}", "", rows[0]["about"], ""]
        lines += [f"| ids without a row read | {' | '.join(FIGURES)} |", "|" + "---|" * 5]
        for method in dict.fromkeys(row["method"] for row in rows):
            cells = [_cell(rows, method, figure) for figure in FIGURES]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _cell(rows: Sequence[Row], method: str, figure: str) -> str:
    mine, zeros = (
        [row[figure] for row in rows if row["method"] == which] for which in (method, "zeros")
    )
    text = f"{statistics.mean(mine):.4f} ± {statistics.stdev(mine):.4f}"
    if method == "zeros":
        return text
    over = [here - there for here, there in zip(mine, zeros, strict=True)]
    mean, noise = statistics.mean(over), max(map(statistics.stdev, (over, zeros)))
    mark = "**" if abs(mean) > noise else ""
    return f"{text} ({mark}{mean:+.4f}{mark})"


def _run(case: Case, folder: Path) -> list[Row]:
    """Tune and measure a data set."""
    tuning, tuned = case.load(folder, True), {}
    for setting in RARE_SETTINGS:
        scores = []
        for seed in TUNING_SEEDS:
            model, counts = trained(case, tuning, seed, RARE, setting)
            logits = model.logits(mapped(tuning, _unread(tuning, counts)), tuning.test)
            scores.append(auc(logits, tuning.labels[tuning.test]))
        tuned[setting] = statistics.mean(scores)
        print(f"{case.name}: {setting} AUC {tuned[setting]:.4f} on the tuning data", flush=True)
    best = max(tuned, key=tuned.__getitem__)
    data, found = case.load(folder, False), []
    for seed in SEEDS:
        rows, shares = measured(case, data, seed, best)
        found += rows
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    listed = ", ".join(f"{share:.1%} of {name}" for name, share in shares.items())
    about = (
        f"{len(data.train):,} training and {len(data.test):,} test examples. Unread in the test"
        f" (lookups by table, then examples): {listed}. The row for rare ids: {best[1]:.0%} of the"
        f" lookups of the rarest {best[0]:.0%} of the ids."
    )
    return [{**row, "about": about} for row in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the data sets that are there, print the tables and keep them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unread_ids", description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="with gowalla.npz and lastfm.npz; MovieLens-100K is downloaded unless it is in DIR/ml-100k",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: list[Row] = []
    for case in CASES:
        try:
            found += _run(case, options.data)
        except DataError as error:
            print(f"SKIPPED {case.name}: {error}", file=sys.stderr, flush=True)
    if not found:
        return 1
    text = report(found)
    print(text)
    keep(options.out, "unread-ids", found, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

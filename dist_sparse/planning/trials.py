"""Trials: a model has for a moment the weights that an artifact would serve, and then its own
again, bit for bit.

Each rank changes its own shards. What is removed is chosen by sparsifiers, over all ranks; rows are
rounded as :func:`~dist_sparse.export` rounds them. Rows that column borders cut travel in chunks:
no rank holds more than its shards, a copy of them, and a chunk.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import Tensor, nn

from dist_sparse.enforcer.enforcer import settle_all
from dist_sparse.enforcer.fused import fused_sums
from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.planning.candidates import Candidate
from dist_sparse.rotation.bases import bases_of
from dist_sparse.rotation.lookups import find_lookup
from dist_sparse.rotation.turning import change_rows_, cut_by_columns, gram_matrices, share_, turn_
from dist_sparse.serving.codes import decode, encode
from dist_sparse.serving.sources import check_range, lookups_of
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import ROW, ShardedData, check_writable

__all__ = ["check_candidate", "serving"]


@contextmanager
def serving(model: nn.Module, candidate: Candidate) -> Iterator[None]:
    """Have the tables of ``model`` hold, within the block, what would be served of them.
    Collective: every rank of the world must enter and leave it; of the weights only rows that
    column borders cut travel.

    Rows are removed first: by norm and Adagrad's sums where a fused Adagrad trains the tables,
    otherwise by the L2 norm; an attached enforcer changes nothing about that. Then tables are
    rotated and lose their last columns. Then the rest is rounded, and tables that were rotated
    alone are turned back, so that they may differ from what is served in the last bit.

    Afterwards, also after an error, the weights are what they were, bit for bit; what masks remove
    is zero. Takes a copy of this rank's shards. No optimizer state is written.

    Raises:
        ValueError: a table can't be served, or the candidate does not fit the tables; on every
            rank, and nothing was changed.

    Example::

        >>> import torch
        >>> from dist_sparse.planning.candidates import Candidate
        >>> from dist_sparse.planning.trials import serving
        >>> model = torch.nn.EmbeddingBag.from_pretrained(
        ...     torch.tensor([[0.0, 0.1], [1.0, 2.0], [0.2, 3.0]])
        ... )
        >>> with serving(model, Candidate(dtype="int4", levels={"weight": 1 / 3})):
        ...     print(model.weight.data)
        tensor([[0.0000, 0.0000],
                [0.9434, 2.0215],
                [0.2012, 3.0176]])
        >>> model.weight[0].data
        tensor([0.0000, 0.1000])
    """
    world = group_over(world_ranks())
    with world.agreeing("a trial") as facts:
        located = {data.name: data for data in model_source(model).locate()}
        lookups_of(model, list(located.values()))
        check_candidate(model, candidate, located)
        check_range(list(located.values()), "fp32")
        facts["candidate"] = asdict(candidate)
        for data in located.values():
            check_writable(data)
            facts[f"table {data.name!r}"] = [data.shape, str(data.dtype), data.ranks, data.tiling]
        weights = [shard.tensor.detach() for data in located.values() for shard in data.shards]
        settle_all(weights)  # a trial neither scores nor restores what no forward reads
        saved = [weight.clone() for weight in weights]
    try:
        with torch.no_grad():
            _write(model, candidate, located, world)
        yield
    finally:
        for weight, before in zip(weights, saved, strict=True):
            weight.data.copy_(before)


def check_candidate(
    model: nn.Module, candidate: Candidate, located: Mapping[str, ShardedData]
) -> None:
    """Refuse what does not fit the tables of a model. Local.

    Raises:
        ValueError: names the table and the rule.
    """
    for name in (*candidate.levels, *candidate.narrowed):
        if name not in located:
            raise ValueError(
                f"{name!r} of the candidate is none of the model's tables {sorted(located)}."
            )
    if candidate.columns < 1 and not candidate.groups:
        raise ValueError(
            f"A smaller dense table, {candidate}, can't be tried on a model: it has to be trained."
        )
    for group in candidate.groups:
        held = [(located[name].shape[1], located[name].ranks) for name in group]
        if len(set(held)) > 1:
            raise ValueError(
                f"The tables {list(group)} can't be rotated together: their widths and ranks are"
                f" {held}, and must be equal."
            )
        for name in group if len(group) > 1 else ():
            find_lookup([model], located[name], turned=False)
    for name, data in located.items():
        if data.copied and cut_by_columns(data):
            raise ValueError(
                f"Table {name!r} can't be tried: its columns are on several ranks, and 2-D"
                " parallelism trains copies of them; shard it by rows or by table."
            )


def _write(
    model: nn.Module, candidate: Candidate, located: Mapping[str, ShardedData], world: Group
) -> None:
    """Write what is served into the tables. Collective."""
    levels = {name: candidate.level(located[name]) for name in candidate.levels}
    # Those with a fused optimizer know its sums.
    for kernel in sorted({str(located[name].kernel) for name in levels}):
        some = {
            name: level for name, level in levels.items() if str(located[name].kernel) == kernel
        }
        _remove_rows(model, some, world)
    bases: dict[str, Tensor] = {}
    for group in candidate.groups:
        over = group_over(located[group[0]].ranks)
        found = bases_of(gram_matrices([located[name] for name in group], over))
        share_(found, over)  # as in rotate(): all ranks use the bytes of the first
        for name, basis in zip(group, found, strict=True):
            turn_(located[name], basis, over)
            for rect, weight in located[name].shards:
                weight.data[:, max(candidate.shape(located[name])[1] - rect.col, 0) :] = 0
        if len(group) == 1:
            bases[group[0]] = found[0]
    with world.agreeing("a trial"):
        check_range(list(located.values()), candidate.dtype)
    for name, data in located.items():
        over = group_over(data.ranks)
        change_rows_(data, lambda rows: decode(encode(rows, candidate.dtype), rows.shape[1]), over)
        if name in bases:
            turn_(data, bases[name].T, over)


class _Trained(ImportanceSparsifier):
    """Scores by what the fused Adagrad optimizers of a model have summed. It needs no enforcer, so
    that another one may be attached to the model."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__(sparsity_level=0.0, sparse_block_shape=(1, ROW), score="norm_accumulator")
        self._fused = fused_sums([model])
        self.add_model(model, include=[glob.escape(name) for name in names])

    def sums(self) -> Mapping[int, tuple[Tensor, float]]:
        return self._fused


def _remove_rows(model: nn.Module, levels: Mapping[str, float], world: Group) -> None:
    """Zero the rows with the smallest scores. Collective."""
    sparsifier = _Trained(model, levels)
    if world.all_reduce(torch.tensor(len(sparsifier.unknown_tables()))):
        sparsifier.scored_by = "norm"
    preview = sparsifier.preview(levels)
    for name, masks in preview.masks.items():
        for mask, shard in zip(masks, preview.located[name].shards, strict=True):
            mask.apply_(shard.tensor)

"""Scores by traffic: how often a row is looked up, and how large its gradients were.

Each score belongs to an element, so it works with every block and sharding: an element gets the
Adagrad sum or the lookup count of its row. Blocks are compared by the mean over their elements.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dist_sparse import checks
from dist_sparse.groups import Facts
from dist_sparse.masking.block_masks import ScoredTable
from dist_sparse.masking.scores import ByTotals, Measure, RowTotals, element_scores, squares_times
from dist_sparse.optimizers import Known, LookupRecord, read_rows, records_of
from dist_sparse.sparsifiers.dense_store import Configs
from dist_sparse.sparsifiers.masks import NO_ENFORCER
from dist_sparse.sparsifiers.pieces import MOST_COUNTED, shared_tensors
from dist_sparse.sparsifiers.score import BlockShape, DataNormSparsifier, Norm, RowScoring, Scope
from dist_sparse.tables.initial import Unread, doubt_about, refuse_trained
from dist_sparse.tables.memory import ByMemory
from dist_sparse.tables.shards import FUSED, ROW, Block, Located, Rect, Shard, ShardedData

Score = Literal["norm", "frequency", "accumulator", "norm_accumulator"]
SCORES = get_args(Score)

# Sums of squared gradients and their initial value, by weight.
Sums = ByMemory[tuple[Tensor, float]]

_NO_SUMS = (
    "no Adagrad steps it, so there are no sums of squared gradients. Use score='norm', or"
    " 'frequency' for a fused table."
)


class ImportanceSparsifier(DataNormSparsifier):
    """Removes the blocks that matter least to training: by norm, by lookups, or by Adagrad's sums.

    ====================== ================================================================
    ``score``              of an element ``w``
    ====================== ================================================================
    ``"norm"``             ``w * w`` or ``|w|``, as :class:`~dist_sparse.DataNormSparsifier`
    ``"frequency"``        lookups of its row in training, divided by the table's width
    ``"accumulator"``      ``G``, the squared gradients that Adagrad has summed for it
    ``"norm_accumulator"`` ``w * w * (G + 2**-100)``: of a row of row-wise Adagrad its norm
                           times the root of ``G``
    ====================== ================================================================

    ``G`` is read from the optimizer: FBGEMM's (row-wise) Adagrad, TorchRec's ``RowWiseAdagrad``, or
    torch's Adagrad, minus its initial value. Rows that no batch has touched have zero ``G`` and
    zero lookups, so they are removed first (with ``"norm_accumulator"``, the ones with the smallest
    norm first), which changes no prediction on ids seen in training. A row-wise optimizer keeps one
    number for a row of a shard: a table cut by columns has several numbers per row, each for its
    own columns.

    All but ``"norm"`` need an attached :class:`~dist_sparse.MaskEnforcer`, which knows the
    optimizers and sees the ids. Lookups are counted in backward passes of fused tables, repeats
    included, from ``attach()`` on: an int32 per row, up to 2**30, kept with its shard and saved in
    ``state_dict()``. Tables whose sharder has ``use_index_dedup=True`` are refused, because it
    merges repeats before they can be counted; in a batch with inverse indices, the stored ids are
    counted, not the samples that share them.

    Scores are float32: rows with more than 2**24 lookups may tie although their counts differ, and
    then the smaller row index is removed first. Lookups of removed rows are counted, and these rows
    keep their ``G`` unless the enforcer resets it, so they may come back, at 0, with
    ``"frequency"`` and ``"accumulator"``.

    Args:
        data_list: as in :class:`~dist_sparse.DataNormSparsifier`, like all arguments not listed
            here.
        score: the score of an element, from the table above.
        norm: ``"L1"`` or ``"L2"``, for the score ``"norm"``; the others require ``"L2"``.
        decay: after each mask update, counts are multiplied by it, so that old traffic counts less:
            counts are then float64, 8 bytes per row. At 1, all traffic since ``attach()`` counts
            equally, and counts are left as they are. Fixed once a table is registered.
        scope: see the attributes of :class:`~dist_sparse.extend.ScoreSparsifier`.
        floors: see there.

    Attributes:
        scored_by: the score; may be replaced between mask updates, on all ranks, except by
            ``"frequency"``.
        trust_record: whether rows without lookups are removed at the level ``"untouched"`` without
            a proof that they were never trained; see :func:`~dist_sparse.remove_untouched`.

    Raises:
        ValueError: an argument is invalid; in ``add_model``, lookups of a table are not seen; in
            ``step()``, no enforcer is attached, or a table has no Adagrad; on every rank.

    Example::

        >>> import torch
        >>> from dist_sparse import ImportanceSparsifier, MaskEnforcer
        >>> table = torch.nn.EmbeddingBag(6, 4)
        >>> optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
        >>> sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="norm_accumulator")
        >>> names = sparsifier.add_model(table)
        >>> with MaskEnforcer(sparsifier).attach(optimizer):
        ...     table(torch.tensor([[1, 3, 4]])).sum().backward()
        ...     optimizer.step()
        ...     sparsifier.step()
        >>> sparsifier.full_mask("weight")[:, 0]  # what was never looked up is removed first
        tensor([0, 1, 0, 1, 1, 0], dtype=torch.int8)
    """

    trust_record: bool = False

    def __init__(
        self,
        data_list: Iterable[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: BlockShape | str = (1, ROW),
        zeros_per_block: int | None = None,
        norm: Norm = "L2",
        *,
        score: Score = "norm_accumulator",
        decay: float = 1.0,
        scope: Scope = "table",
        floors: Mapping[str, float] | None = None,
    ) -> None:
        self.scored_by = checks.choice("score", score, SCORES)
        self.counts_lookups = self.scored_by == "frequency"
        self.decay = checks.level("decay", decay)
        # An int32 count would be rounded down: a decayed count of 1 would be forgotten at once.
        self.count_dtype = torch.int32 if self.decay == 1 else torch.float64
        if self.scored_by != "norm" and norm not in ("L2", "l2"):
            raise ValueError(
                f"Invalid {norm=} with {score=}: only the score 'norm' accepts a norm other than"
                " 'L2'."
            )
        self.scope, self.floors = scope, dict(floors or {})
        # The totals of this rank's shards, by table. It is set during a mask update only.
        self._totals: dict[str, list[RowTotals]] = {}
        # The tables whose totals are 1 for rows that were read.
        self._flagged: set[str] = set()
        # What optimizers know about touched rows; likewise.
        self._known: ByMemory[Known] | None = None
        super().__init__(data_list, sparsity_level, sparse_block_shape, zeros_per_block, norm)

    @property
    # A class attribute of the base class. Here it depends on the score, which may be replaced.
    def trains_removed(self) -> bool:  # type: ignore[override]
        """Whether gradients of removed rows change their score. With the other scores, removed rows
        score 0, or score by their lookups."""
        return self.scored_by == "accumulator"

    @property
    def measure(self) -> Literal["L1", "L2"] | None:
        # Without a norm, score() is called.
        return self.norm if self._fast == "norm" else None

    @property
    def _fast(self) -> str | None:
        """The score, if no subclass replaces :meth:`score`, so that it can be computed without it;
        else None."""
        return self.scored_by if type(self).score is ImportanceSparsifier.score else None

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """Return the score of each element, float64; see the class."""
        if self.scored_by == "norm":
            return super().score(name, data, offset=offset, **config)
        return element_scores(data, self._by_totals(name), offset)

    def element_measure(self, name: str, config: Mapping[str, Any]) -> Measure:
        if self._fast in (None, "norm"):
            return super().element_measure(name, config)
        if name in self._flagged and config["sparsity_level"] not in (0, checks.UNTOUCHED):
            raise ValueError(f"Table {name!r}: {_NO_SUMS}")
        return self._by_totals(name)

    def _by_totals(self, name: str) -> ByTotals:
        return ByTotals(partial(self._totals_at, name), self.scored_by == "norm_accumulator")

    def row_measure(self, name: str, shard: Shard) -> RowScoring | None:
        if self._fast in (None, "norm"):
            return super().row_measure(name, shard)
        if self._fast != "norm_accumulator":
            # Scores change in rows that no backward has written: decay changes the counts of all
            # rows, and a reset changes the sums of removed ones.
            return None
        totals = self._totals_at(name, shard.rect[:2])
        # A fused backward writes sums in the rows whose weights it writes, without a new version.
        # torch counts all other writes, such as a load.
        version = totals.total.data_ptr(), totals.total._version, totals.initial
        # copy=True: squares_times() overwrites its arguments, and double() of float64 does not
        # copy.
        return lambda data, rows: squares_times(
            data.to(torch.float64, copy=True), totals.of_rows(rows)
        ), version

    def score_tables(self, located: Located, configs: Configs) -> dict[str, ScoredTable]:
        # Before anything is scored: score() gets some rows, and can't locate their totals.
        self.look_up(located)
        for name, data in located.items():
            if configs[name]["sparsity_level"] == checks.UNTOUCHED and not self.counts_lookups:
                self._take_record(data)
        unread = [*self._unread(located, configs)]
        if unread and not self.trust_record:
            refuse_trained(unread)
        return super().score_tables(located, configs)

    def _take_record(self, data: ShardedData) -> None:
        """Score a table by which rows were read, 0 or 1. Sums alone would not tell: a mean of the
        smallest ones rounds to 0, and another optimizer may step the table too."""
        records = self._records(data)
        if isinstance(records, str):
            # Refused with the configuration.
            return
        self._flagged.add(data.name)
        self._totals[data.name] = [
            RowTotals(rect, flags.float()) for rect, flags in read_rows(data, records).items()
        ]

    def _unread(self, located: Located, configs: Configs) -> Iterator[Unread]:
        """Yield the rows without a record of tables at the level ``"untouched"``."""
        record = "lookup counts" if self.scored_by == "frequency" else "the optimizer's state"
        for name, data in located.items():
            if configs[name]["sparsity_level"] != checks.UNTOUCHED:
                continue
            totals = {one.rect: one.total for one in self._totals[name]}
            for rect, weights in data.shards:
                flags = (totals[rect].reshape(rect.rows, -1) == 0).all(1)
                yield Unread(data, weights, flags, record)

    def step(self) -> None:
        try:
            super().step()
        finally:
            # Views of live storage, which may be replaced before the next mask update.
            self._totals, self._known = {}, None
        # Counts age only after a mask update that has succeeded, on all ranks alike.
        if self.enable_mask_update and self.decay < 1:
            for name in self.masks.tables.names:
                # In place: the enforcer's hooks hold the same tensors.
                for counts in self.masks.tables.table(name).counts.values():
                    counts.clamp_(max=MOST_COUNTED).mul_(self.decay)

    def audit(self) -> dict[str, str]:
        try:
            return super().audit()
        finally:
            self._totals, self._known = {}, None

    def note(self, facts: Facts, located: Sequence[ShardedData]) -> None:
        super().note(facts, located)
        facts["sparsifier.scored_by"] = self.scored_by
        facts["sparsifier.decay"] = self.decay
        for data in located:
            # Replicas must score alike.
            if data.replicated:
                of_shards = self._totals.get(data.name, ())
                totals = [(data, one.rect, one.total) for one in of_shards]
                facts.replicas |= shared_tensors(totals, "optimizer state of ")

    def check_config(self, data: ShardedData, config: Mapping[str, Any]) -> Block:
        if self.counts_lookups and data.kernel not in FUSED:
            raise ValueError(
                f"Table {data.name!r}: score='frequency' needs a fused optimizer, and this table is"
                f" {data.kernel or data.sharding}."
            )
        if self.counts_lookups and data.merges_ids:
            raise ValueError(
                f"Table {data.name!r}: score='frequency' can't count its lookups, because index"
                " dedup merges the ids of a batch before them. Shard it without use_index_dedup, or"
                " use another score."
            )
        return super().check_config(data, config)

    def _check_untouched(self, data: ShardedData, block: Block) -> None:
        if self.scored_by not in ("accumulator", "frequency"):
            super()._check_untouched(data, block)
        level = f"Table {data.name!r}: the level 'untouched'"
        row = (1, data.shape[1])
        # Without an enforcer, no optimizer is known yet.
        reason = None if self.masks.enforcer is NO_ENFORCER else self._records(data)
        if isinstance(reason, str) and not self.counts_lookups:
            raise ValueError(f"{level} has no record of what was read: {reason}.")
        if not self.trust_record and (doubt := doubt_about(data)):
            raise ValueError(
                f"{level} can't prove that its record covers the training: {doubt}. If it does,"
                " pass trust_record=True."
            )
        if block != row:
            raise ValueError(f"{level} removes whole rows: the block must be 'row', not {block}.")
        if self.decay < 1:
            raise ValueError(f"{level} needs all lookups, and decay={self.decay} forgets old ones.")
        if data.copied:
            raise ValueError(f"{level} can't tell the rows of copies that are trained apart.")
        if self.scope == "global":
            raise ValueError(f"{level} applies to each table by itself: scope='global' moves it.")

    def unknown_tables(self, located: Located) -> list[str]:
        """Return the tables of ``located`` whose score needs Adagrad's sums but that no Adagrad
        steps on this rank. For the level ``"untouched"``, any optimizer that knows the rows that it
        has touched will do. Local."""
        if self.scored_by in ("norm", "frequency"):
            # These scores need no sums.
            return []
        sums = self.sums()
        unknown = []
        for name, data in located.items():
            if _totals_of(data, sums) is None and isinstance(self._records(data), str):
                unknown.append(name)
        return unknown

    def _records(self, data: ShardedData) -> list[LookupRecord] | str:
        """Return a record of each of this rank's shards of a table, by which the level
        ``"untouched"`` selects, or the reason why one is unknown."""
        if self.scored_by != "accumulator" or self.masks.enforcer is NO_ENFORCER:
            return "only score='accumulator' reads the state of optimizers"
        if self._known is None:
            self._known = self.masks.enforcer.records()
        return records_of(data, self._known)

    def look_up(self, located: Located) -> None:
        """Find lookups or sums of the rows of this rank's shards, for the next step. Local.

        Raises:
            ValueError: the score of a table is not known on this rank; names it.
        """
        self._totals, self._flagged, self._known = {}, set(), None
        self.scored_by = checks.choice("score", self.scored_by, SCORES)
        if self.scored_by == "norm":
            return
        # Call it for "frequency" too: it raises without an enforcer, which counts the lookups.
        sums = self.sums()
        for name, data in located.items():
            if self.scored_by == "frequency":
                # A lookup reads a whole row. Each element gets its share, so that rows of tables of
                # different width compare by bytes.
                counts = self.masks.tables.table(name).counts
                width = data.shape[1]
                self._totals[name] = [
                    RowTotals(rect, count, share=width, most=MOST_COUNTED)
                    for rect, count in counts.items()
                ]
            elif (totals := _totals_of(data, sums)) is not None:
                self._totals[name] = totals
            else:
                self._take_record(data)
            if name not in self._totals:
                raise ValueError(_no_sums_of(data, self._records(data)))

    def sums(self) -> Sums:
        """Return the squared gradients that Adagrad has summed, and their initial value, by weight.

        Raises:
            ValueError: no enforcer is attached.
        """
        if self.masks.enforcer is NO_ENFORCER:
            raise ValueError(
                f"score={self.scored_by!r} needs an attached MaskEnforcer: call"
                " MaskEnforcer(sparsifier).attach(optimizer), or use sparsify()."
            )
        return self.masks.enforcer.accumulators()

    def _totals_at(self, name: str, offset: tuple[int, int]) -> RowTotals:
        """Return the totals of the shard that holds the global (row, column) ``offset``."""
        here = Rect(*offset, 1, 1)
        for totals in self._totals.get(name, ()):
            if totals.rect.intersect(here) is not None:
                return totals
        raise ValueError(
            f"Data {name!r}: score={self.scored_by!r} is for the tables of models, from"
            " add_model()."
        )


def _no_sums_of(data: ShardedData, reason: object) -> str:
    """Return why a table has no score; ``reason``: why it has no record of what was read."""
    way = "Use score='norm', or 'frequency' for a fused table."
    if data.sharding == "data_parallel":
        way = (
            "It is data-parallel (replicated on all ranks), so model.fused_optimizer does not step"
            " it: give it a dense Adagrad and pass both, as in sparsify(model,"
            " [model.fused_optimizer, dense_optimizer]); or use score='norm'."
        )
    return (
        f"Table {data.name!r}: no Adagrad steps it, so there are no sums of squared gradients."
        f" {way} level='untouched' needs Adagrad, Adam or RMSprop without weight decay, AdamW, or"
        f" score='frequency': {reason}."
    )


def _totals_of(data: ShardedData, sums: Sums) -> list[RowTotals] | None:
    """Return the totals of this rank's shards of a table; None if a shard has no sums."""
    found = []
    for rect, weights in data.shards:
        of_shard = sums.get(weights)
        if of_shard is None:
            return None
        found.append(RowTotals(rect, *of_shard))
    return found

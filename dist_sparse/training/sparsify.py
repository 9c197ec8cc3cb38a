"""`sparsify()`: one call that prunes a model during training.

It attaches a sparsifier, its schedule and an enforcer; :class:`SparseTraining`, which it returns,
steps, validates, saves and detaches them together.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from dist_sparse import checks
from dist_sparse.enforcer import Hook, Hooks
from dist_sparse.enforcer.enforcer import MaskEnforcer, Walked
from dist_sparse.groups import warn_on_first_rank, world_group
from dist_sparse.optimizers import Optimizers, unwrapped_optimizer
from dist_sparse.records import GuardCheck, removed_share
from dist_sparse.schedulers import ReadyDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.masks import removed_lookups
from dist_sparse.sparsifiers.score import BlockShape
from dist_sparse.tables.modules import ModelTables, torchrec_port
from dist_sparse.tables.shards import ROW
from dist_sparse.text import (
    block_shape_text,
    count,
    level_text,
    number_of,
    percent,
    shape_text,
    table_lines,
    wrapped,
)
from dist_sparse.training.arguments import (
    Advanced,
    Level,
    Levels,
    Schedule,
    SparsifyArgs,
    UpdateGuard,
    by_table,
    final_levels,
    left_dense,
)
from dist_sparse.training.replicas import compare_replicas, find_replicas
from dist_sparse.training.state import prepare_load, save


class SparseTraining:
    """A sparsifier, its schedule and its enforcer, attached to a model and its optimizers; made by
    :func:`sparsify`.

    As a context manager it detaches at the end of the block.

    Attributes:
        sparsifier: the :class:`~dist_sparse.ImportanceSparsifier`; its ``scored_by`` is the score
            in use.
        scheduler: the schedule of its ``sparsity_level``.
        enforcer: the :class:`~dist_sparse.MaskEnforcer`.
        left_dense: tables that are not pruned, with the reason.
        guard: the guard of ``Advanced(guard=...)``, or one that allows every mask update.

    Example::

        >>> import torch
        >>> from dist_sparse import sparsify
        >>> model = torch.nn.EmbeddingBag(100, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with sparsify(model, optimizer, level=0.75, end=1, every=1) as sparse:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.arange(100).view(2, 50)).sum().backward()
        ...         optimizer.step()
        ...         sparse.step()
        >>> sparse
        SparseTraining(step 3, schedule ended at 1, level 0.75 by norm, 1 table, detached)
        >>> sparse.sparsity
        0.75
        >>> print(sparse.summary())
        SparseTraining(step 3, schedule ended at 1, level 0.75 by norm, 1 table, detached)
        table   shape    sharding    block  level  sparsity  removed blocks
        ------  -------  ----------  -----  -----  --------  --------------
        weight  100 x 8  replicated  row     0.75    0.7500              75
        lookups of removed rows: 75.0% (weight 75.0%)
    """

    def __init__(
        self,
        sparsifier: ImportanceSparsifier,
        scheduler: ReadyDataScheduler,
        enforcer: MaskEnforcer,
        left_dense: Mapping[str, str],
        guard: UpdateGuard | None,
    ) -> None:
        self.sparsifier = sparsifier
        self.scheduler = scheduler
        self.enforcer = enforcer
        self.left_dense = dict(left_dense)
        # Attached by sparsify(), as are the hooks.
        self.guard = guard or UpdateGuard()
        # Set by sparsify() and _attach(), once the ranks have agreed.
        self._auto_step = False
        self._hooks = Hooks()
        # Unsharded collections by path, until a forward has run in one of them.
        self._unused: dict[str, nn.Module] = {}
        # Tables that are compared with the other ranks' tables before each mask update.
        self._replicas: list[str] = []
        # Whether the warning of an early end has yet to be given.
        self._warns = True

    def step(self) -> None:
        """Call after each optimizer step: update the masks when the schedule has an update.
        Collective then, otherwise local.

        Raises:
            RuntimeError: ``auto_step=True`` calls it already, or no forward has used the tables
                (the model was wrapped or copied after :func:`sparsify`).
            ValueError: see :meth:`~dist_sparse.BaseDataSparsifier.step`; on every rank.
        """
        if self._auto_step:
            raise RuntimeError(
                "auto_step=True calls step() after each optimizer step: do not call it as well."
            )
        self._step()

    @property
    def finished(self) -> bool:
        """Whether the last mask update of the schedule has happened."""
        # last_epoch counts steps taken: it is end + 1 after the step of the update at `end`.
        passed = self.scheduler.last_epoch > self.scheduler.window.last
        return passed and not self.guard.owed

    @property
    def sparsity(self) -> float:
        """The achieved fraction of removed blocks, over all tables and ranks. Collective if tables
        are sharded."""
        return removed_share(self.sparsifier.table_stats())

    @property
    def validations(self) -> list[GuardCheck]:
        """The validations of the guard and their outcomes, in order; not saved."""
        return self.guard.validations

    @property
    def partial_tables(self) -> list[str]:
        """The tables that this rank holds in part only, or not at all. Local."""
        located = self.sparsifier.masks.tables.locate()
        return [name for name, data in located.items() if dict(data.shards).keys() != {*data.rects}]

    def summary(self) -> str:
        """Return a text table of what is pruned and what is left dense, and the share of the
        lookups that hit removed rows: of all with ``score="frequency"``, otherwise of a sample
        since the last mask update (one training forward in 16). Collective if tables are
        sharded."""
        head = ("table", "shape", "sharding", "block", "level", "sparsity", "removed blocks")
        rows = []
        for table in self.sparsifier.table_stats():
            shape = shape_text(table.shape)
            block = block_shape_text(table.sparse_block_shape)
            level = level_text(self.sparsifier.data_groups[table.name]["sparsity_level"])
            removed = f"{table.sparsity:.4f}", count(table.removed_blocks)
            rows.append((table.name, shape, table.sharding, block, level, *removed))
        dense = [f"{name} is left dense: {reason}" for name, reason in self.left_dense.items()]
        below = [*dense, f"lookups of removed rows: {self._lookups_text()}"]
        lines = [*wrapped(repr(self), "  "), *table_lines(head, rows, right={4, 5, 6})]
        return "\n".join([*lines, *chain(*(wrapped(text, "  ") for text in below))])

    def _lookups_text(self) -> str:
        known = removed_lookups(self.sparsifier.masks.tables, "summary()")
        shares = []
        for name, (lookups, removed) in known.items():
            # A table that no forward has looked up has no share.
            if lookups:
                shares.append(f"{name} {percent(removed / lookups)}")
        if not shares:
            return "not known (no training forward was counted)"
        all_lookups, all_removed = map(sum, zip(*known.values(), strict=True))
        return f"{percent(all_removed / all_lookups)} ({', '.join(shares)})"

    def state_dict(self) -> dict[str, Any]:
        """Return masks, counts of lookups, configurations, the score and the schedule, for
        torch.save and torch.distributed.checkpoint: see
        :meth:`~dist_sparse.BaseDataSparsifier.state_dict`."""
        return save(self.sparsifier, self.scheduler, self.guard)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`: masks, configurations, score and the whole schedule, which
        replace the arguments of :func:`sparsify`. The curve, ``norm``, ``decay`` and
        ``optimizer_state`` are not saved: pass the same ones. Removed weights are zeroed at once.
        Collective.

        To go back to earlier weights (early stopping), load the model's state too, before the next
        forward::

            sparse.load_state_dict(best["sparse"])
            model.load_state_dict(best["model"])

        Raises:
            ValueError: a part is missing, unknown or invalid, does not fit what is registered,
                differs between ranks, masks and schedule were not saved together, or no mask update
                could follow. On every rank, and nothing has changed.

        A rank that runs out of memory while it zeroes removed weights raises alone, with the whole
        state loaded: ``sparse.sparsifier.apply_masks()`` zeroes them.
        """
        self.prepare_load(state_dict)()

    def prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state as :meth:`load_state_dict` does, and return the local function that loads
        it. Collective; nothing changes before the function is called."""
        return prepare_load(self.sparsifier, self.scheduler, self.guard, state_dict)

    def detach(self) -> None:
        """End enforcement: the model trains on as if it had never been sparsified. Zeros stay until
        an optimizer changes them. Warns if the last mask update of the schedule has not
        happened."""
        if self._detach_parts():
            self.warn_of_early_end()

    def __enter__(self) -> SparseTraining:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.detach()
        else:
            self._detach_parts()

    def __repr__(self) -> str:
        step = self.scheduler.last_epoch
        end = self.scheduler.end
        schedule = f"step {step} of {end}"
        if end is None:
            schedule = f"step {step}"
        elif step > end:
            schedule = f"step {step}, schedule ended at {end}"
        parts = [schedule, f"{self._level_text()}by {self.sparsifier.scored_by}"]
        if self.sparsifier.scope == "global":
            parts.append("over all tables")
        parts.append(number_of(len(self.sparsifier.data_groups), "table"))
        if self.left_dense:
            parts.append(f"{len(self.left_dense)} left dense")
        parts.append("attached" if self.enforcer.attached else "detached")
        return f"SparseTraining({', '.join(parts)})"

    def _level_text(self) -> str:
        """Return the lowest and the highest final level; empty for schedules without one."""
        # A word ("untouched") has no order among numbers: it comes last.
        in_order = sorted(self._final_levels(), key=lambda level: (isinstance(level, str), level))
        # A thousand tables may have a thousand levels: the lowest and the highest are shown, once
        # if they are equal.
        ends = dict.fromkeys(map(level_text, in_order[:1] + in_order[-1:]))
        return f"level {' to '.join(ends)} " if ends else ""

    def _final_levels(self) -> list[Any]:
        # A schedule of functions has none.
        final = getattr(self.scheduler, "final", {})
        return [*final.values()] if isinstance(final, dict) else [final]

    def _attach(self, walked: Walked, optimizer: Optimizers, auto_step: bool) -> None:
        """Attach the enforcer, and follow the optimizers' steps and the forwards of unsharded
        collections."""
        self.enforcer.attach_to(walked, [optimizer])
        self._auto_step = auto_step
        if auto_step:
            optimizers = self.enforcer.optimizers
            if not optimizers:
                raise ValueError("Invalid auto_step=True: there is no optimizer to follow.")
            # The hook keeps this object alive as long as the optimizer, even if the caller drops
            # it.
            hook = Hook(lambda *_: self._step())
            self._hooks.add(unwrapped_optimizer(optimizers[-1]).register_step_post_hook(hook))
        (modules,) = walked.modules.values()
        unused = dict(_unsharded_collections(modules, self.sparsifier.data_groups))
        self._unused = unused
        for module in unused.values():
            # One forward of any of them shows that this model trains.
            hook = Hook(lambda *_: unused.clear())
            self._hooks.add(module.register_forward_pre_hook(hook))

    def _step(self) -> None:
        # If the model is wrapped in DistributedModelParallel or copied after sparsify(), modules
        # other than the registered ones run.
        if self._unused:
            raise RuntimeError(
                f"No forward has used the collections {sorted(self._unused)} since sparsify(): the"
                " model was wrapped or copied later. Call sparsify() on the"
                " DistributedModelParallel."
            )
        # The schedule has set enable_mask_update for this step, and the guard may hold it back: in
        # this order.
        self.guard.before_step()
        if self._replicas and self.sparsifier.enable_mask_update:
            compare_replicas(self.sparsifier, self._replicas)
        self.sparsifier.step()
        self.guard.after_step()
        # enable_mask_update is still as before_step() has set it.
        removed_nothing = (
            self.sparsifier.enable_mask_update
            and self.sparsifier.masks.tables.keeps_all
            and checks.UNTOUCHED in self._final_levels()
        )
        self.scheduler.step()
        # Last: a warning may be an error, and only the first rank warns.
        if removed_nothing:
            warn_on_first_rank(
                'level="untouched" has removed no row: training has touched every row, or its'
                " lookups have no record (optimizer state was not loaded, or reset).",
                stacklevel=3,
            )

    def _detach_parts(self) -> bool:
        """Detach; return whether it was attached."""
        attached = self.enforcer.attached
        self._hooks.remove()
        self._unused = {}
        self.enforcer.detach()
        return attached

    def warn_of_early_end(self) -> None:
        """Warn, once, if the last mask update of the schedule has not happened. Local."""
        if self._warns and not self.finished and self.scheduler.end is not None:
            self._warns = False
            warn_on_first_rank(
                f"Sparse training stopped at step {self.scheduler.last_epoch}, before the last mask"
                f" update (end={self.scheduler.end}).",
                stacklevel=3,
            )


def sparsify(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    level: Levels | None = None,
    budget: float | str | None = None,
    end: int | None,
    begin: int = 0,
    every: int = 100,
    block: BlockShape = (1, ROW),
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
    schedule: Schedule | None = None,
    advanced: Advanced | None = None,
) -> SparseTraining:
    """Prune the embedding tables of a model during training. Collective: every rank of the world
    must call it.

    Tables with fewer than 16 rows (``Advanced(min_rows=...)``), frozen tables (``requires_grad``
    False) and position embeddings (a word of the name is ``pos``, ``position(s)``, ``positional``
    or ``wpe``) that ``include`` does not match stay dense; ``left_dense`` lists them. The last
    block of a table is removed only at ``level`` 1. The row of ``padding_idx`` is already zero: it
    is among the first to be pruned, which changes nothing. Put other rows that must stay, such as
    the rows of [MASK] tokens, into a separate table named in ``exclude``.

    Args:
        model: a DistributedModelParallel, a DDP module or any module, as it is trained: wrap it
            first. On several ranks tables outside a wrapper are a warning; if all ranks hold the
            same now, they are compared at mask updates.
        optimizer: the optimizer that steps it, or a sequence of all of them.
        level: final fraction of removed blocks in [0, 1], for all tables, or by globs over table
            names and fully qualified names; if several match, the last counts. Tables that no glob
            matches stay at 0. ``"untouched"`` removes the rows that training has never looked up,
            and no others, which is lossless on training data: by the state of Adagrad, Adam, AdamW
            or RMSprop (docs/planning.md#rows-never-read), or by counts with
            ``Advanced(score="frequency")``; once at ``end``, or as ``schedule="constant"`` says.
            The rules are the same as for :func:`~dist_sparse.remove_untouched`, which does it in
            one call after training. A row that is looked up later comes back at the next mask
            update, at 0. A warning says so if it removes nothing.
        budget: instead of ``level``, the most that the tables may take at the end: bytes, or a
            share of them, ``"20%"`` or 0.2. It counts the bytes that are served, as
            :func:`~dist_sparse.plan` does, in the dtype of training. All tables then have the same
            level, which rises along the schedule. Blocks must be whole rows, or columns of rotated
            tables: finer ones are served as zeros, and save no bytes.
        end: the last step of mask updates. Steps count from 0, so ``level`` is reached by call
            number ``end + 1`` of ``step()``; after it masks stay as they are. None removes
            ``level`` from ``begin`` on, and keeps updating masks.
        begin: the first step of mask updates.
        every: steps between mask updates, at most ``end - begin``.
        block: shape of the blocks that are removed as a whole: ``(rows, columns)``, ``"row"`` or
            ``(1, ROW)`` for whole rows, ``"col"`` or ``(COL, 1)`` for whole columns, or text such
            as ``"1x4"``.
        include: globs over table names and fully qualified names; None is every table.
        exclude: globs of what to leave out; a module that is refused can be left out by its path.
        schedule: ``"constant"``, ``"cosine"``, ``"cubic"``, ``"exponential"``, ``"linear"``,
            ``"one_shot"`` (at ``begin``), or a ready scheduler's class that takes ``final``,
            ``begin``, ``end`` and ``every``. None is ``"cubic"``, or ``"constant"`` with
            ``end=None``.
        advanced: what few jobs need: scores, norms, floors, a guard, rotations. See
            :class:`~dist_sparse.Advanced`.

    Returns:
        An object with ``step()``, to be called after each optimizer step, ``summary()``,
        ``state_dict()``, ``load_state_dict()`` and ``detach()``.

    Raises:
        ValueError, AssertionError: an argument is invalid, or tables are already sparsified or have
            codes; on every rank, even if only one rank is wrong. Nothing is left attached.

    Example::

        >>> import torch
        >>> from dist_sparse import sparsify
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> sparse = sparsify(model, optimizer, level=0.8, block="row", end=4, every=2)
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     model(torch.randint(100, (4, 10))).sum().backward()
        ...     optimizer.step()
        ...     sparse.step()
        >>> int((model[0].weight == 0).all(dim=1).sum())
        80
        >>> sparse.detach()
    """
    world = world_group()
    # 1. Check everything that needs no hooks. An error on one rank is an error on all.
    with world.agreeing("sparsify()") as facts:
        args = SparsifyArgs(
            level=level,
            budget=budget,
            end=end,
            begin=begin,
            every=every,
            block=block,
            include=include,
            exclude=exclude,
            schedule=schedule,
            advanced=advanced,
        )
        # Resolved: text in the case that the parts use, and defaults.
        more: Any = args.advanced
        source = ModelTables(model, include=include, exclude=exclude, dense=more.dense)
        located = {data.name: data for data in source.locate()}
        # Walked once for all steps: a model may have many modules.
        modules = dict(model.named_modules())
        unpruned = left_dense(model, modules.values(), located, args)
        pruned = {name: data for name, data in located.items() if name not in unpruned}
        floors = by_table("floor", more.floor, pruned, unpruned)
        finals = final_levels(args, located, pruned, unpruned, floors)
        facts.update(args.facts(located))
        if emptied := [name for name, final in finals.items() if final == 1]:
            warn_on_first_rank(
                f"level=1.0 removes all weights of {emptied}: their lookups return zeros. Below 1,"
                " one block of each table stays.",
                stacklevel=2,
            )
        # The level starts at 0; the schedule raises it.
        sparsifier = ImportanceSparsifier(
            sparsity_level=0.0,
            sparse_block_shape=args.block,
            norm=more.norm,
            score=more.score or "norm_accumulator",
            decay=more.decay,
            scope=more.scope,
            floors=floors,
        )
        sparsifier.trust_record = more.trust_record
        enforcer = MaskEnforcer(sparsifier, more.optimizer_state)
    # 2. Register the pruned tables. exclude= takes globs: a table may be called "a[0]".
    excluded = [*checks.name_list("exclude", exclude), *map(glob.escape, unpruned)]
    sparsifier.add_model(model, include=include, exclude=excluded, dense=more.dense)
    # Tables and modules as found above: nothing moves them before this call returns.
    walked = Walked(pruned, {model: modules})
    scheduler = _scheduler(args, sparsifier, finals)
    training = SparseTraining(sparsifier, scheduler, enforcer, unpruned, more.guard)
    # 3. Attach hooks. From here on an error on any rank must remove them on all.
    try:
        with world.agreeing("sparsify()"):
            training._attach(walked, optimizer, more.auto_step)
            # Only the attached enforcer knows which tables' Adagrad sums can be read. A score that
            # was asked for must be known for every table; the default falls back to the norm below.
            if more.score is not None:
                sparsifier.look_up(walked.located)
            # Tables that no glob of level= matches stay at 0.
            levels = {**dict.fromkeys(walked.located, 0.0), **finals}
            sparsifier.check_levels(levels, walked.located)
            unknown = sparsifier.unknown_tables(walked.located)
        # On all ranks or on none: they must compare blocks alike.
        if world.all_reduce(torch.tensor(len(unknown))):
            sparsifier.scored_by = "norm"
        training._replicas = find_replicas(walked.located)
        if more.rotate is not None:
            # The enforcer also knows which optimizers step the tables, which a rotation reads.
            more.rotate.rotate(sparsifier)
    except BaseException:
        training._detach_parts()
        raise
    # Last: a call that is refused takes no guard from the training that it belongs to.
    training.guard.attach(sparsifier, scheduler)
    return training


def _scheduler(
    args: SparsifyArgs, sparsifier: ImportanceSparsifier, finals: Mapping[str, Level]
) -> ReadyDataScheduler:
    """Construct the schedule. Collective."""
    final: Any = {glob.escape(name): level for name, level in finals.items()}
    # Where all tables have one level, one number keeps the repr, the state and the facts short.
    if list(set(finals.values())) == [args.level]:
        final = args.level
    wrong = f"Invalid schedule={args.schedule!r}: must make a ready scheduler"
    with world_group().agreeing("sparsify()"):
        try:
            scheduler = args.schedule(
                sparsifier,
                "sparsity_level",
                final=final,
                begin=args.begin,
                end=args.end,
                every=args.every,
            )
        except TypeError as error:
            # A user's class without these parameters fails before it communicates, and perhaps on
            # one rank alone.
            raise ValueError(f"{wrong} of final, begin, end and every: {error}.") from error
        if not isinstance(scheduler, ReadyDataScheduler):
            raise ValueError(f"{wrong}, and returned {scheduler!r}.")
    return scheduler


def _unsharded_collections(
    modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield TorchRec's unsharded collections of registered tables, by path.

    DistributedModelParallel replaces them: a model that is wrapped later trains other modules.
    """
    torchrec = torchrec_port()
    if torchrec is None:
        return
    # Registered names are "collection/table" where two collections have tables of one name.
    registered = {name.rpartition("/")[2] for name in names}
    for path, module in modules.items():
        collection = torchrec.collection(module)
        if collection is not None and not registered.isdisjoint(collection.embeddings()):
            yield path or type(module).__name__, module


def sparsifier_of(sparse: Any) -> BaseDataSparsifier:
    """Return the sparsifier of a SparseTraining, or the sparsifier itself."""
    sparsifier = sparse.sparsifier if isinstance(sparse, SparseTraining) else sparse
    if not isinstance(sparsifier, BaseDataSparsifier):
        raise ValueError(
            f"Invalid sparse of type {type(sparse).__name__}: must be what remove_untouched() or"
            " sparsify() returned, or a sparsifier."
        )
    return sparsifier

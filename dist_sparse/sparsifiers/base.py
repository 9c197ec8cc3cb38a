"""The public base class of all data sparsifiers.

:class:`BaseDataSparsifier` keeps the names, signatures and results of its ancestor in
``torch.ao.pruning._experimental`` for plain data, and adds sharded tables and whole models. It
uses two stores with one interface: :mod:`~dist_sparse.sparsifiers.dense_store` for plain data, and
:mod:`~dist_sparse.sparsifiers.packed_store` for sharded tables, whose packed bits are stored with
their shards.
"""

import copy
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dist_sparse.groups import set_weights_device, world_group
from dist_sparse.masking.device import with_one_retry
from dist_sparse.records import TableStats
from dist_sparse.sparsifiers.dense_store import (
    Configs,
    DenseStore,
    Masked,
    check_name,
    refuse_attribute,
)
from dist_sparse.sparsifiers.masks import NO_ENFORCER, Masks, Recorder
from dist_sparse.sparsifiers.packed_store import PackedStore, TableMasks
from dist_sparse.sparsifiers.pieces import mapping_of, tables_of
from dist_sparse.sparsifiers.step import MaskUpdater
from dist_sparse.tables.modules import ModelTables, TensorSource, is_sharded_tensor
from dist_sparse.tables.shards import ShardedData, Source

# Exactly these types, as in the ancestor: subclasses may compute their weight.
EMBEDDING_TYPES = {nn.Embedding, nn.EmbeddingBag}
SUPPORTED_TYPES = {Tensor, nn.Parameter, *EMBEDDING_TYPES}

# Names that repr() shows.
_SHOWN = 20

# Attributes that a copy does not get. An instance has `step` if someone has replaced the method: it
# is bound to the original.
_UNSAVED = {"masks", "step"}

Found = TypeVar("Found")


class BaseDataSparsifier(MaskUpdater):
    """Keeps a mask for every registered tensor. Subclasses define :meth:`update_mask`.

    Args:
        data_list: ``(name, data)`` pairs to register at once, with the defaults as their
            configuration.
        **defaults: configuration of every registered name, unless ``add_data`` or ``add_model``
            overrides it.

    Attributes:
        defaults: the keyword arguments.
        data_groups: name -> its configuration, read at every step.
        state: name -> ``{"mask": the live mask}`` of plain data.
        enable_mask_update: ``step()`` does nothing while False.
        step_count: calls of ``step()`` so far, including calls that did nothing.
        masks: all masks, and what is attached. For the rest of the package.
        counts_lookups: whether an enforcer counts lookups of the rows of fused tables; set before
            ``add_model``.
        trains_removed: whether scores need the gradients of removed rows, whose ids an enforcer
            drops otherwise.

    Example::

        >>> import torch
        >>> from dist_sparse.extend import BaseDataSparsifier
        >>> class DropNegative(BaseDataSparsifier):
        ...     def update_mask(self, name, data, **config):
        ...         self.get_mask(name)[data < config["below"]] = 0
        >>> sparsifier = DropNegative(
        ...     [("weight", torch.tensor([[1.0, -2.0], [-3.0, 4.0]]))], below=0.0
        ... )
        >>> sparsifier.step()
        >>> sparsifier.get_data("weight", return_original=False)
        tensor([[1., 0.],
                [0., 4.]])
    """

    count_dtype = torch.int32

    def __init__(self, data_list: Iterable[tuple[str, Any]] | None = None, **defaults: Any) -> None:
        self.defaults: dict[str, Any] = defaults
        self.data_groups: dict[str, dict[str, Any]] = {}
        self.masks = Masks()
        # Last, because registering uses all attributes above, in subclasses too.
        for name, data in data_list or ():
            self.add_data(name, data)

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        return self.masks.plain.state

    # The ancestor's name.
    @property
    def _container(self) -> nn.Module:
        return self.masks.plain.container

    def prepare(self, model: Any, config: Any) -> None:
        """Raise NotImplementedError, as in the ancestor."""
        raise NotImplementedError("this function is undefined for this class")

    def add_data(self, name: str, data: Any, reuse_mask: bool = True, **config: Any) -> Tensor:
        """Register ``data`` under ``name``. Never communicates.

        The weight itself is held, never a copy. A known name is replaced, with a UserWarning: its
        configuration stays except for what is passed, its mask stays if ``reuse_mask`` is given.

        Args:
            name: not empty, without dots.
            data: exactly a Tensor, Parameter, Embedding or EmbeddingBag, or a ShardedTensor or
                DTensor.
            reuse_mask: keep the mask of the replaced data, which must have the same shape.
            **config: overrides of the defaults; ``mask`` starts from a given mask,
                ``parametrization`` replaces ``mask * x``.

        Returns:
            The masked data; of sharded data, the data itself.

        Raises:
            TypeError, KeyError: the name can't be used.
            AssertionError: the type is not supported, or the old mask does not fit.
            ValueError: the configuration or the sharded data can't be used, or an enforcer is
                attached.
        """
        check_name(name)
        self._refuse_while_enforced()
        weight = self._extract_weight(data)
        if is_sharded_tensor(weight):
            return self._add_sharded(name, weight, config)
        if type(data) not in SUPPORTED_TYPES:
            raise AssertionError(f"specified data type:{type(data)} not supported at the moment")
        refuse_attribute(name)
        if name in self.masks.tables:
            raise ValueError(f"Name {name!r} belongs to a sharded table already.")
        known = name in self.masks.plain
        if known:
            warnings.warn(
                "Replacing existing data of the same name. - Did you mean a different name?",
                stacklevel=2,
            )
        # Known data keeps the part of its configuration that the caller does not pass.
        group = self._overlaid(self.data_groups.get(name, self.defaults), config)
        mask = group.get("mask", torch.ones_like(weight))
        if known and reuse_mask:
            mask = self.get_mask(name)
            if mask.shape != weight.shape:
                raise AssertionError(
                    "to retain the old mask, the shape of the new data must be the same as the"
                    " previous one"
                )
        masked = self.masks.plain.add(name, weight, mask, group.get("parametrization", Masked))
        # Replaced data comes last, as in the ancestor.
        self.data_groups.pop(name, None)
        self.data_groups[name] = group
        return masked

    def add_model(
        self,
        model: nn.Module,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        dense: bool | str | list[str] | None = None,
    ) -> list[str]:
        """Register the embedding tables of a model: DistributedModelParallel, DDP or plain.
        Collective: every rank of the world must call it.

        Args:
            model: its tables are located again whenever they are needed, so resharding and loading
                are followed.
            include: globs over table names and fully qualified names; None is every table.
            exclude: globs of what to leave out.
            config: overrides of the defaults: either for all (``{"sparsity_level": 0.5}``) or by
                glob (``{"user_*": {...}}``).
            dense: globs of other parameters to register too, True for all. Their names are the
                fully qualified ones with '/' for '.'.

        Returns:
            The names registered.

        Raises:
            ValueError: a pattern matches nothing, a module can't be sparsified, a key of ``config``
                or a name is known to be wrong, or the ranks disagree; on every rank, and nothing is
                registered.
        """
        with world_group().agreeing(f"add_model() of {type(self).__name__}") as facts:
            self._refuse_while_enforced()
            source = ModelTables(model, include=include, exclude=exclude, dense=dense)
            located = source.locate()
            overrides = _overrides(config or {}, self.defaults, located)
            configs, register = self._checked(source, located, overrides)
            for data in located:
                for shard in data.shards:
                    set_weights_device(shard.tensor.device)
                where = [data.shape, str(data.dtype), data.ranks, data.tiling]
                facts[f"table {data.name!r}"] = [*where, configs[data.name]]
        # All ranks have agreed. Registering can't fail.
        register()
        return list(configs)

    def delete_data(self, name: str) -> None:
        """Forget plain data without touching it. Never communicates.

        Raises:
            ValueError: the name does not belong to plain data.
        """
        self._refuse_while_enforced()
        if self._store(name) is not self.masks.plain:
            raise ValueError(f"{name!r} is a sharded table: squash_mask() ends its mask.")
        self.masks.plain.drop(name)
        del self.data_groups[name]

    # The ancestor's name.
    _delete_data = delete_data

    def _extract_weight(self, data: Any) -> Any:
        """Return the weight of an embedding module, and anything else as it is. The ancestor's
        name."""
        return data.weight if type(data) in EMBEDDING_TYPES else data

    def get_data(self, name: str, return_original: bool = True) -> Tensor:
        """Return the registered tensor, or its effective weight if not ``return_original``. For a
        sharded table: this rank's only shard.

        Raises:
            ValueError: unknown, squashed (the original), or not exactly one shard on this rank.
        """
        store = self._store(name)
        self.masks.enforcer.settle()
        return store.weight(name) if return_original else store.effective(name)

    def apply_masks(self) -> None:
        """Write zero to every removed weight of the sharded tables, which optimizers may have
        revived. Local, unless shards have moved since the last step: then collective. Takes about
        as long as a mask update. After it, any row counts as written."""
        for data in self.masks.tables.current().values():
            self.masks.tables.apply(data)
        self.masks.note_write()
        self.masks.enforcer.renew()

    # Inspection: nothing below changes a mask or a weight. Collective methods first check that all
    # ranks make the same call.

    def get_mask(self, name: str) -> Tensor:
        """Return the mask, 1 = kept, 0 = removed.

        For plain data it is the live object, whose in-place edits count; for a sharded table, this
        rank's only shard, unpacked (int8); inside :meth:`update_mask`, the one being updated.

        Raises:
            ValueError: unknown, or a table with several shards or none on this rank, or with shards
                that have moved since the last step.
        """
        return self._store(name).mask(name)

    def local_masks(self, name: str) -> list[tuple[tuple[int, int], Tensor]]:
        """Return this rank's pieces of a mask: ``((row, column) offset, int8 mask)`` of each shard,
        in their order.

        Raises:
            ValueError: unknown name, or the shards have moved since the last step.
        """
        return self._store(name).local_masks(name)

    def full_mask(self, name: str) -> Tensor:
        """Return the global mask, int8 ``(rows, columns)``. Collective over the ranks of a sharded
        table; of plain data, over the ranks of all sharded tables. For tests and inspection.

        Raises:
            ValueError: unknown name, or another rank asks for another; on every rank.
        """
        if name in self.masks.tables:
            return self.masks.full_mask(name)
        # Other ranks may have given the name of a sharded table, and wait for this one.
        with self.masks.tables.agreeing("full_mask()") as noted:
            for facts, _ in noted:
                facts["name"] = name
            self._store(name)
        return self.get_mask(name).to(torch.int8)

    def table_stats(self) -> list[TableStats]:
        """Return counts of every registered name, the same on every rank. Collective if sharded
        tables are registered: one all-reduce after an exchange of status."""
        with self.masks.tables.jointly("table_stats()"):
            return [*self._in_order(self.masks.table_stats(self.data_groups)).values()]

    def dead_rows(self) -> dict[str, int]:
        """Return the number of rows with nothing left, by name, the same on every rank. No
        rank sees the rows of a table cut by columns: unless its blocks are as wide as the table, it
        is left out. Collective as :meth:`table_stats`."""
        with self.masks.tables.jointly("dead_rows()"):
            return self._in_order(self.masks.dead_rows())

    def count_revived(self) -> dict[str, int]:
        """Return how many removed weights are not zero, by name, all replicas counted; squashed
        names are left out. Collective as :meth:`table_stats`.

        Weights are read as they are stored. With an enforcer attached, what optimizers have revived
        since the last forward is zeroed before the next; ``enforcer.settle()`` zeroes it now.
        """
        with self.masks.tables.jointly("count_revived()"):
            located = self.masks.tables.current_for("count_revived()")
            return self._in_order(self.masks.count_revived(located))

    def fingerprint(self) -> dict[str, str]:
        """Return a hash of every global mask. It depends on shape and mask alone, not on sharding,
        blocks or ranks. Collective as :meth:`table_stats`."""
        with self.masks.tables.jointly("fingerprint()"):
            return self._in_order(self.masks.fingerprints("fingerprint()"))

    def audit(self) -> dict[str, str]:
        """Return :meth:`fingerprint`, after comparing the masks of all holders (replicas, and the
        bits of blocks that a shard border cuts) and masks with weights. Collective as
        :meth:`table_stats`; reads all weights once, in chunks.

        Without an enforcer, optimizers revive removed weights: a UserWarning says how many are not
        zero, plain data left out. With one, what has been revived since the last forward is zeroed
        first.

        Raises:
            ValueError: on every rank; names table, place and ranks that differ; or, with an
                enforcer attached, how many removed weights of which table are not zero: they were
                written through ``.data`` or by other code whose writes torch does not count.

        Example::

            >>> import torch
            >>> from dist_sparse import DataNormSparsifier
            >>> table = torch.nn.EmbeddingBag(10, 4)
            >>> sparsifier = DataNormSparsifier(
            ...     sparsity_level=0.5, sparse_block_shape="row", norm="L2"
            ... )
            >>> names = sparsifier.add_model(table)
            >>> sparsifier.step()
            >>> list(sparsifier.audit())
            ['weight']
        """
        with self.masks.tables.jointly("audit()"):
            return self._in_order(self.masks.audit())

    def record(self) -> Recorder:
        """Return a recorder of what mask updates change in sharded tables, from now on: one per
        sparsifier, made at the first call. Every rank must call it, or none; does not
        communicate."""
        self.masks.recorder = self.masks.recorder or Recorder()
        return self.masks.recorder

    def stop_recording(self) -> None:
        """Forget :meth:`record`'s recorder. Every rank must call it, or none; does not
        communicate."""
        self.masks.recorder = None

    # The end of masks, and their states.

    def squash_mask(
        self,
        *args: Any,
        leave_parametrized: bool = True,
        names: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make masks permanent and forget them; mask and configuration of plain data remain
        readable. Already squashed names are skipped.

        Args:
            leave_parametrized: write the masked data into the user's own tensor; False leaves it
                dense.
            names: which; None is all.

        Raises:
            ValueError: a name is unknown, or a mask that is to be written does not fit its data;
                nothing is squashed.
        """
        packed = self.masks.tables
        chosen = dict.fromkeys(self.data_groups if names is None else names)
        # Raises for unknown names.
        for name in chosen:
            self._store(name)
        sharded = [name for name in chosen if name in packed]
        # What can fail comes first. Collective only if a sharded table is squashed.
        located = packed.current() if sharded else {}
        # Skips the sharded tables, which this store does not know.
        self.masks.plain.squash([*chosen], write=leave_parametrized)
        for name in sharded:
            if leave_parametrized:
                packed.apply(located[name])
            packed.drop(name)
            del self.data_groups[name]
        self.masks.forget_update()
        self.masks.note_write()
        self.masks.enforcer.renew()

    def state_dict(self) -> dict[str, Any]:
        """Return masks, configurations and plain data, for torch.save and
        torch.distributed.checkpoint.

        Plain data is in the ancestor's format. ``sharded`` holds tables: by torch.save this rank's
        bits, to be loaded where the same shards are; by ``dcp.save({"sparse": sparsifier})`` the
        whole masks, 1 bit per block, to be loaded on any number of ranks and any sharding. Local,
        unless shards have moved since the last step, or eight blocks of a row that share a byte are
        in different shards: then collective.
        """
        # Bring masks to their shards, and save weights as a forward would read them.
        self.masks.tables.current()
        self.masks.enforcer.settle()
        dense = self.masks.plain
        packed = self.masks.tables
        configs = self.data_groups
        plain = {name: copy.deepcopy(configs[name]) for name in dense.names}
        saved = {**dense.state_dict(), "data_groups": plain}
        if not packed:
            return saved
        if not plain:
            # Without the empty mappings: on a rank without a shard of some table, DCP 2.13 looks
            # for an entry of each, and fails.
            saved.clear()
        return {**saved, "sharded": packed.state_dict(configs)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore :meth:`state_dict`. A refused state changes nothing. Collective if sharded tables
        are registered.

        Args:
            strict: replace everything; otherwise names that are registered already stay as they
                are.

        Raises:
            RuntimeError: a plain name lacks its configuration or data.
            ValueError: a registered table has no masks in the state, they do not cover its shards,
                do not fit together over ranks or were changed since, or no step could follow its
                configuration; on every rank.
        """
        self.prepare_load(state_dict, strict)()

    def prepare_load(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Callable[[], None]:
        """Check a state as :meth:`load_state_dict` does, and return the function that loads it.
        Collective if sharded tables are registered; the function itself is local. Nothing changes
        before it is called."""
        with self.masks.tables.jointly("load_state_dict()"):
            return self._prepared(state_dict, strict)

    def _prepared(self, state_dict: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        """See :meth:`prepare_load`."""
        dense, packed = self.masks.plain, self.masks.tables
        loaded: dict[str, TableMasks] = {}
        with packed.agreeing("load_state_dict()") as noted:
            configs, saved = saved_configs(state_dict), _whole(state_dict)
            plain = saved["state"].keys()
            both = sorted(plain & {*packed.names})
            if plain and self.masks.enforcer is not NO_ENFORCER:
                raise ValueError(
                    f"Plain data {sorted(plain)} in the state would replace the tensors that train:"
                    " detach() the enforcer, load, add_data() the tensors again, attach()."
                )
            if both:
                raise ValueError(
                    f"The state has plain data of the names {both}, sharded tables here."
                )
            commit_dense = dense.prepare(saved, configs, strict=strict)
            located = packed.locate()
            # If not strict, tables that are registered stay as they are.
            if strict:
                loaded = packed.prepare(saved["sharded"], located)
            for facts, names in noted:
                for name in sorted(loaded.keys() & names):
                    # The state may come from another class of sparsifier, with different keys.
                    if lacking := sorted(set(self.defaults) - set(configs[name])):
                        raise ValueError(
                            f"Error loading {name!r}: its configuration in the state lacks"
                            f" {lacking}."
                        )
                    # Refuses what the next mask update could not follow.
                    self.check_config(located[name], configs[name])
                    one = loaded[name]
                    values = [one.block, configs[name], one.updates, one.removed]
                    facts[f"the state of table {name!r}"] = values
        refusal = "The saved masks of the ranks do not fit together. Nothing was changed."
        packed.compare_holders("load_state_dict()", located, loaded, refusal)
        # DCP fills a gap in a checkpoint with zeros, which no hash on this rank would show.
        here = {name: [one.removed_here] for name, one in loaded.items()}
        # In one order on every rank, so that all raise the same.
        for name, [count] in sorted(packed.summed(here).items()):
            if loaded[name].removed not in (None, count):
                raise ValueError(
                    f"Error loading {name!r}: the masks remove {count} blocks over all ranks, but "
                    f"{loaded[name].removed} when they were saved. Nothing was changed."
                )

        # All ranks load or none: only the last line, which zeroes removed weights, needs memory. It
        # is local: a caller can prepare several states, and then load all of them.
        def load() -> None:
            kept = {} if strict else self.data_groups
            # Configurations in the state that have no masks are not loaded.
            names = [*commit_dense(), *loaded]
            packed.load(loaded)
            self.masks.forget_update()
            self.data_groups = {name: configs[name] for name in names} | kept
            # All ranks have the new masks by now.
            with_one_retry(self.masks.enforcer.renew)

        return load

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, subclasses' included.

        Raises:
            TypeError: sharded tables are registered: they belong to a model that lives on many
                ranks.
        """
        if self.masks.tables:
            raise TypeError(
                "A sparsifier of sharded tables can't be copied or pickled: save state_dict() and"
                " register the model in a new sparsifier."
            )
        kept = {key: value for key, value in vars(self).items() if key not in _UNSAVED}
        return {**kept, **self.masks.plain.state_dict()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        kept = dict(state)
        plain = {"state": kept.pop("state"), "_container": kept.pop("_container")}
        vars(self).update(kept)
        # Nothing that is attached to the original is attached to the copy.
        self.masks = Masks()
        self.masks.plain.prepare(plain, self.data_groups, strict=True)()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        groups = [*self.data_groups.items()]
        for name, group in groups[:_SHOWN]:
            lines += ["\tData Group", f"\t    name: {name}"]
            lines += [f"\t    {key}: {group[key]}" for key in sorted(group)]
        # torch.ao prints all of them: five lines for each table.
        if len(groups) > _SHOWN:
            lines.append(f"\tand {len(groups) - _SHOWN} more")
        return "\n".join([*lines, ")"])

    def _store(self, name: str) -> DenseStore | PackedStore:
        if name not in self.data_groups:
            raise ValueError(
                f"data with specified name does not exist: {name!r}; known are"
                f" {list(self.data_groups)}"
            )
        return self.masks.tables if name in self.masks.tables else self.masks.plain

    def _in_order(self, found: Mapping[str, Found]) -> dict[str, Found]:
        # The order of registration, in which plain data and sharded tables may alternate.
        return {name: found[name] for name in self.data_groups if name in found}

    def _refuse_while_enforced(self) -> None:
        # The enforcer has looked up the optimizers of registered data only.
        if self.masks.enforcer is not NO_ENFORCER:
            raise ValueError("An enforcer is attached: detach() it, register, and attach it again.")

    def _add_sharded(self, name: str, data: Any, config: dict[str, Any]) -> Tensor:
        foreign = sorted({"mask", "parametrization"} & set(config))
        if name in self.data_groups:
            raise ValueError(
                f"Name {name!r} is registered already; sharded data can't be replaced."
            )
        if foreign:
            raise ValueError(f"Invalid config of {name!r}: {foreign} are for plain data.")
        source = TensorSource(name, data)
        _, register = self._checked(source, source.locate(), {name: config})
        register()
        kept: Tensor = data
        return kept

    def _checked(
        self, source: Source, located: Sequence[ShardedData], overrides: Configs
    ) -> tuple[dict[str, dict[str, Any]], Callable[[], None]]:
        """Return the configurations of the new tables of a source, and the function that registers
        them. Changes nothing."""
        configs, blocks = {}, {}
        for data in located:
            configs[data.name] = self._overlaid(self.defaults, overrides[data.name])
            blocks[data.name] = self.check_config(data, configs[data.name])
        self.masks.tables.check_new(located, self.masks.plain.tensors())

        counted = self.count_dtype if self.counts_lookups else None
        made = self.masks.tables.new(source, located, blocks, counted)

        def register() -> None:
            self.masks.tables.add(made)
            self.data_groups |= configs

        return configs, register

    def _overlaid(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``config``, changed to what the caller passed."""
        return {**copy.deepcopy(dict(config)), **given}


def _overrides(
    config: Mapping[str, Any], defaults: Mapping[str, Any], located: Sequence[ShardedData]
) -> dict[str, dict[str, Any]]:
    """Return the overrides for each table of a model, whether they were given by glob or for all;
    if several globs match, later ones win."""
    given: dict[str, dict[str, Any]] = {data.name: {} for data in located}
    # Globs map to mappings. A default may be a mapping too, but its key is known.
    by_glob = all(isinstance(config[key], Mapping) for key in config.keys() - defaults.keys())
    if not by_glob or config.keys() & defaults.keys():
        config = {"*": config}
    for glob, overrides in config.items():
        # In a mapping of both keys and globs, the globs are reported as unknown keys.
        unknown = sorted(set(overrides) - set(defaults))
        matching = [data for data in located if fnmatch.filter([data.name, str(data.fqn)], glob)]
        if unknown:
            raise ValueError(
                f"Invalid config={dict(overrides)!r}: unknown keys {unknown}; known are"
                f" {sorted(defaults)}. Map keys to values, or globs to such mappings."
            )
        if not matching:
            raise ValueError(f"Invalid config: {glob!r} matches no table; there are {list(given)}.")
        for data in matching:
            given[data.name] |= copy.deepcopy(dict(overrides))
    return given


# Saving and loading. All ranks check a whole state before any of them loads it. Plain data has the
# ancestor's format; sharded tables are in the entry ``sharded``.


def saved_configs(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configuration of every name in a state.

    Raises:
        ValueError: it is not the state of a sparsifier.
    """
    saved = _whole(saved)
    given = {name: entry["config"] for name, entry in tables_of(saved["sharded"]).items()}
    return copy.deepcopy({**saved["data_groups"], **given})


def _whole(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with empty mappings for the parts that it has left out."""
    parts = ("state", "data_groups", "_container")
    if not isinstance(saved, Mapping):
        raise ValueError(f"This is not the state of a sparsifier, but a {type(saved).__name__}.")
    # A state with sharded tables has no empty parts.
    missing = sorted({*parts} - saved.keys())
    if missing and "sharded" not in saved:
        raise ValueError(
            f"This is not the state of a sparsifier: it lacks {missing}; it has {sorted(saved)}."
        )
    return {part: mapping_of(saved, part) for part in (*parts, "sharded")}

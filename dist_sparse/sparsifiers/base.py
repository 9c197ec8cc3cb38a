"""What does every data sparsifier do, whatever its masks are made of?

:class:`BaseDataSparsifier` keeps the names, signatures and results of its ancestor in
``torch.ao.pruning._experimental`` for plain data, and adds sharded tables and whole models, whose masks are packed bits
that live with their shards. Nothing but the registration knows which is which.
"""

from __future__ import annotations

import abc
import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.sparsifiers import dense_store as plain
from dist_sparse.sparsifiers import saving
from dist_sparse.sparsifiers.by_shard import ByShard
from dist_sparse.sparsifiers.configs import model_overrides
from dist_sparse.sparsifiers.enforced import Enforced
from dist_sparse.sparsifiers.inspection import Inspection
from dist_sparse.sparsifiers.packed_store import ShardedTables
from dist_sparse.sparsifiers.registration import check_new
from dist_sparse.sparsifiers.step import due_step, follow_moved
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import Block, ShardedData, Source
from dist_sparse.tables.tensors import TensorSource, is_sharded

__all__ = ["BaseDataSparsifier"]

EMBEDDING_TYPES = {nn.Embedding, nn.EmbeddingBag}
SUPPORTED_TYPES = {Tensor, nn.Parameter, *EMBEDDING_TYPES}


class BaseDataSparsifier(Inspection, Enforced, abc.ABC):
    """Keeps a mask for every registered tensor; subclasses write :meth:`update_mask`.

    Args:
        data_list: ``(name, data)`` pairs to register at once, with the defaults as their config.
        **defaults: configuration of every registered name, where ``add_data`` or ``add_model`` says nothing else.

    Attributes:
        defaults: the keyword arguments.
        data_groups: name -> its configuration, read at every step.
        state: name -> ``{"mask": the live mask}`` of plain data.
        enable_mask_update: ``step()`` does nothing while False.
        step_count: calls of ``step()`` so far, also of those that did nothing.
        repair: what a step does about replicas that have drifted apart: ``"raise"``, or ``"broadcast"`` the first
            rank's.
    """

    def __init__(self, data_list: Iterable[tuple[str, Any]] | None = None, **defaults: Any) -> None:
        self.defaults: dict[str, Any] = defaults
        self.state: dict[str, dict[str, Any]] = {}
        self.data_groups: dict[str, dict[str, Any]] = {}
        self.enable_mask_update = True
        self.repair = "raise"
        self._container = plain.Container()
        self._tables = ShardedTables()
        self.step_count = 0
        self._edited: tuple[str, Tensor] | None = None
        for name, data in data_list or ():
            self.add_data(name, data)

    def prepare(self, model: Any, config: Any) -> None:
        """Not defined for data sparsifiers, as in the ancestor."""
        raise NotImplementedError("this function is undefined for this class")

    def add_data(self, name: str, data: Any, reuse_mask: bool = True, **config: Any) -> Tensor:
        """Registers ``data`` under ``name``. Never communicates.

        The weight itself is held, never a copy. A known name is replaced, with a UserWarning: its config stays except
        for what is passed, its mask stays if ``reuse_mask``.

        Args:
            name: not empty, without dots.
            data: exactly a Tensor, Parameter, Embedding or EmbeddingBag, or a ShardedTensor or DTensor.
            reuse_mask: keep the mask of the replaced data, which must have the same shape.
            **config: overrides of the defaults; ``mask`` starts from a given mask, ``parametrization`` replaces ``mask
                * x``.

        Returns:
            The masked data; of sharded data, the data itself.

        Raises:
            TypeError, KeyError: the name can't be used.
            AssertionError: the type is not supported, or the old mask does not fit.
        """
        plain.check_name(name)
        self._check_not_enforced()
        sharded = data.weight if type(data) in EMBEDDING_TYPES else data
        if is_sharded(sharded):
            return self._add_sharded(name, sharded, config)
        if type(data) not in SUPPORTED_TYPES:
            raise AssertionError(f"specified data type:{type(data)} not supported at the moment")
        plain.check_buffer_name(name)
        if name in self._tables:
            raise ValueError(f"Name {name!r} belongs to a sharded table already.")
        weight: Tensor = data.weight if type(data) in EMBEDDING_TYPES else data
        known = name in self.state
        group = self._overlaid(self.data_groups[name] if known else self.defaults, config)
        mask = group.get("mask")
        mask = torch.ones_like(weight) if mask is None else mask
        if known:
            warnings.warn("Replacing existing data of the same name. - Did you mean a different name?", stacklevel=2)
            if reuse_mask:
                mask = self.get_mask(name)
                if mask.shape != weight.shape:
                    raise AssertionError(
                        "to retain the old mask, the shape of the new data must be the same as the previous one"
                    )
        parametrization = group.get("parametrization", plain.Masked)
        if known:
            # Data that is refused must not cost the old: this raises before anything is let go of.
            plain.attach(plain.Container(), name, weight, mask, parametrization)
            self._delete_data(name)
        plain.attach(self._container, name, weight, mask, parametrization)
        self.state[name] = {"mask": mask}
        self.data_groups[name] = group
        masked: Tensor = getattr(self._container, name)
        return masked

    def add_model(
        self,
        model: nn.Module,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        dense: bool | str | list[str] | None = None,
    ) -> list[str]:
        """Registers the embedding tables of a model: DistributedModelParallel, DDP or plain. Collective: every rank of
        the world must call it.

        Args:
            model: its tables are found again whenever they are needed, so resharding and loading are followed.
            include: globs over table names and fully qualified names; None is every table.
            exclude: globs of what to leave out.
            config: overrides of the defaults: either for all (``{"sparsity_level": 0.5}``) or by glob (``{"user_*":
                {...}}``).
            dense: globs of other parameters to register too, True for all. Their names are the fully qualified ones
                with '/' for '.'.

        Returns:
            The names registered.

        Raises:
            ValueError: a pattern matches nothing, a module can't be sparsified, a key of ``config`` or a name is known
                to be wrong, or the ranks disagree; on every rank, and nothing is registered.
        """
        located: list[ShardedData] = []
        configs: dict[str, dict[str, Any]] = {}
        source: Source | None = None
        error: Exception | None = None
        try:
            source = model_source(model, include=include, exclude=exclude, dense=dense)
            located = source.locate()
            self._check_not_enforced()
            check_new(located, self.data_groups, self._held())
            overrides = model_overrides(located, config, self.defaults)
            configs = {name: self._overlaid(self.defaults, given) for name, given in overrides.items()}
            for data in located:
                self._check_config(data, configs[data.name])
        except Exception as fault:
            error = fault
        facts = {
            f"table {data.name!r}": [data.shape, str(data.dtype), data.ranks, data.tiling, configs.get(data.name)]
            for data in located
        }
        group_over(world_ranks()).agree(f"add_model() of {type(self).__name__}", facts, error)
        assert source is not None
        self._register(source, located, configs)
        return [data.name for data in located]

    def get_data(self, name: str, return_original: bool = True) -> Tensor:
        """The registered tensor, or its effective weight if not ``return_original``. Of a sharded table: this rank's
        only shard.

        Raises:
            ValueError: unknown, squashed (the original), or not exactly one shard on this rank.
        """
        self._known(name)
        self._settled()
        if name in self._tables:
            shards = self._tables.locate()[name].shards
            if len(shards) != 1:
                raise ValueError(f"Table {name!r} has {len(shards)} shards on this rank: use local_masks({name!r}).")
            weight = shards[0].tensor
            if return_original:
                return weight
            return torch.where(self.get_mask(name) != 0, weight, torch.zeros((), dtype=weight.dtype))
        if return_original:
            if not plain.is_attached(self._container, name):
                raise ValueError("mask squashed - original mask value does not exist")
            return plain.original(self._container, name)
        effective: Tensor = getattr(self._container, name)
        return effective

    def get_mask(self, name: str) -> Tensor:
        """The mask, 1 = kept, 0 = removed. Of plain data the live object, whose in-place edits count; of a sharded
        table this rank's only shard, unpacked (int8); inside :meth:`update_mask` the one being updated.

        Raises:
            ValueError: unknown, or a table with several shards or none on this rank, or with shards that have moved
                since the last step.
        """
        self._known(name)
        if self._edited is not None and self._edited[0] == name:
            return self._edited[1]
        if name in self._tables:
            masks = self._tables.masks_here(name)
            if len(masks) != 1:
                raise ValueError(f"Table {name!r} has {len(masks)} shards on this rank: use local_masks({name!r}).")
            return masks[0].dense()
        mask: Tensor = self.state[name]["mask"]
        return mask

    def step(self) -> None:
        """Updates all masks, if enabled; else reads nothing and sends nothing. Collective if sharded tables are
        registered.

        Plain data is scored raw and only its mask changes, as in the ancestor. In sharded tables, what is newly removed
        is zeroed at once.

        Raises:
            ValueError: on every rank; no mask and no weight has changed.
        """
        self.step_count += 1
        if not self.enable_mask_update:
            return
        before: list[tuple[Tensor, Tensor]] = []
        error: Exception | None = None
        with torch.no_grad():
            rule = self._rule() if self._tables else None
            if rule is not None and (rule.edits_masks or self._enforcer is not None):
                error = follow_moved(self._tables, rule)
            try:
                if self._enforcer is not None and error is None:
                    self._enforcer.begin_step()
                for name in [name for name in self.data_groups if name in self.state]:
                    if plain.is_attached(self._container, name):
                        before.append((self.get_mask(name), self._keep(self.get_mask(name))))
                        self.update_mask(name, self.get_data(name), **self.data_groups[name])
            except Exception as fault:
                error = error or fault
            try:
                if rule is not None:
                    due_step(self._tables, rule, error, self.repair, self._recorder)
                elif error is not None:
                    raise error
            except BaseException:
                for mask, old in before:
                    mask.data = old
                raise
            if self._enforcer is not None:
                self._enforcer.end_step()

    @abc.abstractmethod
    def update_mask(self, name: str, data: Tensor, **config: Any) -> Any:
        """Edits ``get_mask(name)`` in place (or sets its ``.data``). Must not communicate.

        Called once per plain name and once per local shard of a sharded table, with the configuration of that moment.
        """

    def apply_masks(self) -> None:
        """Writes zero to every removed weight of the sharded tables: what optimizers have revived since. Local, unless
        shards have moved since the last step: then collective.

        Reads all masks and writes all removed blocks, so it takes about as long as a due step.
        """
        located = self._tables.locate()
        self._tables.follow(located)
        with torch.no_grad():
            for name, data in located.items():
                for mask, shard in zip(self._tables.masks(name), data.shards, strict=True):
                    mask.apply_(shard.tensor)

    def squash_mask(
        self, *args: Any, leave_parametrized: bool = True, names: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Makes masks permanent and forgets them; mask and config of plain data remain readable. Already squashed names
        are skipped.

        Args:
            leave_parametrized: write the masked data into the user's own tensor; False leaves it dense.
            names: which; None is all.

        Raises:
            ValueError: a name is unknown, or a mask that is to be written does not fit its data; nothing is
                squashed.
        """
        for name in names or ():
            self._known(name)
        for name in self.state if names is None else names:
            if leave_parametrized and name in self.state and plain.is_attached(self._container, name):
                plain.check_maskable(self._container, name)
        if any(name in self._tables for name in (self.data_groups if names is None else names)):
            located = self._tables.locate()
            self._tables.follow(located)
        for name in list(self.data_groups) if names is None else names:
            if name in self._tables:
                for mask, shard in zip(self._tables.masks(name), located[name].shards, strict=True):
                    if leave_parametrized:
                        mask.apply_(shard.tensor)
                self._tables.drop(name)
                del self.data_groups[name]
            elif plain.is_attached(self._container, name):
                plain.squash(self._container, name, leave_parametrized=leave_parametrized)
        self._renewed()

    def state_dict(self) -> dict[str, Any]:
        """Masks, configs and plain data, in the ancestor's format; ``sharded`` holds this rank's bits by table and
        global rectangle. Local, unless shards have moved since the last step: then collective."""
        if self._tables:
            self._tables.follow(self._tables.locate())
        self._settled()
        return saving.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores :meth:`state_dict`. Checks first, then swaps: a refused state changes nothing. Collective if sharded
        tables are registered.

        Args:
            strict: replace everything; otherwise names that are registered already win.

        Raises:
            RuntimeError: a plain name lacks its config or data.
            ValueError: a registered table has no masks in the state, or they do not cover its shards; on every rank.
        """
        saving.load_state_dict(self, state_dict, strict)
        self._renewed()

    def __getstate__(self) -> dict[str, Any]:
        return saving.getstate(self)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        saving.setstate(self, state)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for name, group in self.data_groups.items():
            lines += ["\tData Group", f"\t    name: {name}"]
            lines += [f"\t    {key}: {group[key]}" for key in sorted(group) if key != "data"]
        return "\n".join([*lines, ")"])

    def _known(self, name: str) -> None:
        if name not in self.data_groups:
            raise ValueError(f"data with specified name does not exist: {name!r}; known are {list(self.data_groups)}")

    def _delete_data(self, name: str) -> None:
        """Forgets plain data without touching it."""
        plain.detach(self._container, name)
        del self.state[name], self.data_groups[name]

    def _add_sharded(self, name: str, data: Any, config: dict[str, Any]) -> Tensor:
        if name in self.data_groups:
            raise ValueError(f"Name {name!r} is registered already; sharded data can't be replaced.")
        foreign = sorted({"mask", "parametrization"} & set(config))
        if foreign:
            raise ValueError(
                f"Invalid config of {name!r}: {foreign} are for plain data; masks of shards are packed bits."
            )
        source = TensorSource(name, data)
        located = source.locate()
        group = self._overlaid(self.defaults, config)
        self._check_config(located[0], group)
        check_new(located, self.data_groups, self._held())
        self._register(source, located, {name: group})
        kept: Tensor = data
        return kept

    def _held(self) -> dict[str, list[Tensor]]:
        """The tensors on this rank that are registered, by name."""
        return {name: [plain.held(self._container, name)] for name in self.state} | self._tables.held()

    def _register(self, source: Source, located: list[ShardedData], configs: Mapping[str, dict[str, Any]]) -> None:
        self._tables.add(source, located, {data.name: self._bit_block(data, configs[data.name]) for data in located})
        for data in located:
            self.data_groups[data.name] = configs[data.name]

    def _overlaid(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``config``, changed to what a user gave."""
        return {**copy.deepcopy(dict(config)), **given}

    def _check_config(self, data: ShardedData, config: Mapping[str, Any]) -> None:
        """Refuses a configuration that no step could follow. For subclasses."""

    def _bit_block(self, data: ShardedData, config: Mapping[str, Any]) -> Block:
        """What one bit of the masks stands for at first."""
        return (1, 1)

    def _keep(self, mask: Tensor) -> Tensor:
        """What to put back into ``mask.data`` if a step fails."""
        return mask.detach().clone()

    def _rule(self) -> Any:
        return ByShard(self)

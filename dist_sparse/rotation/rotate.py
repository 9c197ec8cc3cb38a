"""Rotate tables before each mask update, so that the removed columns hold as little information as
possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.checks import refuse
from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import Group, world_group
from dist_sparse.rotation.turning import bases_of, gram_matrices, share_, turn_
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import loaded_torchrec, modules_by_path, torchrec_port
from dist_sparse.tables.shards import COL, Located, ShardedData

# `"table"`: each table by itself. Otherwise groups of names.
Rotate = Literal["table"] | Sequence[Sequence[str]]


def rotate(sparsifier: BaseDataSparsifier, tables: Rotate = "table") -> None:
    """Rotate tables before each mask update from now on, without changing the model's output.
    Collective: every rank of the world must call it.

    The columns of a rotated table are in descending order of the information they hold. The last
    columns are removed, whatever the sparsifier's norm or score: no other columns could hold less.
    Tables are rotated in place; removed columns stay zero, because later rotations act only on the
    remaining columns. Call it once everything is registered; an enforcer must be attached at mask
    updates.

    Args:
        sparsifier: one that removes whole columns, ``sparse_block_shape=(COL, n)``. If it counts
            lookups (``score="frequency"``), each row is weighted by its number of lookups.
        tables: ``"table"``, or groups of registered names. A group of one table, and each table of
            ``"table"``, gets the eigenvectors of ``W^T W``, and a forward hook rotates its output
            back, so that any model may read it. Outputs of larger groups are not rotated back: only
            **dot products between them** may read them. Two tables get the balanced basis of their
            dot products, more get one orthogonal basis. Tables in no group are not rotated.

    Raises:
        ValueError: a name is unknown or in two groups; blocks are not whole columns; the tables of
            a group differ in width or ranks, the output of one is rotated back already, or an
            ``nn.Sequential`` passes it on to a layer or nonlinearity; a weight is tied,
            renormalized (``max_norm``) or pooled by its maximum; or the optimizer's state would be
            wrong. On every rank, and nothing has changed.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, MaskEnforcer, rotate
        >>> table = torch.nn.EmbeddingBag(50, 8)
        >>> optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape="col", norm="L2")
        >>> names = sparsifier.add_model(table)
        >>> rotate(sparsifier)
        >>> ids, before = torch.arange(50).view(10, 5), table.weight.detach().clone()
        >>> with MaskEnforcer(sparsifier).attach(optimizer):
        ...     pooled = table(ids)
        ...     sparsifier.step()
        ...     torch.allclose(table(ids), pooled, atol=1e-5), torch.equal(table.weight, before)
        (True, False)
    """
    packed = sparsifier.masks.tables
    with world_group().agreeing("rotate()") as facts:
        if plain := list(sparsifier.masks.plain.names):
            raise ValueError(
                f"Plain data can't be rotated, but {plain} was given to add_data(): use"
                " add_model()."
            )
        groups = rotation_groups(tables, packed.names, "tables")
        facts["tables"] = groups
        located = packed.locate()
        _refuse_unfit(sparsifier, located, groups)
        # An enforcer that is attached later is checked by update().
        if sparsifier.masks.enforcer is not None:
            _enforcer(sparsifier).check_rotation([*chain(*groups)])
        models = [source.model for source in packed.sources if hasattr(source, "model")]
        alone = {}
        for group in groups:
            if len(group) == 1:
                alone[group[0]] = find_lookup(models, located[group[0]])
                continue
            for name in group:
                find_lookup_for_dots(models, located[name])
    # All ranks have agreed: only now does the model change.
    for name, lookup in alone.items():
        _turn_back(lookup, located[name])
    sparsifier.masks.rotation = _Rotation(sparsifier, groups, alone)


@dataclass(frozen=True, eq=False)
class _Rotation:
    """Rotates the tables of a sparsifier.

    Args:
        given: names of tables that are rotated together.
        alone: how the model looks up the tables in groups of one, whose outputs are rotated back.
    """

    sparsifier: BaseDataSparsifier
    given: Sequence[Sequence[str]]
    alone: Mapping[str, TableLookup]

    @property
    def names(self) -> list[str]:
        """The tables that are rotated."""
        return [*chain(*self.groups)]

    @property
    def groups(self) -> list[Sequence[str]]:
        """The groups whose tables are all still registered: only they can be rotated."""
        registered = set(self.sparsifier.masks.tables.names)
        return [group for group in self.given if registered.issuperset(group)]

    def update(self) -> None:
        """Rotate every group, in place. Collective over the tables' groups."""
        packed = self.sparsifier.masks.tables
        # With their masks: enforcer.settle() needs those of the current shards.
        located = packed.current_for("step()")
        with packed.agreeing("step()"):
            enforcer = _enforcer(self.sparsifier)
            # The rotation would spread a removed weight that is not zero over the other columns.
            enforcer.settle()
            enforcer.check_rotation(self.names)
            _refuse_unfit(self.sparsifier, located, self.groups)
        # Every rank of a group handles its tables in the same order.
        by_group = []
        for group, names in packed.over_groups(self.names):
            by_group.append((group, [located[name] for name in names]))
        bases = self._new_bases(by_group)
        for group, tables in by_group:
            # Eigenvectors may differ between ranks in sign and rounding: all use the first rank's.
            share_([bases[data.name] for data in tables], group)
            for data in tables:
                turn_(data, bases[data.name], group)
        for name in bases.keys() & self.alone.keys():
            # From the original columns to the current ones, over all rotations so far.
            total = self.alone[name].root.get_buffer(_BASIS + name)
            total.copy_(total.cpu().double() @ bases[name])
        enforcer.after_rotation(self.names)

    def _new_bases(
        self, by_group: Iterable[tuple[Group, Sequence[ShardedData]]]
    ) -> dict[str, Tensor]:
        """Return the basis of each table for its current weights. Collective over the groups.

        Args:
            by_group: groups of ranks, each with the tables that it holds.
        """
        packed = self.sparsifier.masks.tables
        counts = None
        if self.sparsifier.counts_lookups:
            counts = {name: [*packed.table(name).counts.values()] for name in self.names}
        grams: dict[str, Tensor] = {}
        for group, tables in by_group:
            grams |= gram_matrices(tables, group, counts)
        bases: dict[str, Tensor] = {}
        # Local, but weights that are not finite must be refused on all ranks.
        with packed.agreeing("step()"):
            for names in self.groups:
                bases |= bases_of(grams, names)
        return bases


def rotation_groups(
    rotate: Any, tables: Iterable[str], argument: str = "rotate"
) -> list[list[str]]:
    """Return the groups of tables that ``rotate`` names; for ``"table"``, each table alone.

    Args:
        rotate: an argument of the caller.
        tables: all names.
        argument: the name of that argument.

    Raises:
        ValueError: it is neither ``"table"`` nor groups of such names, each in one group only.

    Example::

        >>> from dist_sparse.rotation.rotate import rotation_groups
        >>> rotation_groups("table", ["user", "item"]), rotation_groups(
        ...     [("user", "item")], ["user", "item"]
        ... )
        ([['user'], ['item']], [['user', 'item']])
    """
    known = list(tables)
    if rotate == "table":
        return [[name] for name in known]
    wrong = f"Invalid {argument}={rotate!r}:"
    # An empty group is refused below.
    groups = rotate if isinstance(rotate, (list, tuple)) else [()]
    # By type: a string in the place of a group would be a group of letters.
    if not all(isinstance(group, (list, tuple)) and group for group in groups):
        raise ValueError(f'{wrong} must be "table", or groups of names such as [["user", "item"]].')
    named = [*map(str, chain(*groups))]
    unknown = sorted(set(named).difference(known))
    refuse(
        {
            f"{wrong} {unknown} are none of the tables {known}.": unknown,
            f"{wrong} each name must be in one group only.": len(set(named)) < len(named),
        }
    )
    return [list(map(str, group)) for group in groups]


def _refuse_unfit(
    sparsifier: BaseDataSparsifier,
    located: Located,
    groups: Sequence[Sequence[str]],
) -> None:
    """Refuse tables that can't be rotated, and groups that can't be rotated together."""
    for name in chain(*groups):
        # Other blocks would remove single rotated elements, which have no meaning of their own.
        block = sparsifier.data_groups[name].get("sparse_block_shape")
        if not isinstance(block, (tuple, list)) or block[0] != COL:
            raise ValueError(
                f"Table {name!r} can't be rotated: its blocks are {block}; only whole columns,"
                " (COL, n), can be."
            )
    for group in groups:
        check_group([located[name] for name in group])


def check_group(group: Sequence[ShardedData]) -> None:
    """Refuse tables that can't be rotated together. Local.

    Raises:
        ValueError: their widths or ranks differ, or copies of them are cut by columns.
    """
    first = group[0]
    for data in group:
        if (data.shape[1], data.ranks) != (first.shape[1], first.ranks):
            raise ValueError(
                f"Tables {first.name!r} and {data.name!r} can't be rotated together: widths"
                f" {first.shape[1]} and {data.shape[1]}, ranks {first.ranks} and {data.ranks}."
            )
        refuse_cut_copies(data, "rotated")


def refuse_cut_copies(data: ShardedData, action: str) -> None:
    """Refuse a table whose columns are on several ranks, in several copies."""
    if data.copied and not data.has_whole_rows:
        raise ValueError(
            f"Table {data.name!r} can't be {action}: its columns are on several ranks, and 2-D"
            " parallelism trains copies of them; shard it by rows or by table."
        )


def _enforcer(sparsifier: BaseDataSparsifier) -> MaskEnforcer:
    """Return the attached enforcer; raise ValueError if there is none."""
    enforcer = sparsifier.masks.enforcer
    if not isinstance(enforcer, MaskEnforcer):
        raise ValueError(
            "Tables can't be rotated without an attached MaskEnforcer, which knows the state of"
            " their optimizers."
        )
    return enforcer


# How a model looks a table up, and what reads its output.


# Modules that may be between tables that are rotated together and their dot products.
_HARMLESS = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)


class TableLookup(NamedTuple):
    """How a model looks a table up.

    Args:
        modules: all modules of the model by path, without wrappers.
        module: the module that looks the table up.
        outputs: the outputs of a collection that are of the table; None is the only output of any
            other module.
    """

    modules: Mapping[str, nn.Module]
    module: nn.Module
    outputs: list[str | None]

    @property
    def root(self) -> nn.Module:
        """The model without wrappers."""
        return self.modules[""]


def find_lookup(models: Sequence[nn.Module], data: ShardedData) -> TableLookup:
    """Return how one of ``models`` looks a table up.

    Raises:
        ValueError: no model looks it up, its output is not a sum of rows, or another module reads
            the weight too.
    """
    path = str(data.fqn).removesuffix("weight").removesuffix(".")
    # One model has the table; the others have no module at its path.
    for modules in map(modules_by_path, models):
        module, outputs, is_processed = _module_at(modules, path)
        if module is not None:
            holders = _modules_with_weight(modules, data)
            refusals = {
                "a feature processor reads its collection without calling it": is_processed,
                "its rows are pooled by their maximum": getattr(module, "mode", "sum") == "max",
                "max_norm renormalizes its rows": getattr(module, "max_norm", None) is not None,
                f"the modules {holders} share its weight": len(holders) > 1,
            }
            _refuse_rotation(data, refusals)
            return TableLookup(modules, module, outputs)
    raise ValueError(
        f"Table {data.name!r} can't be rotated: it is in no model given to add_model()."
    )


def find_lookup_for_dots(models: Sequence[nn.Module], data: ShardedData) -> None:
    """Refuse a table that can't be rotated together with others: only dot products may read it.

    Raises:
        ValueError: as :func:`find_lookup`; or anything but dot products reads its output.
    """
    lookup = find_lookup(models, data)
    reader = _reading_layer(lookup.modules, lookup.module)
    refusals = {
        'its output is rotated back, as rotate="table" does, so that dot products do not'
        " read its rows": _BASIS + data.name in lookup.root._buffers,
        f"{reader} reads it, but only dot products may read tables that are rotated"
        ' together; use rotate="table", which rotates outputs back': reader,
    }
    _refuse_rotation(data, refusals)


def _refuse_rotation(data: ShardedData, reasons: Mapping[str, object]) -> None:
    where = f"Table {data.name!r} can't be rotated"
    refuse({f"{where}: {reason}.": holds for reason, holds in reasons.items()})


def _module_at(
    modules: Mapping[str, nn.Module], path: str
) -> tuple[nn.Module | None, list[str | None], bool]:
    """Return the module that looks up the table at ``path``, None if the model has no such table;
    the outputs that are of the table; and whether a feature processor contains the module."""
    # In TorchRec's collections, <path of the collection>.embedding_bags.<table>.
    collection_path, _, table = path.rpartition(".")
    collection_path = collection_path.rpartition(".")[0]
    module: Any = modules.get(collection_path)
    outer: Any = modules.get(collection_path.rpartition(".")[0])
    torchrec = torchrec_port()
    if torchrec and (collection := torchrec.collection(module)):
        outputs = [output for output, name in collection.outputs().items() if name == table]
        return module, [*outputs], torchrec.processes_features(outer)
    return modules.get(path), [None], False


def _modules_with_weight(modules: Mapping[str, nn.Module], data: ShardedData) -> list[str]:
    """Return the paths of the modules that hold the weight of a replicated table."""
    if data.sharding != "replicated":
        return []
    # By address: tied weights may be two parameters over one storage.
    addresses = {shard.tensor.data_ptr() for shard in data.shards}
    paths = []
    for path, module in modules.items():
        held = map(Tensor.data_ptr, module.parameters(recurse=False))
        if not addresses.isdisjoint(held):
            paths.append(path or type(module).__name__)
    return paths


def _reading_layer(modules: Mapping[str, nn.Module], table: nn.Module) -> str:
    """Return the layer or nonlinearity to which an ``nn.Sequential`` passes the output of
    ``table``; "" for none."""
    for path, module in modules.items():
        # The parts behind the table; none if the table is not among them.
        from_table = dropwhile(lambda part: part[1] is not table, _called_in_turn(module, path))
        for name, part in islice(from_table, 1, None):
            # A module of the user's may compute the dot products.
            if not type(part).__module__.startswith("torch.nn."):
                break
            if not isinstance(part, _HARMLESS):
                return f"{type(part).__name__} {name!r}"
    return ""


def _called_in_turn(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that an ``nn.Sequential`` calls in turn, nested ones included, with their
    paths; for another module, the module itself."""
    if type(module) is not nn.Sequential:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _called_in_turn(child, f"{path}.{name}".lstrip("."))


# Outputs of rotated tables are rotated back: the model reads them as if nothing had been rotated.
#
# The basis of a table is a buffer of the model's root, so that it is saved and loaded with the
# weights. It is not in TorchRec's collections, which can be resharded only if their state is tables
# alone; and not in a module of its own, which an ``nn.Sequential`` would call. Forward hooks on the
# modules that look tables up apply it. A copy of the model has its own bases and hooks.


_BASIS = "rotation_of_"


def _turn_back(lookup: TableLookup, data: ShardedData) -> None:
    """Have a module's output for a table rotated back from now on, unless it is already."""
    root = lookup.root
    if _BASIS + data.name not in root._buffers:
        # Not in 16 bits: a rounded basis would add errors to every output.
        exact = torch.promote_types(data.dtype, torch.float32)
        basis = torch.eye(data.shape[1], dtype=exact, device=data.device)
        root.register_buffer(_BASIS + data.name, basis)
    hook = _hook_on(lookup.module) or _TurnBackHook(root)
    if not hook.names:
        # Before hooks of the user's, which read outputs in the original basis.
        lookup.module.register_forward_hook(hook, prepend=True)
    hook.names |= dict.fromkeys(lookup.outputs, data.name)


def expect_bases(root: nn.Module) -> RemovableHandle:
    """Let ``root`` load states with bases before :func:`rotate` is called on its tables: rotate()
    keeps bases that were loaded."""

    def register(module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
        for key, basis in state.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix + _BASIS) and name not in module._buffers:
                module.register_buffer(name, torch.empty_like(basis))

    handle: RemovableHandle = root.register_load_state_dict_pre_hook(Hook(register))  # type: ignore[no-untyped-call]
    return handle


def bases_of_outputs(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the basis, ``(original columns, columns)``, of each output of a module that is turned
    back, by the output's name in a collection; None is the only output of any other module."""
    hook = _hook_on(module)
    return {key: hook.basis(name) for key, name in hook.names.items()} if hook else {}


def move_bases(old: nn.Module, new: nn.Module, root: nn.Module, widths: Mapping[str, int]) -> None:
    """Have ``new``, which replaces ``old``, turn back the same outputs, of fewer columns.

    Args:
        root: the model, without wrappers; it may be ``new``.
        widths: the number of first columns that each table keeps; tables left out keep all.
    """
    hook = _hook_on(old)
    if hook is None:
        return
    # Each name once, in an order that all ranks share.
    for name in dict.fromkeys(hook.names.values()):
        basis = hook.basis(name)
        root.register_buffer(_BASIS + name, basis[:, : widths.get(name, basis.shape[1])].clone())
    # The old model is no longer used: the hook moves to the new one.
    hook.buffers = root._buffers
    new.register_forward_hook(hook)


class _TurnBackHook:
    """A forward hook that turns outputs of a module back.

    It refers to the dictionary of the root's buffers, not to the root: a copy of the model has a
    hook on its own buffers, and a copy of one module does not copy the model.

    Attributes:
        buffers: of the root.
        names: the table of each output; None is the only output of any other module.
    """

    def __init__(self, root: nn.Module) -> None:
        self.buffers = root._buffers
        self.names: dict[str | None, str] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if None in self.names:
            return self._turn_output(None, output)
        return loaded_torchrec().with_outputs(output, self._turn_output)

    def _turn_output(self, key: str | None, values: Tensor) -> Tensor:
        """Return values of an output, ``(..., remaining columns)``, in the original basis,
        ``(..., columns)``."""
        name = self.names.get(key)
        if name is None:
            return values
        basis = self.basis(name)
        if basis.device != values.device:
            # A rank without a shard of the table did not know the device before.
            basis = self.buffers[_BASIS + name] = basis.to(values.device)
        return values @ basis.T.to(values.dtype)

    def basis(self, name: str) -> Tensor:
        """Return the basis of a table."""
        basis = self.buffers[_BASIS + name]
        assert basis is not None
        return basis


def _hook_on(module: nn.Module) -> _TurnBackHook | None:
    """Return the hook on a module; None if there is none."""
    hooks = (hook for hook in module._forward_hooks.values() if isinstance(hook, _TurnBackHook))
    return next(hooks, None)

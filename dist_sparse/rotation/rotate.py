"""Rotating tables before each mask update, so that the columns that are removed hold as little as
possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, dropwhile, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.checks import refuse
from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import group_over, world_group
from dist_sparse.rotation.turning import bases_of, gram_matrices, share_, turn_
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import modules_by_path, torchrec_port
from dist_sparse.tables.shards import COL, ShardedData

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
        # It may be attached later: then update() checks it.
        if sparsifier.masks.enforcer is not None:
            _enforcer(sparsifier).check_rotation([*chain.from_iterable(groups)])
        models = [source.model for source in packed.sources if hasattr(source, "model")]
        alone: dict[str, TableLookup] = {}
        for name, *others in groups:
            if others:
                for each in (name, *others):
                    find_lookup_for_dots(models, located[each])
            else:
                alone[name] = find_lookup(models, located[name])
    # All ranks have agreed: from here on the model changes.
    for name, lookup in alone.items():
        _turn_back(lookup, located[name])
    sparsifier.masks.rotation = _Rotation(sparsifier, groups, alone)


class _Rotation:
    """Rotates the tables of a sparsifier.

    Args:
        groups: names of tables that are rotated together.
        turned: how the model looks up each table whose output is turned back: the groups of one.
    """

    def __init__(
        self,
        sparsifier: BaseDataSparsifier,
        groups: Sequence[Sequence[str]],
        turned: Mapping[str, TableLookup],
    ) -> None:
        self._sparsifier, self._groups, self._turned = sparsifier, groups, turned

    @property
    def names(self) -> list[str]:
        return [*chain.from_iterable(self.groups)]

    @property
    def groups(self) -> list[Sequence[str]]:
        """The groups whose tables are all registered still: others can't be rotated any more."""
        registered = set(self._sparsifier.masks.tables.names)
        return [group for group in self._groups if registered.issuperset(group)]

    def update(self) -> None:
        """Rotate every group, in place. Collective over the tables' groups."""
        packed = self._sparsifier.masks.tables
        groups = self.groups
        names = self.names
        with packed.agreeing("step()"):
            located = packed.locate()
        # Masks follow their shards first: the rotation reads them.
        packed.reshard(located)
        with packed.agreeing("step()"):
            enforcer = _enforcer(self._sparsifier)
            # A removed weight that is not zero would be spread over the other columns.
            enforcer.settle()
            enforcer.check_rotation(names)
            _refuse_unfit(self._sparsifier, located, groups)
        # Each table in the group of ranks that holds it, in one order on all of them.
        chosen, by_ranks = set(names), []
        for ranks, held in packed.groups.items():
            tables = [located[name] for name in sorted(chosen.intersection(held))]
            by_ranks.append((group_over(ranks), tables))
        counts = None
        if self._sparsifier.counts_lookups:
            counts = {name: [*packed.table(name).counts.values()] for name in names}
        grams: dict[str, Tensor] = {}
        for group, tables in by_ranks:
            grams |= gram_matrices(tables, group, counts)
        with packed.agreeing("step()"):
            # From the same matrices on every rank.
            bases: dict[str, Tensor] = {}
            for together in groups:
                bases |= bases_of(grams, together)
        for group, tables in by_ranks:
            # Eigenvectors may differ between ranks in sign and rounding: all use the first rank's.
            share_([bases[data.name] for data in tables], group)
            for data in tables:
                turn_(data, bases[data.name], group)
        for name in bases.keys() & self._turned.keys():
            kept = self._turned[name].root.get_buffer(_BASIS + name)
            kept.copy_(kept.cpu().double() @ bases[name])
        enforcer.after_rotation(names)


def rotation_groups(
    rotate: Any, tables: Iterable[str], argument: str = "rotate"
) -> list[list[str]]:
    """Return the groups of tables that ``rotate`` names; of ``"table"`` each table alone.

    Args:
        rotate: what a caller passed.
        tables: the names that there are.
        argument: what the caller calls it.

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
    groups = rotate if isinstance(rotate, (list, tuple)) else [()]
    # A lone name would be a group of letters.
    if not all(isinstance(group, (list, tuple)) and group for group in groups):
        raise ValueError(f'{wrong} must be "table", or groups of names such as [["user", "item"]].')
    named = [*chain.from_iterable(groups)]
    unknown = sorted(map(str, set(named).difference(known)))
    rules = {
        f"{wrong} {unknown} are none of the tables {known}.": unknown,
        f"{wrong} each name must be in one group only.": len(set(named)) < len(named),
    }
    refuse(rules)
    return list(map(list, groups))


def _refuse_unfit(
    sparsifier: BaseDataSparsifier,
    located: Mapping[str, ShardedData],
    groups: Sequence[Sequence[str]],
) -> None:
    """Refuse tables that can't be rotated, or not together."""
    for name in chain.from_iterable(groups):
        # Any other block would remove rotated elements, which mean nothing alone.
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
        unequal = (
            f"Tables {first.name!r} and {data.name!r} can't be rotated together: widths"
            f" {first.shape[1]} and {data.shape[1]}, ranks {first.ranks} and {data.ranks}; both"
            " must be equal."
        )
        copied = (
            f"Table {data.name!r} can't be rotated: its columns are on several ranks, and 2-D"
            " parallelism trains copies of them; shard it by rows or by table."
        )
        both = data.shape[1], data.ranks
        rules = {
            unequal: both != (first.shape[1], first.ranks),
            copied: data.copied and not data.has_whole_rows,
        }
        refuse(rules)


def _enforcer(sparsifier: BaseDataSparsifier) -> MaskEnforcer:
    if not isinstance(sparsifier.masks.enforcer, MaskEnforcer):
        raise ValueError(
            "Tables can't be rotated without an attached MaskEnforcer, which knows the state of"
            " their optimizers."
        )
    return sparsifier.masks.enforcer


# Find the module that looks a table up, and its declared consumers.


# What may be between tables that are rotated together and their dot products.
_HARMLESS = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)


class TableLookup(NamedTuple):
    """How a model looks a table up.

    Args:
        modules: of the model without wrappers, by path.
        module: that looks the table up.
        outputs: which outputs of a collection are of the table; None is the output of a module that
            has one.
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
        ValueError: none does, its output is not a sum of rows, or another module reads the weight
            too.
    """
    path = str(data.fqn).removesuffix("weight").removesuffix(".")
    # A table is in one of them; the others have no module at its path.
    for modules in map(modules_by_path, models):
        module, outputs, processed = _looking_up(modules, path)
        if module is not None:
            holders = _holders(modules, data)
            refusals = {
                "a feature processor reads its collection without calling it": processed,
                "its rows are pooled by their maximum": getattr(module, "mode", "sum") == "max",
                "max_norm renormalizes its rows": getattr(module, "max_norm", None) is not None,
                f"the modules {holders} share its weight": len(holders) > 1,
            }
            _refuse(data, refusals)
            return TableLookup(modules, module, outputs)
    raise ValueError(
        f"Table {data.name!r} can't be rotated: it is in no model given to add_model()."
    )


def find_lookup_for_dots(models: Sequence[nn.Module], data: ShardedData) -> None:
    """Refuse a table that can't be rotated together with others: only dot products may read it.

    Raises:
        ValueError: as :func:`find_lookup`; or something else than dot products reads its output.
    """
    lookup = find_lookup(models, data)
    reader = _reader(lookup.modules, lookup.module)
    refusals = {
        'its output is rotated back, as rotate="table" does, so that dot products do not'
        " read its rows": _BASIS + data.name in lookup.root._buffers,
        f"{reader} reads it, but only dot products may read tables that are rotated"
        ' together; use rotate="table", which rotates outputs back': reader,
    }
    _refuse(data, refusals)


def _refuse(data: ShardedData, reasons: Mapping[str, object]) -> None:
    where = f"Table {data.name!r} can't be rotated"
    refuse({f"{where}: {reason}.": holds for reason, holds in reasons.items()})


def _looking_up(
    modules: Mapping[str, nn.Module], path: str
) -> tuple[nn.Module | None, list[str | None], bool]:
    """Return the module that looks up the table at ``path``, None if the model has no such table;
    which outputs are of the table; and whether a feature processor is around the module."""
    # Of TorchRec's: <path of the collection>.embedding_bags.<table>
    above, _, table = path.rpartition(".")
    above = above.rpartition(".")[0]
    holder: Any = modules.get(above)
    # A processor holds the collection.
    around: Any = modules.get(above.rpartition(".")[0])
    torchrec = torchrec_port()
    if torchrec and (collection := torchrec.collection(holder)):
        outputs = [output for output, name in collection.outputs().items() if name == table]
        return holder, [*outputs], torchrec.processes_features(around)
    return modules.get(path), [None], False


def _holders(modules: Mapping[str, nn.Module], data: ShardedData) -> list[str]:
    """Return the modules that hold the weight of a replicated table, by path."""
    if data.sharding != "replicated":
        return []
    # By address: a tied weight is one storage in two parameters, or one parameter.
    places = {shard.tensor.data_ptr() for shard in data.shards}
    found = []
    for path, module in modules.items():
        held = map(Tensor.data_ptr, module.parameters(recurse=False))
        if not places.isdisjoint(held):
            found.append(path or type(module).__name__)
    return found


def _reader(modules: Mapping[str, nn.Module], table: nn.Module) -> str:
    """Return the layer or nonlinearity to which an ``nn.Sequential`` passes the output of
    ``table``; "" for none."""
    for path, module in modules.items():
        behind = dropwhile(lambda part: part[1] is not table, _parts(module, path))
        for name, part in islice(behind, 1, None):
            if not type(part).__module__.startswith("torch.nn."):
                break  # the user's own, which may be the dot products
            if not isinstance(part, _HARMLESS):
                return f"{type(part).__name__} {name!r}"
    return ""


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that an ``nn.Sequential`` calls in turn, and the parts of nested ones, by
    path; of another module itself."""
    if type(module) is not nn.Sequential:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _parts(child, f"{path}.{name}".lstrip("."))


# Outputs of rotated tables, turned back: what a model reads is as if they had never been rotated.
#
# The basis of a table is a buffer of the model, so that it is saved and loaded with the weights
# that it belongs to. It is not below TorchRec's collections, which can only be resharded if their
# state is tables alone, and no module, which a ``nn.Sequential`` would call. Forward hooks on the
# modules that look tables up apply it; a copy of the model has its own bases and hooks.


_BASIS = "rotation_of_"


def _turn_back(lookup: TableLookup, data: ShardedData) -> None:
    """Have a module's output for a table turned back from now on, unless it is."""
    root, module = lookup.root, lookup.module
    if _BASIS + data.name not in root._buffers:
        device = data.shards[0].tensor.device if data.shards else torch.device("cpu")
        # A basis of 16 bits would lose more than the table has.
        exact = torch.promote_types(data.dtype, torch.float32)
        root.register_buffer(
            _BASIS + data.name, torch.eye(data.shape[1], dtype=exact, device=device)
        )
    hook = _hook(module) or _Hook(root)
    if not hook.names:
        # Hooks of the user's read the original basis.
        module.register_forward_hook(hook, prepend=True)
    hook.names |= dict.fromkeys(lookup.outputs, data.name)


def expect_bases(root: nn.Module) -> RemovableHandle:
    """Have ``root`` load states with bases from now on, though its tables are rotated only later:
    by :func:`rotate`, which keeps what was loaded."""

    def register(module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
        for key, basis in state.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix + _BASIS) and name not in module._buffers:
                module.register_buffer(name, torch.empty_like(basis))

    handle: RemovableHandle = root.register_load_state_dict_pre_hook(Hook(register))  # type: ignore[no-untyped-call]
    return handle


def bases_of_outputs(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the basis ``(original columns, columns)`` of each output of a module that is turned
    back, by the output's name in a collection; None is the output of a module that has one."""
    hook = _hook(module)
    return {key: hook.basis(name) for key, name in hook.names.items()} if hook else {}


def move_bases(old: nn.Module, new: nn.Module, root: nn.Module, widths: Mapping[str, int]) -> None:
    """Have ``new``, in the place of ``old``, turn back outputs of fewer columns, if ``old`` turns
    them back.

    Args:
        root: the model, without wrappers; it may be ``new``.
        widths: the first columns that are left of each table.
    """
    hook = _hook(old)
    if hook is None:
        return
    for name in set(hook.names.values()):
        basis = hook.basis(name)
        root.register_buffer(_BASIS + name, basis[:, : widths.get(name, basis.shape[1])].clone())
    # The old model is consumed: the basis is a buffer of the new one now.
    hook.buffers = root._buffers
    new.register_forward_hook(hook)


class _Hook:
    """Turns back the outputs of a module: by output the name of the table, None for a module whose
    output is one tensor.

    It holds the dictionary of the model's buffers, not the model: a copy of the model has a copy
    that refers to its buffers, and a copy of a module of it does not copy the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.buffers = root._buffers
        self.names: dict[str | None, str] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if None in self.names:
            return self._turned(None, output)
        torchrec = torchrec_port()
        assert torchrec is not None  # it has returned the output
        return torchrec.with_outputs(output, self._turned)

    def _turned(self, key: str | None, values: Tensor) -> Tensor:
        """``values`` ``(..., columns left)`` of an output in the original basis,
        ``(..., columns)``."""
        name = self.names.get(key)
        if name is None:
            return values
        basis = self.basis(name)
        if basis.device != values.device:
            # A rank without a shard of the table learns here where outputs are.
            basis = self.buffers[_BASIS + name] = basis.to(values.device)
        return values @ basis.T.to(values.dtype)

    def basis(self, name: str) -> Tensor:
        """Return the basis of a table."""
        basis = self.buffers[_BASIS + name]
        assert basis is not None
        return basis


def _hook(module: nn.Module) -> _Hook | None:
    hooks = (hook for hook in module._forward_hooks.values() if isinstance(hook, _Hook))
    return next(hooks, None)

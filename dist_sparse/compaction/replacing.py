"""Modules with other tables in the places of modules that hold some: what ``compact()`` and
``expand()`` have in common.

A :class:`Change` has the new module and says which rows move to it. Changes are put in place all
together, or none is, on any rank. Then the old tables are released, which can't be undone.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.compaction.moving import Stepped, Steppers, move_collection
from dist_sparse.compaction.sites import CollectionSite, Kept, Site, dmp_port, replace_modules
from dist_sparse.compaction.tables import CompactCollection, cut
from dist_sparse.groups import Group
from dist_sparse.rotation.rotate import bases_of_outputs
from dist_sparse.tables.protocols import Replacement, TorchRecPort

Planner: TypeAlias = Callable[[nn.Module], Any]
"""Returns a ShardingPlan for the unsharded module with the new tables."""


@dataclass(frozen=True, eq=False)
class Change:
    """A module, the one that takes its place, and the rows that move, by the table's name.

    Args:
        site: the module.
        new: takes its place.
        kept: which stored rows move, in their order.
        placed: which rows of the new tables take them. The others start at 0, with fresh optimizer
            state. None: the first ones.
    """

    site: Site
    new: nn.Module
    kept: Kept
    placed: Kept | None = None

    @property
    def path(self) -> str:
        """The path of the module that stores the new tables."""
        inside = ".inner" if isinstance(self.new, CompactCollection) else ""
        return f"{self.site.place}{inside}".lstrip(".")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module, without the DistributedModelParallel around it."""
    torchrec = dmp_port(model)
    return model if torchrec is None else torchrec.unwrapped(model)


# Before anything changes


def refuse_sites(
    model: nn.Module,
    sites: Iterable[Site],
    action: str,
    *,
    optimizers_known: bool,
    narrowed: bool = False,
    default_row: bool = False,
) -> None:
    """Refuse modules whose tables can't be replaced, or whose optimizers are unknown.

    Args:
        action: ``"compact"`` or ``"expand"``.
        optimizers_known: whether the caller knows all optimizers that are not fused.
        narrowed: whether any table loses columns.
        default_row: whether removed ids share a row.
    """
    # Once, not for each site: a model has thousands of parameters.
    holders = _holders_of_parameters(model)
    for site in sites:
        _refuse_wrapper_inside(site, model, action)
        shared = {index.default_row for index in site.indexes().values()}
        parameters = site.parameters().values()
        unknown = not optimizers_known and any(each.requires_grad for each in parameters)
        reasons = (
            (True, site.refusal(model, narrowed)),
            (
                bool(bases_of_outputs(site.module)) and not narrowed,
                f"is rotated, and its output is turned back by a hook: it can't be {action}ed.",
            ),
            # What their ids share would be lost, and an id that is removed now would share it too.
            (True in shared, f"has default rows: it can't be {action}ed."),
            (
                default_row and site.padding_id is not None,
                "has a padding_idx, whose id would get the default row if its row was removed.",
            ),
            # Ids removed before would still give zeros, ids removed now the default row.
            (
                default_row and False in shared,
                "has already lost rows without a default row; it can't get one now.",
            ),
            (True, _tie(site, [holders[each] for each in parameters], action)),
            (
                unknown,
                "is stepped by a plain optimizer, which must get the new parameters: pass"
                f" {action}(optimizer=...), or optimizer=() if there is none. An attached enforcer"
                " knows them.",
            ),
        )
        for holds, reason in reasons:
            if holds and reason:
                raise ValueError(f"{site.label} {reason}")


def _holders_of_parameters(model: nn.Module) -> Mapping[nn.Parameter, list[nn.Module]]:
    """Return the modules that hold each parameter themselves, not in a child."""
    holders: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        # Not named_parameters(): TorchRec's modules list their children's parameters as their own.
        for parameter in filter(torch.is_tensor, module._parameters.values()):
            holders[parameter].append(module)
    return holders


def _refuse_wrapper_inside(site: Site, model: nn.Module, action: str) -> None:
    """Refuse a module inside a wrapper, which would keep the old parameters."""
    # The DDP inside a DistributedModelParallel is built again.
    if dmp_port(model) is not None:
        return
    for path, wrapper in model.named_modules():
        wraps = isinstance(wrapper, (DistributedDataParallel, nn.DataParallel))
        if wraps and site.module in wrapper.modules():
            place = f" at {path!r}" if path else ""
            raise ValueError(
                f"{site.label} is inside {type(wrapper).__name__}{place}, which holds on to "
                f"the old parameters: {action} the module inside, and wrap the result again."
            )


def _tie(site: Site, holders: Iterable[Sequence[nn.Module]], action: str) -> str | None:
    """Return why a table can't be replaced whose weight another layer holds too: that layer needs a
    row for each id."""
    # An embedding inside a collection holds the parameter.
    own = set(site.module.modules())
    others = [type(holder).__name__ for holder in chain(*holders) if holder not in own]
    return (
        f"is the weight of other modules too ({others}): it can't be {action}ed."
        if others
        else None
    )


def replace_tables(
    model: nn.Module,
    changes: Sequence[Change],
    steppers: Steppers,
    plan: Planner | None,
    world: Group,
    action: str,
    *,
    initialize: Callable[[Change, nn.Module], None] = lambda change, stored: None,
    finish: Callable[[nn.Module], None] = lambda result: None,
) -> nn.Module:
    """Return the model with its new modules, filled with the rows that move, and release the old
    ones. Collective; an exception on any rank is raised on all.

    Args:
        action: ``"compact"`` or ``"expand"``.
        initialize: is called with each change, and the module that stores its tables now, once rows
            have moved; it may write the other rows.
        finish: is called with the result before anything is released.

    Raises:
        ValueError: a rank failed before that; the model is unchanged.
        RuntimeError: a rank failed after that.
    """
    result, stepped = _put_in_place(model, changes, steppers, plan, world, action, initialize)
    try:
        with world.agreeing(f"{action}(), releasing the old tables"):
            finish(result)
            _release(model, [change.site for change in changes], stepped, steppers, action)
    except ValueError as fault:
        # Released tables can't be restored: no rank may continue with a model that others lost.
        raise RuntimeError(
            f"{action}() failed on every rank, and no model is left: resume from a checkpoint. "
            f"{fault}"
        ) from fault
    # Reference cycles keep table batches, DDP and their hooks alive.
    gc.collect()
    return result


# Put in place


def _put_in_place(
    model: nn.Module,
    changes: Sequence[Change],
    steppers: Steppers,
    plan: Planner | None,
    world: Group,
    action: str,
    initialize: Callable[[Change, nn.Module], None],
) -> tuple[nn.Module, list[Stepped]]:
    """Return the model with its new modules, filled with the rows that move, and the parameters
    that plain optimizers step in it. Collective; if a rank fails, the model is unchanged."""
    torchrec, root = dmp_port(model), unwrapped(model)
    replaced = {change.site.replaced: change.new for change in changes}
    # A module may have several places.
    places = [
        (holder, name, child)
        for holder in root.modules()
        for name, child in holder._modules.items()
        if child in replaced
    ]
    try:
        with world.agreeing(f"{action}(), putting its tables in place"):
            result = replace_modules(root, replaced)
            sharding: Any = None
            if torchrec is not None:
                sharding = torchrec.compact_plan(model, result, _replacements(changes), plan)
        if torchrec is not None:
            result = _sharded(torchrec, model, result, sharding, world, action)
        stepped: list[Stepped] = []
        with world.agreeing(f"{action}(), moving rows"):
            for change in changes:
                # TorchRec has put a sharded collection in the place of the new one.
                stored = unwrapped(result).get_submodule(change.path)
                stepped += _move_rows(change, stored, steppers)
                initialize(change, stored)
    except BaseException:
        # Interrupts too: a notebook goes on with the old model, whose modules have their tables.
        for holder, name, old in places:
            setattr(holder, name, old)
        raise
    return result, stepped


def _replacements(changes: Iterable[Change]) -> Iterator[Replacement]:
    """Yield what takes the places of sharded collections, for TorchRec's plan."""
    for change in changes:
        site, new = change.site, change.new
        if site.is_sharded:
            stored = new.inner if isinstance(new, CompactCollection) else new
            yield Replacement(site.module, site.path, stored, change.path)


def _sharded(
    torchrec: TorchRecPort, model: nn.Module, root: nn.Module, plan: Any, world: Group, action: str
) -> nn.Module:
    """Build a DistributedModelParallel like ``model`` around ``root``. Collective."""

    def agree() -> None:
        # The other ranks learn here, before DDP communicates, that one has failed.
        with world.agreeing(f"{action}(), before DDP"):
            pass

    with world.agreeing(f"{action}(), sharding its tables"), _before_ddp(agree):
        result = torchrec.reshard(model, root, plan)
    with world.agreeing(f"{action}(), wrapping its layers"), _before_ddp(agree):
        torchrec.wrap_layers(result, model)
    return result


@contextmanager
def _before_ddp(agree: Callable[[], None]) -> Iterator[None]:
    """Call ``agree`` just before the first collective of each DDP that is built in the block.

    TorchRec builds DDP in constructors, after work that may fail on one rank alone, such as
    allocating tables.
    """

    # DDP sets its attribute ``module`` before it communicates.
    def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and name == "module":
            agree()

    handle = register_module_module_registration_hook(on_registration)
    try:
        yield
    finally:
        handle.remove()


def _move_rows(change: Change, stored: nn.Module, steppers: Steppers) -> list[Stepped]:
    """Move optimizer state, and weights of sharded collections. Collective over their ranks."""
    site, kept, placed = change.site, change.kept, change.placed
    if site.is_sharded:
        return move_collection(site.module, stored, kept, steppers, placed)
    # Other modules got their weights when they were built.
    stepped = []
    parameters = site.parameters(stored)
    for table, old in site.parameters().items():
        rows, columns = parameters[table].shape
        states = {}
        for key, state in steppers.states(old).items():
            into = None if placed is None else placed[table]
            fresh = steppers.initial(old, key)
            states[key] = cut(state, kept[table], rows, columns, placed=into, fill=fresh)
        stepped.append(Stepped(old, parameters[table], states))
    return stepped


# Release


def _release(
    model: nn.Module,
    sites: Iterable[Site],
    stepped: Iterable[Stepped],
    steppers: Steppers,
    action: str,
) -> None:
    """Give optimizers the new parameters, and free the old tables: using what held them raises from
    now on. Local."""
    for pair in stepped:
        steppers.replace(pair)
    for site in sites:
        _release_site(site, action)
    if (torchrec := dmp_port(model)) is not None:
        _consume_model(model, torchrec, action)


def _release_site(site: Site, action: str) -> None:
    """Free the old tables of a module. Using a parameter that a list still holds, for clipping for
    example, raises."""
    for name, parameter in list(site.module.named_parameters()):
        consume_parameter(parameter, f"{site.path}.{name}".lstrip("."), action)
    if isinstance(site, CollectionSite) and site.is_sharded:
        for used in (site.module, *site.collection.optimizers()):
            consume(used, "This table collection", action)


def _consume_model(model: nn.Module, torchrec: TorchRecPort, action: str) -> None:
    """Release all that a DistributedModelParallel holds except the user's module: using it raises
    from now on."""
    # After a forward without a backward, hooks of the old DDP would run in the next backward of the
    # new model.
    layers = torchrec.dense_layers(model)
    if isinstance(layers, DistributedDataParallel):
        consume(layers, "This model", action)
    consume(model, "This model", action)


# Stale uses
#
# A released storage would crash the process, and an empty tensor would compute in silence: its L2
# norm is 0. So the class of the object is replaced by a subclass that raises.


def consume(used: Any, name: str, action: str = "compact") -> None:
    """Release everything that an object holds. Using it raises a RuntimeError from now on.

    Args:
        used: a module or an optimizer.
        name: of the object, for the message.
        action: what released it, ``"compact"`` or ``"expand"``.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.replacing import consume
        >>> model = torch.nn.Linear(2, 2)
        >>> consume(model, "This model")
        >>> model(torch.ones(2))
        Traceback (most recent call last):
        RuntimeError: This model was compacted, and its memory released: use the model that
        compact() returned...
    """

    def refuse(self: Any, attribute: str) -> Any:
        # isinstance() reads __class__.
        if attribute.startswith("__"):
            return object.__getattribute__(self, attribute)
        raise RuntimeError(
            f"{name} was {action}ed, and its memory released: use the model that {action}()"
            " returned, and its fused_optimizer."
        )

    used.__dict__.clear()
    kind = type(used)
    object.__setattr__(used, "__class__", type("Consumed", (kind,), {"__getattribute__": refuse}))


def consume_parameter(parameter: nn.Parameter, name: str, action: str = "compact") -> None:
    """Release the memory of a table. Computing with it, and reading its gradient or shape, raises
    from now on.

    It can still be compared by ``is``, be a key of a dictionary, and be printed. TorchRec's
    parameter of a fused table is a view, and FBGEMM's batch of tables is released with the last of
    them: a backward that has not come may write to it.

    Args:
        parameter: a leaf, or TorchRec's view of a fused table.
        name: fully qualified, for the message.
        action: what released it, ``"compact"`` or ``"expand"``.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.replacing import consume_parameter
        >>> table = torch.nn.Parameter(torch.ones(4, 2))
        >>> consume_parameter(table, "item.weight")
        >>> table.square().sum()
        Traceback (most recent call last):
        RuntimeError: The table item.weight was compacted, and its memory released: ...
    """
    message = (
        f"The table {name} was {action}ed, and its memory released: what holds it was made before."
        f" Make it again from the model that {action}() returned: optimizers, lists for clipping"
        " or L2, averages of weights."
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    kind = type(parameter)
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    vars(parameter).clear()
    # TorchRec's view holds the whole batch of tables in one.
    for slot in getattr(kind, "__slots__", ()):
        if hasattr(parameter, slot):
            delattr(parameter, slot)
    members = {
        "__torch_function__": classmethod(refuse),
        "__repr__": lambda self: f"<{message}>",
        # TorchRec's view has a property of its own, which torch does not dispatch.
        "grad": property(refuse),
    }
    parameter.__class__ = type("Consumed", (kind,), members)

"""For tests of the enforcer: every row is checked from inside the lookup that reads it, in a loop
that trains.

Masks are taken from the oracle, and pieces of them from TorchRec's own metadata, so that nothing
here relies on what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dist_sparse import BaseDataSparsifier, CubicDataScheduler, DataNormSparsifier, MaskEnforcer
from tests.dist.cells import Cell, TableSpec, cells
from tests.oracle import oracle_mask

__all__ = [
    "SMALL",
    "Reads",
    "Run",
    "Small",
    "cut",
    "features_of",
    "given_out",
    "kernels",
    "loss_of",
    "optimizer_of",
    "pieces",
    "read_as_zeros",
    "small",
    "total",
    "trained_cells",
]

SMALL: Final = (TableSpec("a", 24, 8, ("a1", "a2")), TableSpec("b", 13, 16, ("b1",)))

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trained_cells(world: int) -> dict[str, Cell]:
    """The cells that a CPU can train, and trains rightly.

    In FBGEMM's backward on a CPU a table without rows passes its width on to the table behind it,
    whose updates land in other rows then. So a row-wise table has a row for every rank, where
    widths differ.
    """
    found = {}
    for name, cell in cells(world).items():
        if cell.trains:
            tables = tuple(replace(t, rows=max(t.rows, world)) for t in cell.tables)
            found[name] = replace(cell, tables=tables) if name.startswith("row_wise") else cell
    return found


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With an eps that float16 can hold."""
    return torch.optim.Adam(params, lr=0.05, eps=1e-3)


def optimizer_of(
    model: nn.Module, tables: Optimizers = adam, layers: Optimizers = adam
) -> CombinedOptimizer:
    """All that steps a sharded model: TorchRec's fused optimizers, one for data-parallel tables,
    one for layers."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    of_tables = {
        name: dense.pop(name)
        for name in list(dense)
        if ".embedding_bags." in name or ".embeddings." in name
    }
    parts: list[Any] = [model.fused_optimizer]
    for params, make in ((of_tables, tables), (dense, layers)):
        if params:
            parts.append(KeyedOptimizerWrapper(params, make))
    return CombinedOptimizer(parts)


def kernels(model: nn.Module) -> list[Any]:
    """TorchRec's modules around FBGEMM's batches of tables, fused or not, on this rank."""
    # A plain list.
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    return [
        module for lookup in lookups for module in lookup.modules() if hasattr(module, "emb_module")
    ]


def pieces(kernel: Any) -> list[tuple[str, tuple[int, int], Tensor]]:
    """``(table, (row, column), live shard)`` of a kernel, in its order."""
    found = []
    for config, view in zip(
        kernel._config.embedding_tables, kernel.emb_module.split_embedding_weights(), strict=True
    ):
        row, col = (
            config.local_metadata.shard_offsets if config.local_metadata is not None else (0, 0)
        )
        found.append((config.name, (row, col), view.data))
    return found


def cut(full: Tensor, at: tuple[int, int], like: Tensor) -> Tensor:
    """The part of a global mask over a shard."""
    return full[at[0] : at[0] + like.shape[0], at[1] : at[1] + like.shape[1]]


def total(number: int) -> int:
    """The sum over the ranks. Collective."""
    summed = torch.tensor([number])
    dist.all_reduce(summed)
    return int(summed)


def read_as_zeros(sparsifier: BaseDataSparsifier) -> None:
    """Have removed rows read, trained and zeroed again, as a score of their gradients asks for: the
    oracle for lookups that act on the ids of removed rows."""
    kind = type(sparsifier)
    sparsifier.__class__ = type(kind.__name__, (kind,), {"trains_removed": True})


class Reads:
    """What lookups read, looked at below all hooks: in place of ``emb_module.forward``.

    Args:
        model: its kernels of this moment are followed; :meth:`follow` again after they were
            replaced.
        masks: global ones by table, 0 = removed; to be kept up to date.

    Attributes:
        lookups: how often a kernel was called.
        removed: removed elements that were read.
        wrong: those of them that were not 0.
        revived: those that were not 0 before any hook had run.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
        self.masks = dict(masks)
        self.lookups = self.removed = self.wrong = self.revived = 0
        self._undo: list[Callable[[], None]] = []
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Looks into the lookups of these kernels, and of no others any more."""
        self.close()
        for kernel in kernels(model):
            self._undo.append(
                kernel.register_forward_pre_hook(self._before_hooks, prepend=True).remove
            )
            kernel.emb_module.forward = self._forward(kernel, kernel.emb_module.forward)
            self._undo.append(lambda batch=kernel.emb_module: delattr(batch, "forward"))

    def close(self) -> None:
        """Leaves the model as it was."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _forward(self, kernel: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def looked_at(*, indices: Tensor, offsets: Tensor, **others: Any) -> Any:
            self.lookups += 1
            removed, alive = self.look(kernel, indices, offsets)
            self.removed += removed
            self.wrong += alive
            return forward(indices=indices, offsets=offsets, **others)

        return looked_at

    def _before_hooks(self, kernel: Any, args: tuple[KeyedJaggedTensor]) -> None:
        self.revived += self.look(kernel, args[0].values(), args[0].offsets())[1]

    def look(self, kernel: Any, indices: Tensor, offsets: Tensor) -> tuple[int, int]:
        """How many removed elements these ids read, and how many of them are not 0."""
        tables = kernel._config.embedding_tables
        features = [number for number, table in enumerate(tables) for _ in table.feature_names]
        held = pieces(kernel)
        size, rest = divmod(offsets.numel() - 1, len(features))
        assert rest == 0
        removed = alive = 0
        for number, table in enumerate(features):
            name, at, weight = held[table]
            ids = indices[offsets[number * size] : offsets[(number + 1) * size]].long()
            if name not in self.masks or not ids.numel():
                continue
            # FBGEMM reads row 0.
            rows = torch.where((ids < 0) | (ids >= weight.shape[0]), 0, ids).unique()
            gone = cut(self.masks[name], at, weight)[rows] == 0
            removed += int(gone.sum())
            alive += int((weight[rows][gone] != 0).sum())
        return removed, alive


def given_out(model: nn.Module) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """``(table, (row, column), tensor)`` of this rank, as ``state_dict()`` gives tables out."""
    for fqn, value in model.state_dict().items():
        *path, table, parameter = fqn.split(".")
        if parameter != "weight" or not path or path[-1] not in ("embedding_bags", "embeddings"):
            continue
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, col = shard.metadata.shard_offsets
                yield table, (row, col), shard.tensor
        else:
            yield table, (0, 0), value


def loss_of(out: Tensor) -> Tensor:
    """Of one rank; that of the world is their mean. A square at first, then a line, so that no step
    is too long."""
    return (1 + (out / 16 - 1) ** 2).sqrt().mean() * 16


def features_of(
    tables: Sequence[TableSpec], ids: Mapping[str, list[list[int]]], size: int = 6
) -> KeyedJaggedTensor:
    """A batch of ``size`` samples from the ids of the first of them, by feature; there are no
    others."""
    keys = [feature for table in tables for feature in table.features]
    samples = [sample for key in keys for sample in (*ids.get(key, ()), *[[]] * size)[:size]]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor([i for sample in samples for i in sample], dtype=torch.int64),
        lengths=torch.tensor([len(sample) for sample in samples]),
    )


class Small(nn.Module):
    """Bags of two tables, 8 and 16 wide, in a forward that TorchRec's pipelines can trace."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=t.name,
                    num_embeddings=t.rows,
                    embedding_dim=t.dim,
                    feature_names=list(t.features),
                )
                for t in SMALL
            ],
            is_weighted=weighted,
        )
        self.over = nn.Linear(sum(t.dim * len(t.features) for t in SMALL), 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The loss, and one number per sample."""
        out = self.over(self.tables(features).values()).squeeze(1)
        return loss_of(out), out


def small(
    generators: Mapping[str, Any],
    *,
    weighted: bool = False,
    fused_params: dict[str, Any] | None = None,
) -> DistributedModelParallel:
    """:class:`Small` on the ranks of this world, with SGD if ``fused_params`` do not say otherwise.
    Collective."""
    torch.manual_seed(0)
    net = Small(weighted)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        if fused_params is None
        else fused_params
    )
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        net.tables,
        dict(generators),
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    for sharding in plan.values():
        sharding.compute_kernel = "fused"
    return DistributedModelParallel(
        net, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


class Run:
    """A model that trains while its masks move, watched. Collective, as everything of it.

    Args:
        model: sharded, or plain in one process.
        block, norm: of the sparsifier.
        final, steps, every: of a cubic schedule from step 0 to ``steps``; without ``every`` nothing
            is scheduled.
        optimizer: all that steps the model.
        attach: False for a run in which removed weights come back.
        zeroed: removed rows are read as zeros, trained and zeroed again.
    """

    def __init__(
        self,
        model: nn.Module,
        block: tuple[int, Any] = (1, 4),
        norm: str = "L2",
        *,
        final: float = 0.8,
        steps: int = 45,
        every: int | None = None,
        optimizer: Any = None,
        optimizer_state: str = "keep",
        attach: bool = True,
        zeroed: bool = False,
    ) -> None:
        self.model = model
        self.sparsifier = DataNormSparsifier(
            sparsity_level=0.0, sparse_block_shape=block, norm=norm
        )
        self.names = self.sparsifier.add_model(model)
        self.block, self.norm = block, norm
        self.optimizer = optimizer_of(model) if optimizer is None else optimizer
        shapes = {name: tuple(self.sparsifier.full_mask(name).shape) for name in self.names}
        self.reads = Reads(model, {name: torch.ones(shape) for name, shape in shapes.items()})
        self.scheduler = None
        if every is not None:
            self.scheduler = CubicDataScheduler(
                self.sparsifier, "sparsity_level", final=final, begin=0, end=steps, every=every
            )
        if zeroed:
            read_as_zeros(self.sparsifier)
        self.enforcer = MaskEnforcer(self.sparsifier, optimizer_state)
        if attach:
            self.enforcer.attach(self.optimizer)
        self.moves = self.looked = 0
        self.faults: list[str] = []

    def raw(self) -> dict[str, Tensor]:
        """The global weights past the model's state_dict, which would settle them."""
        everyone: list[Any] = [None] * dist.get_world_size()
        mine = [
            (name, at, view.clone())
            for kernel in kernels(self.model)
            for name, at, view in pieces(kernel)
        ]
        dist.all_gather_object(everyone, mine)
        full = {name: torch.full(mask.shape, torch.nan) for name, mask in self.reads.masks.items()}
        for name, at, part in (piece for theirs in everyone for piece in theirs):
            cut(full[name], at, part).copy_(part)
        return full

    def train(self, features: KeyedJaggedTensor) -> Tensor:
        """One step of the optimizer on this rank's batch, after which tables that are not fused are
        right. Returns the loss."""
        self.optimizer.zero_grad()
        out = self.model(features)
        loss = out[0] if isinstance(out, tuple) else loss_of(out)
        loss.backward()
        self.optimizer.step()
        for kernel in kernels(self.model):
            if not hasattr(kernel.emb_module, "split_optimizer_states"):
                for piece in pieces(kernel):
                    self._check_zero(*piece)
        return loss.detach()

    def step(self) -> None:
        """Moves the masks if they are due; they must be those of the oracle on the weights of this
        moment."""
        if not self.sparsifier.enable_mask_update:
            self.sparsifier.step()
        else:
            raw = self.raw()
            before = {
                name: torch.where(self.reads.masks[name] != 0, full, 0.0)
                for name, full in raw.items()
            }
            self.sparsifier.step()
            self.moves += 1
            # The oracle is slow: every table is left to one rank.
            wanted: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(wanted, self._wanted(before))
            self.reads.masks = {name: mask for theirs in wanted for name, mask in theirs.items()}
            for name, want in self.reads.masks.items():
                got = self.sparsifier.full_mask(name)
                assert torch.equal(got, want), (
                    f"{name}: {int((got != want).sum())} elements of the mask differ"
                )
        if self.scheduler is not None:
            self.scheduler.step()

    def _wanted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The oracle's masks of this rank's share of the tables."""
        groups, world = self.sparsifier.data_groups, dist.get_world_size()
        return {
            name: oracle_mask(full, groups[name]["sparsity_level"], self.block, None, self.norm)
            for number, (name, full) in enumerate(weights.items())
            if number % world == dist.get_rank()
        }

    def move(self, level: float) -> None:
        """As :meth:`step` to a level, whatever the schedule."""
        for group in self.sparsifier.data_groups.values():
            group["sparsity_level"] = level
        self.step()

    def check_reads(self, *, revived: bool = True, dropped: bool = False) -> None:
        """Lookups have read removed elements, over all ranks, and every one was 0; or ``revived``
        is not to be seen, or whole rows were ``dropped``, which nothing reads."""
        assert not self.faults, f"{len(self.faults)} faults: {self.faults[:5]}"
        assert self.reads.wrong == 0, (
            f"{self.reads.wrong} of {self.reads.removed} removed elements read were not 0"
        )
        assert total(self.reads.removed) > 0 or dropped
        if revived and not dropped:
            assert total(self.reads.revived) > 0, "nothing was revived, so nothing was tested"

    def check_given_out(self) -> None:
        """Neither the model's state_dict nor ``get_data`` shows a removed element that is not 0.
        What is wrong is noted for :meth:`check_reads`, so that the ranks stay together."""
        # The first one settles all, so they take turns.
        looks = [
            self._check_data,
            self._check_state,
        ]
        self.looked += 1
        for look in looks if self.looked % 2 else looks[::-1]:
            look()

    def _check_data(self) -> None:
        for name in self.names:
            if len(self.sparsifier.local_masks(name)) == 1:
                self._check_zero(
                    name, self.sparsifier.local_masks(name)[0][0], self.sparsifier.get_data(name)
                )

    def _check_state(self) -> None:
        for name, at, weight in given_out(self.model):
            self._check_zero(name, at, weight)

    def _check_zero(self, name: str, at: tuple[int, int], weight: Tensor) -> None:
        alive = weight[cut(self.reads.masks[name], at, weight) == 0]
        if bool((alive != 0).any()):
            self.faults.append(
                f"{name} at {at}: {int((alive != 0).sum())} removed elements are not 0"
            )

"""TorchRec and FBGEMM as the rest of the package sees them.

Implemented in :mod:`dist_sparse.torchrec`, which :func:`~dist_sparse.tables.modules.torchrec_port`
returns. These types need torch alone. A TorchRec model replaces what is below a collection when it
is resharded, so a :class:`TableCollection` or :class:`TableBatch` is read again where it is needed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet, Sequence, Set
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from dist_sparse.tables.shards import ShardedData


class TableConfig(NamedTuple):
    """A table of a collection: which features look it up, how their rows are pooled, and what its
    initial values are drawn from (see :class:`~dist_sparse.tables.shards.ShardedData`)."""

    name: str
    features: tuple[str, ...]
    rows: int
    pooling: Literal["sum", "mean", "none"]
    drawn: tuple[float, float] | None = None


# The weights of the ids of a lookup, 0 for removed rows; see TableBatch.mask_weights().
WeightsOf = Callable[[Tensor, Sequence[int] | Tensor, Tensor | None], Tensor]


# A property here may be an attribute of an implementation, but not the other way round.
class LookupKernel(Protocol):
    """The tables of one FBGEMM kernel on this rank, as lookups see them."""

    @property
    def module(self) -> nn.Module:
        """TorchRec's kernel, called with a KeyedJaggedTensor of ids local to the shards. The same
        object as long as the batch is in place."""

    @property
    def features(self) -> Sequence[int]:
        """For each feature of the ids, the number of its shard."""

    @property
    def pooling(self) -> Literal["sum", "mean", "none"]:
        """How the rows of a bag are pooled."""

    @property
    def divides_later(self) -> bool:
        """Whether sums of :attr:`module` become means after the output distribution."""

    @property
    def loss_share(self) -> float:
        """What the gradient of a rank's loss is multiplied by on its way to the output of
        :attr:`module`: 1 / N where TorchRec averages the losses of N ranks, 1 where it adds them up
        or where every rank has a whole copy."""

    def weights(self) -> list[Tensor]:
        """Return live views of the shards."""


class TableBatch(LookupKernel, Protocol):
    """The tables of one FBGEMM kernel on this rank, which its fused optimizer writes inside the
    backward.

    Attributes:
        is_adagrad: the first optimizer state is the sum of squared gradients.
        kernel: FBGEMM's module inside :attr:`module`, called with keywords.
    """

    is_adagrad: bool
    kernel: nn.Module

    @property
    def tables(self) -> Sequence[str]:
        """The name of each shard's table."""

    @property
    def keeps_zeros(self) -> bool:
        """Whether its optimizer leaves a row of zeros alone if the gradient is zero."""

    @property
    def cached(self) -> Set[int]:
        """The shards whose rows are cached on the device: :meth:`weights` may be out of date."""

    @property
    def pending(self) -> MutableSet[object]:
        """Lookups whose backward has not run yet. The enforcer adds and removes them."""

    def write_back(self) -> None:
        """Write cached rows back to :meth:`weights`, and empty the cache: until the next lookup,
        weights may be read and written in place. Do nothing where no rows are cached.

        Raises:
            ValueError: a lookup holds cached rows; names the tables.
        """

    def states(self) -> list[Sequence[Tensor]]:
        """Return live views of each shard's optimizer state: of its shape, or one value per row."""

    def storage(self) -> list[Tensor]:
        """Return the tensors that hold the weights of all shards."""

    def mask_weights(self, call: dict[str, Any], weights_of: WeightsOf) -> dict[str, Any]:
        """Return the keywords of a pooled lookup in which some ids have the weight 0: their rows
        add nothing to the output, and get the gradient 0. Call :meth:`restore_pooling` after the
        lookup.

        Args:
            call: the keywords of :attr:`kernel`.
            weights_of: called with all ids, ``(n,)``, the offsets of the features (on a device as a
                tensor), and the weights of the ids, None for 1. Returns the weights with 0 for ids
                of removed rows.
        """

    def restore_pooling(self, *_: object) -> None:
        """Pool as before :meth:`mask_weights`. Takes what a forward hook gets."""

    def hyperparameters(self) -> dict[str, float]:
        """Return the optimizer's hyperparameters that FBGEMM can change, and its step count."""


# One protocol for both kinds: the same code compacts and exports them.
class TableCollection(Protocol):
    """A collection of tables, sharded or not.

    Attributes:
        is_sharded: TorchRec has sharded it.
        pooled: it returns bags: the rows of a sample's ids, pooled.
        weighted: its ids have weights.
        needs_indices: it returns the ids beside their rows.
        merges_ids: an id that a batch has several times reaches the kernels only once (index
            dedup), so that lookups can't be counted there.
        attribute: the attribute that holds the embedding modules, a part of fully qualified names.
    """

    is_sharded: bool
    pooled: bool
    weighted: bool
    needs_indices: bool
    merges_ids: bool
    attribute: str

    @property
    def tables(self) -> list[TableConfig]: ...

    def fqn(self, path: str, table: str) -> str:
        """Return the fully qualified name of a table's weight in a collection at ``path``."""

    def outputs(self) -> dict[str, str]:
        """Return the table of each output, in no order."""

    def embeddings(self) -> dict[str, nn.Module]:
        """Return the embedding modules by table; none if the collection is sharded."""

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        """Return a table of a sharded collection as it is stored now, under a registered name."""

    def kernels(self) -> Iterator[LookupKernel]:
        """Yield this rank's kernels, with or without a fused optimizer."""

    def batches(self) -> Iterator[TableBatch]:
        """Yield this rank's table batches with a fused optimizer."""

    def set_hyperparameters(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Set the hyperparameters of fused optimizers by table.

        Raises:
            ValueError: two tables of one batch differ in them.
        """

    def bounds_checks(self) -> dict[str, str]:
        """Return FBGEMM's ``bounds_check_mode`` by table: ``"FATAL"``, ``"WARNING"``, ``"IGNORE"``
        or ``"NONE"``. Tables without a fused kernel are left out: their lookups raise."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that plain optimizers step on this rank, by table; empty ones where
        a rank holds nothing of a table."""

    def optimizers(self) -> list[Any]:
        """Return the fused optimizers of a sharded collection."""


class Replacement(NamedTuple):
    """A sharded collection and the unsharded one that replaces it, with their paths in the user's
    module."""

    old: nn.Module
    old_path: str
    new: nn.Module
    new_path: str


# Implemented by a module, dist_sparse.torchrec.port: mypy matches its functions to these methods.
class TorchRecPort(Protocol):
    """What the package needs of TorchRec. Functions accept modules of other libraries too, and say
    what they return for them."""

    def collection(self, module: nn.Module) -> TableCollection | None:
        """Return a collection as it is now, None for another module."""

    def refusal(self, module: nn.Module) -> str | None:
        """Return why the tables below a TorchRec module can't be sparsified, and what would work;
        None if they can."""

    def is_sharded(self, module: nn.Module) -> bool:
        """Return whether a module is a sharded collection."""

    def lookups(self, module: nn.Module) -> list[nn.Module]:
        """Return the lookups of a sharded collection, [] of another module. A reshard makes new
        ones on every rank, with or without shards. Not in the module tree."""

    def processes_features(self, module: nn.Module) -> bool:
        """Return whether a module reads the collection in it without calling it, behind a feature
        processor."""

    def averages(self, module: nn.Module) -> bool:
        """Return whether a module averages copies of its tables periodically, by its method
        ``sync``."""

    def select_ids(self, features: Any, chosen: Tensor) -> Any:
        """Return a KeyedJaggedTensor of the ``chosen`` ids, bool ``(n,)``, and their weights,
        through which gradients flow back."""

    def with_outputs(self, output: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
        """Return the output of a collection with each of its parts changed once it has arrived.

        Args:
            change: takes an output's name and its values, ``(..., columns)``, and returns values of
                as many rows.
        """

    def parts(self, optimizer: object) -> list[Any] | None:
        """Return the optimizers inside one of TorchRec's: the parts of a CombinedOptimizer; [] for
        one that only represents a fused optimizer. None for another optimizer."""

    def fused_steps(self, optimizer: Any) -> int | None:
        """Return how many steps a fused optimizer has taken, None for another optimizer."""

    def replace_parameter(self, optimizer: object, old: nn.Parameter, new: nn.Parameter) -> None:
        """Replace a parameter in the names that keyed optimizers have for parameters."""

    def is_sharded_model(self, model: nn.Module) -> bool:
        """Return whether a model is a DistributedModelParallel."""

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside a DistributedModelParallel."""

    def dense_layers(self, model: nn.Module) -> nn.Module:
        """Return the DDP module of a DistributedModelParallel's dense layers, the user's module if
        there is none."""

    def compact_refusal(self, model: nn.Module, module: nn.Module) -> str | None:
        """Return why a collection of ``model`` can't be compacted, or None."""

    def compact_plan(
        self,
        model: nn.Module,
        root: nn.Module,
        replacements: Iterable[Replacement],
        planner: Callable[[nn.Module], Any] | None,
    ) -> dict[str, Any]:
        """Return the plan, by path, of a model in which collections have replaced others.

        Args:
            root: the user's module.
            planner: returns a plan for ``root``; None derives it from the old one.
        """

    def reshard(self, model: nn.Module, root: nn.Module, plan: Mapping[str, Any]) -> nn.Module:
        """Return a DistributedModelParallel like ``model`` around ``root``. Rows on the meta device
        are sharded, not filled; dense layers are not under DDP yet.

        Collective where a collection has data-parallel tables, which TorchRec puts under DDP at
        once.
        """

    def wrap_layers(self, new: nn.Module, model: nn.Module) -> None:
        """Put the dense layers of a new DistributedModelParallel under DDP if ``model`` has them
        there. Collective."""

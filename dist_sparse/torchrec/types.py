"""TorchRec's own classes, for modules that subclass or build them.

Every other module of this package that needs them imports them from here, behind the checks of
releases and of private names: a release that lacks several names fails with one list.
"""

from __future__ import annotations

from dist_sparse.torchrec.contract import check_contract

# Before TorchRec's own imports, each of which would report the first missing name alone.
check_contract()

from torchrec.distributed.embedding import ShardedEmbeddingCollection  # noqa: E402
from torchrec.distributed.embedding_types import ShardedEmbeddingModule  # noqa: E402
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection  # noqa: E402
from torchrec.distributed.fp_embeddingbag import (  # noqa: E402
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import (  # noqa: E402
    DistributedModelParallel,
    DMPCollection,
    get_module,
)
from torchrec.distributed.types import (  # noqa: E402
    BoundsCheckMode,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv2D,
    ShardingPlan,
    ShardingStrategy,
)
from torchrec.modules.embedding_configs import (  # noqa: E402
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)
from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.modules.fp_embedding_modules import (  # noqa: E402
    FeatureProcessedEmbeddingBagCollection,
)
from torchrec.optim.fused import FusedOptimizer  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer  # noqa: E402
from torchrec.sparse.jagged_tensor import (  # noqa: E402
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)

__all__ = [
    "BoundsCheckMode",
    "CombinedOptimizer",
    "DMPCollection",
    "DataType",
    "DistributedModelParallel",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "EmbeddingModuleShardingPlan",
    "FeatureProcessedEmbeddingBagCollection",
    "FusedOptimizer",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedTensor",
    "LazyAwaitable",
    "ParameterSharding",
    "PoolingType",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedEmbeddingModule",
    "ShardedFeatureProcessedEmbeddingBagCollection",
    "ShardingEnv2D",
    "ShardingPlan",
    "ShardingStrategy",
    "data_type_to_dtype",
    "get_embedding_names_by_table",
    "get_module",
]

"""The functions of :class:`~dist_sparse.tables.protocols.TorchRecPort`."""

from __future__ import annotations

from dist_sparse.torchrec.collections import (
    averages,
    collection,
    is_sharded,
    lookups,
    processes_features,
    refusal,
)
from dist_sparse.torchrec.models import (
    compact_plan,
    compact_refusal,
    dense_layers,
    is_sharded_model,
    reshard,
    unwrapped,
    wrap_layers,
)
from dist_sparse.torchrec.optimizers import combined, is_fused, named_parameters
from dist_sparse.torchrec.outputs import among, with_outputs

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
from dist_sparse.torchrec.jagged import among, with_outputs
from dist_sparse.torchrec.models import (
    combined,
    compact_plan,
    compact_refusal,
    dense_layers,
    is_fused,
    is_sharded_model,
    named_parameters,
    reshard,
    unwrapped,
    wrap_layers,
)

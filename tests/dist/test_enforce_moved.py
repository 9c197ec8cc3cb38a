"""attach() after shards have moved: what one rank refuses does not leave the others waiting."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from tests.dist.cells import batch, build
from tests.dist.plugin import on_ranks
from tests.dist.test_reshard import moves, reshard

pytestmark = pytest.mark.dist


@on_ranks(2)
@pytest.mark.parametrize("fault", ["optimizer", "compiled"])
def test_a_rank_that_refuses(fault: str) -> None:
    cell, move = moves(2)["table_wise"]
    model = build(cell)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    before = sparsifier.fingerprint()
    reshard(model, move, 2)
    enforcer = MaskEnforcer(sparsifier)
    if dist.get_rank() == 0:
        enforcer.attach()
    elif fault == "optimizer":
        with pytest.raises(ValueError, match="Invalid optimizer of type int"):
            enforcer.attach(3)
    else:
        model.compile()
        with pytest.raises(ValueError, match="The model is compiled"):
            enforcer.attach()
        model._compiled_call_impl = None
    dist.barrier()  # no other collective call of the library comes to a waiting rank's help
    assert sparsifier.fingerprint() == before, "masks have followed their shards on both ranks"
    if not enforcer.attached:
        enforcer.attach()
    model(batch(cell, seed=dist.get_rank(), size=20)).square().mean().backward()
    enforcer.settle()
    for name in sparsifier.data_groups:
        for _, mask in sparsifier.local_masks(name):
            assert bool((mask == 0).any())
    enforcer.detach()

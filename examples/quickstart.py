"""Remove the rows that training never read: TorchRec, in one process and under torchrun."""

import logging
import os
import shutil
import warnings

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dist_sparse as ds

logging.disable(logging.WARNING)  # TorchRec's notices about its own internals
warnings.simplefilter("ignore", FutureWarning)

if "RANK" in os.environ:  # under torchrun
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(dist.get_rank())  # every rank has examples of its own

configs = [
    EmbeddingBagConfig(
        name="user", num_embeddings=2000, embedding_dim=16, feature_names=["user_id"]
    ),
    EmbeddingBagConfig(
        name="item", num_embeddings=1000, embedding_dim=16, feature_names=["item_id"]
    ),
]
tables = EmbeddingBagCollection(tables=configs)
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
# Its planner shards the tables.
model = DistributedModelParallel(tables, device=torch.device("cpu"))
optimizer = model.fused_optimizer

for _ in range(100):
    ids = torch.cat([torch.randint(400, (64,)), torch.randint(200, (64,))])
    batch = KeyedJaggedTensor(
        ["user_id", "item_id"], ids, lengths=torch.ones(128, dtype=torch.int64)
    )
    vectors = model(batch).to_dict()
    score = (vectors["user_id"] * vectors["item_id"]).sum(1)
    (score - 1).square().mean().backward()  # the fused optimizer updates the tables in here
    optimizer.step()

removed = ds.remove_untouched(model)  # collective: every rank must call it
if dist.get_rank() == 0:
    print(removed)

if dist.get_rank() == 0:
    shutil.rmtree("quickstart_served", ignore_errors=True)  # of an earlier run
artifact = ds.export(model, removed, "quickstart_served", dtype="int4")  # collective, too
if dist.get_rank() == 0:
    served = ds.load_served(artifact)  # unsharded, in any process
    shapes = {name: tuple(rows.shape) for name, rows in served(batch).to_dict().items()}
    print("served:", shapes)
dist.destroy_process_group()

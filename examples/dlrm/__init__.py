"""A DLRM on real data: dense, sparsified during training, and small. Start it with
``make train``."""

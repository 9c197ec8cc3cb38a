"""The main job: a DLRM on real data, dense, sparsified while it trains, and small. Start it with ``make train``."""

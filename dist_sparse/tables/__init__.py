"""Where tensors are stored: shards, rectangles, and the tables of a model."""

"""One call that prunes a model during training."""

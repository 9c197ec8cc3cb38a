"""OptimScheduler: one optimizer step with accumulation, AMP, clipping, learning rates and sparsity."""

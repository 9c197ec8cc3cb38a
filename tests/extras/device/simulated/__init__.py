"""CUDA without a GPU: a device that is not there, and what the package does on it."""

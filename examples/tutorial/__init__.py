"""A DLRM from training under torchrun to a server with two workers."""

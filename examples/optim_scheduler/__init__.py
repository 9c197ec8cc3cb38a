"""A DLRM-like model under DDP, trained and sparsified by two OptimSchedulers; start ``main.py``."""

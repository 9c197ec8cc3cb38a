"""Data sparsifiers: what is registered, its masks, and their updates."""

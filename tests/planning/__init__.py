"""Tests of `dist_sparse.planning`."""

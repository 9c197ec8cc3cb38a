"""Sparse 8-bit tables of trained models, and grids that hold zero exactly.

Nothing is imported here: serving needs the grids without what sparsifies.
"""

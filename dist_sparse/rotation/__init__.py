"""Rotations that gather the content of tables in few columns, without changing what a model
computes."""

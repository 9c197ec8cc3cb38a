"""Rotations that gather the information of a table in few columns, and leave a model's output
unchanged."""

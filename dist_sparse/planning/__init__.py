"""Smaller forms of tables within a budget of bytes: which fit, and which to use, by rule or by
measurement."""

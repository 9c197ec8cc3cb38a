"""Ids of lookups: which row each has, how often each was looked up, and what share of them reads
removed rows."""

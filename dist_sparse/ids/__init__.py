"""Ids of lookups: how often each was looked up, and what share of them reads removed rows."""

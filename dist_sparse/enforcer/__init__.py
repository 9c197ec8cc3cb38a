"""Removed weights stay zero while a model trains."""

"""Files that serve sparsified tables: written, checked and loaded."""

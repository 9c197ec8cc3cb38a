"""Tables of a fixed number of rows that the most looked-up ids hold: see
:func:`dist_sparse.following`."""

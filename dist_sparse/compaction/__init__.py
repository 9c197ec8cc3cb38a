"""Tables that store kept rows and columns only, in training: see :func:`dist_sparse.compact`."""

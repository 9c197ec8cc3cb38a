"""What the core works without: each package here can be deleted, with its tests and its pages.

An extra uses public names of the core. The core imports none: see :mod:`dist_sparse.doors`.
"""

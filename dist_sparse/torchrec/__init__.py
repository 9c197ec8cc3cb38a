"""TorchRec and FBGEMM: the only package that imports them or knows their private names.

Importing this package imports neither, so that versions can be compared where they do not load.
"""

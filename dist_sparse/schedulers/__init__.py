"""How does a sparsifier's configuration change over training? ``base``: your own way; ``ready``: the usual ones."""

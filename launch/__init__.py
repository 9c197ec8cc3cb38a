"""Start training jobs from a clone. The code is `dist_sparse.launch`."""

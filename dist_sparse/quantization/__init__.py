"""Sparse 8-bit tables of trained models."""

from dist_sparse.quantization.modules import QuantizedEmbedding, QuantizedEmbeddingBag
from dist_sparse.quantization.quantize import post_training_sparse_quantize

__all__ = ["QuantizedEmbedding", "QuantizedEmbeddingBag", "post_training_sparse_quantize"]

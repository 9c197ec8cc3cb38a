"""Tables that are looked up through codes: product quantization, trained in place."""

from dist_sparse.extras.codes.coded_training import CodedTraining, quantize

__all__ = ["CodedTraining", "quantize"]

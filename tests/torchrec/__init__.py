"""The only package that imports TorchRec and FBGEMM."""

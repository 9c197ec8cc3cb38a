"""Triton kernels of mask updates and lookups on CUDA; the self-test of a machine's devices."""

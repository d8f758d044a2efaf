"""Decoding kernels in C for CPUs, compiled at first use; without a compiler inference uses torch."""

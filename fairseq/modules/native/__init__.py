"""Decoding kernels in C for CPUs, compiled at first use; inference falls back to torch where there is no compiler."""

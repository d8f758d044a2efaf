"""Kernels in C for CPUs, compiled at first use: sources, build and loading.

* ``training.c``, called by :mod:`fairseq.kernels.training`: dropout with ReLU or a residual, cross
  entropy, transposed copies.
* ``layers.c``, called by :mod:`fairseq.kernels.layers`: RMS norm, SwiGLU and rotary positions, with
  their gradients.
* ``attention.c``, called by :mod:`fairseq.kernels.attention`: attention, absolute and by distance,
  with its gradient.
* ``decoding.c``, called by :mod:`fairseq.inference.kernels`: a token through all layers, the
  embeddings of words and their probabilities.

:func:`fairseq.modules.dropout.kernels` loads the first three. Without a compiler (``CC=false``), on
other devices and in compiled graphs torch's operators compute the same, up to rounding.
"""

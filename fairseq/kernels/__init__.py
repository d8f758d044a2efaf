"""Kernels in C for CPUs, compiled at first use: sources, build and loading.

==============  ====================================
================================================================== source          called by
computes ==============  ====================================
================================================================== training.c
:mod:`fairseq.kernels.training`       dropout with ReLU or a residual, cross entropy, transposed
copies attention.c     :mod:`fairseq.kernels.attention`      attention, absolute and by distance,
with its gradient decoding.c      :mod:`fairseq.inference.stack`,       a token through all layers,
the embeddings of words and their
                :mod:`fairseq.inference.words`        probabilities
==============  ====================================
==================================================================

:func:`fairseq.modules.dropout.kernels` loads the first two. Without a compiler (``CC=false``), on
other devices, in compiled graphs and in exports torch's operators compute the same, up to rounding.
"""

"""Kernels in C for CPUs, compiled at first use, as operators of torch: sources, build and loading.

* ``dropout.c``: ``fairseq::dropout``, and ``fairseq::dropout_mask`` for attention.
* ``cross_entropy.c``: ``fairseq::cross_entropy``, with the gradient in the place of the logits.
* ``layers.c``: ``fairseq::rms_norm`` and ``fairseq::rotated``.
* ``attention.c``: ``fairseq::attention``, absolute and by distance, and its gradient.
* ``decoding.c``, called by :mod:`fairseq.inference.kernels`: a token through all layers, the
  embeddings of words and their probabilities. It is no operator: it writes into a cache, at
  addresses that are bound once for many tokens.

:func:`fairseq.modules.dispatch.kernels` decides where the others compute. Without a compiler
(``CC=false``) and on other devices torch's operators compute the same, up to rounding and other
masks of dropout. ``benchmarks/results/README.md`` has what each of them gains.
"""

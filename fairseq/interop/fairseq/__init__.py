"""What runs plug-ins written for fairseq: its order of calls, its files and its command lines.

The names that they import are modules of this package's layers, such as :mod:`fairseq.utils` and
:mod:`fairseq.data.iterators`. :mod:`~fairseq.interop.fairseq.connection` is what lower layers call.
"""

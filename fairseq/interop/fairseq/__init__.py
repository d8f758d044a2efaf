"""What plug-ins and scripts written for fairseq 0.9 to 0.12 import, in terms of this package.

Nothing in this package imports it. :mod:`fairseq.interop.fairseq.names` lists the names under which
it is found.
"""

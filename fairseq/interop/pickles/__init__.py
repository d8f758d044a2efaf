"""Checkpoints of other programs: one adapter a format,
and a reader of pickles that runs nothing in them."""

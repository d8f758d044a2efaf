"""Checkpoints of Transformer-XL's originals."""

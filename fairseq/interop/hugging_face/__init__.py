"""Folders of transformers: import and export."""

"""Kept for tools that look for it; the metadata is in pyproject.toml."""

from setuptools import setup

setup()

"""Flags and dataclasses: declaration of settings, command lines, YAML files, registries of parts."""

from fairseq.config.fields import flag

__all__ = ["flag"]

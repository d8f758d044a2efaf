"""Flags and dataclasses: declaration of settings,
command lines, YAML files, registries of parts."""

from fairseq.config.fields import Config, flag, typed

__all__ = ["Config", "flag", "typed"]

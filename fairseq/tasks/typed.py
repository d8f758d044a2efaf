"""The conversion of flat settings under the name that tests import."""

from fairseq.config.settings import training_settings, typed_settings

__all__ = ["training_settings", "typed_settings"]

"""The model that settings choose."""

from __future__ import annotations

from typing import Any

from fairseq.config.registry import ARCHITECTURES, EXTENSIONS, MODELS
from fairseq.config.settings import Settings, typed_settings
from fairseq.models.base import BaseFairseqModel
from fairseq.system.limits import ModelLimit, limited_models


def build_model(settings: Settings, task: Any) -> BaseFairseqModel:
    """The model of the architecture that *settings* choose, for *task*'s dictionary."""
    settings = typed_settings(settings)
    with limited_models(ModelLimit.of_machine()):
        model = MODELS[ARCHITECTURES[settings.chosen.arch].model].from_settings(settings, task)
        for name, cfg in settings.extensions.items():
            EXTENSIONS[name].extend_model(model, cfg, task)
    return model

"""Models and their architectures: named sets of defaults.

A model is registered with :func:`register_model`, its architectures with
:func:`~fairseq.config.registry.register_architectures`; plug-ins register theirs with
:func:`register_model_architecture`, on a function that sets defaults on a namespace.
"""

from fairseq.config.registry import ARCHITECTURES, MODELS, Architecture, register_model, register_model_architecture
from fairseq.models.base import BaseFairseqModel, FairseqLanguageModel, ModelConfig

__all__ = [
    "ARCHITECTURES",
    "MODELS",
    "Architecture",
    "BaseFairseqModel",
    "FairseqLanguageModel",
    "ModelConfig",
    "register_model",
    "register_model_architecture",
]

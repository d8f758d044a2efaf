"""Models and their architectures: named sets of defaults.

A model is registered with :func:`register_model`, an architecture with :func:`register_model_architecture` on a
function that fills in what the user left open in a ``Namespace``.
"""

from fairseq.config.registry import ARCHITECTURES, MODELS, Architecture, register_model, register_model_architecture
from fairseq.models.base import BaseFairseqModel, FairseqDecoder, FairseqLanguageModel, ModelConfig, build_model

__all__ = [
    "ARCHITECTURES",
    "MODELS",
    "Architecture",
    "BaseFairseqModel",
    "FairseqDecoder",
    "FairseqLanguageModel",
    "ModelConfig",
    "build_model",
    "register_model",
    "register_model_architecture",
]

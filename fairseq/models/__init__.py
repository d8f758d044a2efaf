"""Models and their architectures: named sets of defaults.

A model is registered with :func:`register_model`, its architectures with
:func:`~fairseq.config.registry.register_architectures`; plug-ins register theirs with
:func:`register_model_architecture`, on a function that sets defaults on a namespace.
"""

from fairseq.config.registry import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "ARCHITECTURES MODELS Architecture register_model register_model_architecture",
        "fairseq.models.base": "BaseFairseqModel FairseqLanguageModel",
        "fairseq.config.shared": "ModelConfig",
    },
)

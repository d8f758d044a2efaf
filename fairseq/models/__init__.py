"""Models and their architectures: named sets of defaults.

Built-in models are declared in :mod:`fairseq.parts`. Others are registered with
:func:`register_model` and :func:`register_model_architecture`.
"""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "ARCHITECTURES MODELS Architecture register_model register_model_architecture",
        "fairseq.models.base": "BaseFairseqModel FairseqLanguageModel",
        "fairseq.config.shared": "ModelConfig",
    },
)

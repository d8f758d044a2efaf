"""Models and their architectures: named sets of defaults.

Built-in models are declared in :mod:`fairseq.parts`. Others are registered with
:func:`register_model` and :func:`register_model_architecture`.
"""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": """
            ARCHITECTURES MODELS Architecture register_model register_model_architecture MODEL_REGISTRY=MODELS
        """,
        "fairseq.models.base": "BaseFairseqModel FairseqLanguageModel FairseqModel=BaseFairseqModel",
        "fairseq.models.fairseq_decoder": """
            FairseqDecoder FairseqEncoder FairseqEncoderModel FairseqIncrementalDecoder
        """,
        "fairseq.models.fairseq_model": "FairseqEncoderDecoderModel",
        "fairseq.models.registries": """
            build_model ARCH_MODEL_REGISTRY ARCH_MODEL_NAME_REGISTRY ARCH_MODEL_INV_REGISTRY ARCH_CONFIG_REGISTRY
            MODEL_DATACLASS_REGISTRY
        """,
        "fairseq.dataclass": "FairseqDataclass",
        "fairseq.utils": "import_models",
        "fairseq.config.shared": "ModelConfig",
    },
)

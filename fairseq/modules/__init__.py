"""Building blocks of models."""

from fairseq.system.deferred import names_of

# Names of functions and norms, without torch.
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_accurate", "gelu_fast", "silu", "tanh", "linear")
NORMS = ("layer", "rms")

__getattr__, _ = names_of(  # fairseq's
    __name__,
    {
        "fairseq.modules.adaptive_softmax": "AdaptiveSoftmax",
        "fairseq.modules.fairseq_modules": """
            AdaptiveInput FairseqDropout LayerNorm PositionalEmbedding LearnedPositionalEmbedding
            SinusoidalPositionalEmbedding LayerDropModuleList checkpoint_wrapper cross_entropy gelu gelu_accurate
        """,
        "fairseq.modules.multihead_attention": "MultiheadAttention",
        "fairseq.modules.fairseq_layers": """
            TransformerDecoderLayer TransformerEncoderLayer TransformerSentenceEncoder
            TransformerSentenceEncoderLayer
        """,
        "fairseq.modules.inert": "BaseLayer CharacterTokenEmbedder",
    },
)

"""Building blocks of models."""

# Names of functions and norms, without torch.
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_accurate", "gelu_fast", "silu", "tanh", "linear")
NORMS = ("layer", "rms")

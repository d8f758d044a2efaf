"""The border to other software: fairseq, Hugging Face, Transformer-XL's originals, lm-eval, foreign
pickles."""

"""Models for EleutherAI's lm-eval."""

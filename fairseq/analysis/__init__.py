"""What models do with their context: relative effective
context length, curves, plots."""

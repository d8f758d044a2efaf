"""What models do with their context: relative effective
context length, attention maps, curves, plots."""

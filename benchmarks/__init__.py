"""Benchmarks of speed and memory. benchmarks/results has the results with machine, date, commit and
command."""

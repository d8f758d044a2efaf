"""Benchmarks of speed and memory. docs/results.md has the results with machine, date, commit and
command."""

"""Benchmarks of speed and memory. docs/benchmarks.md has the results with machine, date, commit and command."""

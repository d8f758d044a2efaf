"""What measures speed and memory. Results are kept in docs/benchmarks.md with machine, date, commit and command."""

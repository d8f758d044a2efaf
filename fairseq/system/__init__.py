"""The machine: files, checksums, terminal, limits, worker processes."""

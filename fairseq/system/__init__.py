"""The machine: files, checksums, terminal, limits, HTML pages, worker processes."""

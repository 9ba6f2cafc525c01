"""Configuration: the schema of every process, and the loader. Imports no torch, so that `--help` is fast."""

"""Configuration: what can be set, how it is read, and how it is shown. Imports no torch, so that `--help` is fast.

What can be set, a class a section, a docstring a key:
    shared, inference, orchestrator, trainer, evals, roots (rl), algorithms, artifacts, monitors; pending: what nothing
    reads yet; schema: questions about these classes
How it is read:
    load -> reading.{argv, toml, sources} -> compat (other spellings) -> reading.sharing -> roots.prepare ->
    reading.validation -> reading.complaints
How it is shown:
    command (what every command does with its command line), help, explain, reference (docs/config.md), writing
"""

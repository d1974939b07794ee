# The ways to set up, run and test this project. `make` alone lists them.
#
#   PYTHON=python3.12        the interpreter the virtual environment is made from (3.11 or newer)
#   ARGS="-k leases -x"      passed on to pytest
#   JOBS=4                   how many tests run at a time; they measure times, so not more than there are cores
#   SEEDS=0:5000000          which random walks of the protocol `make soak` runs
#   PIP_ARGS="--index-url …" passed on to pip, to take torch from another place
#   PREFIX=/opt/elasticd     where `make install` puts the versions; DESTDIR=DIR puts all of it below DIR and leaves this machine alone
#   FROM_VENV=.venv          `make install` uses the packages of this environment instead of installing torch and the rest
#   WHEEL=FILE               `make install` takes this wheel instead of building one

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
SEEDS ?= 0:2000000
PIP_ARGS ?=
PREFIX ?= /opt/elasticd
DESTDIR ?=
FROM_VENV ?=
WHEEL ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
BENCHES := $(filter-out bench/_%,$(sort $(wildcard bench/*.py)))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)

.PHONY: help setup run test test-gpu test-cluster check soak bench install uninstall clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP) ## make the virtual environment and install everything, once

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "error: $(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and the rest into $(VENV); the first time takes minutes"
	@$(PIP) -c constraints.txt '$(TORCH)'
	@$(PIP) -c constraints.txt -e '.[dev,local]'
	@touch $@

run: $(STAMP) ## train the digits on two nodes of this machine through a kill, a join and a drain, and count what that cost: nothing
	@$(BIN)/python examples/run_digits.py

test: $(STAMP) ## run every test that needs neither root nor a GPU nor many minutes
	@$(BIN)/python -m pytest -q -m 'not root and not gpu and not slow' -n $(JOBS) --dist loadfile $(ARGS)

test-gpu: $(STAMP) ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -q -m gpu $(ARGS)

# Root for namespaces and mounts, and for other users: most boot hosts of their own. .ci/run brings what they need.
test-cluster: $(if $(filter 0,$(shell id -u)),$(STAMP)) ## run the tests that need root: several hosts with a systemd each, other users
	@if [ "$$(id -u)" != 0 ]; then echo "test-cluster: skipped, it needs root"; else $(BIN)/python -m pytest -q -m 'root and not slow' $(ARGS); fi

check: $(STAMP) ## ruff, mypy --strict, and the import arrows
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -p no:randomly tests/test_arrows.py

soak: $(STAMP) ## walk the protocol at random, millions of times: SEEDS=from:to
	@$(BIN)/python -m tests.model.run --seeds $(SEEDS) --jobs $$(nproc) $(ARGS)

bench: $(STAMP) ## run every bench in its quick form
	@test -n '$(BENCHES)' || echo "there is no bench yet: none in bench/*.py"
	@for name in $(basename $(notdir $(BENCHES))); do echo "== bench.$$name"; $(BIN)/python -m bench.$$name --quick; done

INSTALL = $(PYTHON) -m deploy.install --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

install: ## install the service: PREFIX, DESTDIR, FROM_VENV, WHEEL, PYTHON, PIP_ARGS; see docs/ten-nodes.md
	@$(INSTALL) --from-venv '$(FROM_VENV)' --wheel '$(WHEEL)' --pip-args '$(PIP_ARGS)' install

uninstall: ## take the service away; configuration and logs stay
	@$(INSTALL) uninstall

clean: ## remove caches and the runs
	@rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## and the virtual environment
	@rm -rf $(VENV)

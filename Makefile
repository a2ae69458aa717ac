# SPDX-License-Identifier: Apache-2.0
# The whole developer interface. Each target works on a fresh clone with python3 and make alone:
# what it needs is set up first, in .venv, and only again when pyproject.toml or a pin changes.
#
#   make help

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
HUNT_ARGS ?= tests/unit
CLUSTER_ARGS ?=

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check --quiet
native_c = $(shell git ls-files 'native/*.c' 'native/*.h' 2>/dev/null || find native -name '*.[ch]')

.DEFAULT_GOAL := help
.PHONY: help demo test unit hunt lint format types native testbed cluster cluster-down bench plot docs wheel clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: native ## two programs share a simulated GPU, before your eyes
	@$(VENV)/bin/allot demo

test: lint types $(VENV)/.developer native testbed ## lint, types and every test
	$(python) -m pytest $(PYTEST_ARGS)

unit: $(VENV)/.developer ## the tests that need no process but their own
	$(python) -m pytest tests/unit $(PYTEST_ARGS)

hunt: $(VENV)/.developer ## property tests with examples that nobody has tried, up to 2,000 of each
	HYPOTHESIS_PROFILE=thorough $(python) -m pytest -m hypothesis --timeout=3600 $(HUNT_ARGS)

lint: $(VENV)/.developer ## ruff, import-linter, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/clang-format --dry-run --Werror $(native_c)

format: $(VENV)/.developer ## rewrite Python and C in the house style
	$(VENV)/bin/ruff check --fix --exit-zero .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(native_c)

types: $(VENV)/.developer ## mypy, strict
	$(VENV)/bin/mypy

native: $(VENV)/.installed ## the native libraries of this machine, as they ship
	@$(python) tools/build_native.py --quiet

# Once for each set of versions, 6 minutes on two cores; nothing where they could not run.
testbed: $(VENV)/.installed ## the programs of the test cluster: Kubernetes, etcd, containerd
	@PYTHONPATH=tests/cluster $(python) -m testbed build --if-usable >/dev/null

cluster: native testbed ## a real Kubernetes with simulated GPUs on this machine, until Ctrl-C
	@PYTHONPATH=tests/cluster $(python) -m testbed up $(CLUSTER_ARGS)

cluster-down: $(VENV)/.installed ## ends it from elsewhere; removes what one leaves that was killed
	@PYTHONPATH=tests/cluster $(python) -m testbed down $(CLUSTER_ARGS)

bench: native testbed ## what shares cost, and how well they hold; the node agent on a real kubelet
	$(python) bench/run.py
	$(python) bench/compute.py
	$(python) bench/node_agent.py

plot: native ## docs/images/compute.svg: guarantee, ceiling and borrowing over time
	@$(pip) install --constraint constraints.txt --group bench
	$(python) bench/plot.py

docs: $(VENV)/.developer ## regenerate docs/reference/cli.md
	$(python) tools/generate_cli_reference.py

wheel: $(VENV)/.developer ## dist/*.whl, with the libraries of both architectures
	$(python) -m hatchling build -t wheel

clean: ## everything that is made here
	rm -rf $(VENV) build dist native/build src/allotment/_native docs/_build
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# ---- set-up --------------------------------------------------------------------------------------

$(VENV)/.made:
	@echo "setting up $(VENV) ... (once, some minutes)"
	@$(PYTHON) tools/make_venv.py $(VENV)
	@$(pip) install --constraint constraints.txt pip
	@touch $@

# What `allot` needs to run, and what its build needs. `native` builds the libraries.
$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt hatch_build.py
	@echo "setting up $(VENV) ... what allot needs"
	@$(pip) install --constraint constraints.txt --group build
	@ALLOTMENT_NATIVE=later \
	  $(pip) install --constraint constraints.txt --no-build-isolation --editable ".[kubernetes]"
	@# An editable install compiles nothing; `allot` should start fast from the first time on.
	@$(python) -m compileall -q src
	@touch $@

$(VENV)/.developer: $(VENV)/.installed pyproject.toml constraints.txt
	@echo "setting up $(VENV) ... what its tests need"
	@$(pip) install --constraint constraints.txt --group dev
	@# For ptxas alone, which reads our PTX; the compilers it depends on would be 170 MB more.
	@$(pip) install --constraint constraints.txt --no-deps nvidia-cuda-nvcc
	@touch $@

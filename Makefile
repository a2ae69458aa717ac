# SPDX-License-Identifier: Apache-2.0
# The whole developer interface. Each target works on a fresh clone with python3 and make alone:
# what it needs is set up first, in .venv, and only again when pyproject.toml or a pin changes.
#
#   make help

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Four on two cores: half of them mostly wait for the test cluster's servers.
WORKERS ?= $(shell echo $$((2 * $$(nproc))))
HUNT_ARGS ?= tests/unit
CLUSTER_ARGS ?=
IMAGE_ARGS ?=
PACKAGES_ARGS ?=
BENCH ?=

python := $(VENV)/bin/python
# Tests start makes of their own: a `make -j` above must not count their jobs. What one process has
# compiled of the tests the others load.
pytest := env -u MAKEFLAGS -u PYTHONDONTWRITEBYTECODE $(python) -m pytest
pip := $(python) -m pip --disable-pip-version-check --quiet
# Also where there is no git, or the git of another project around an unpacked sdist.
native_c = $(or $(shell git ls-files 'native/*.c' 'native/*.h' 2>/dev/null), \
  $(shell find native -name build -prune -o -name '*.[ch]' -print))

.DEFAULT_GOAL := help
.PHONY: help demo test tests test-all unit coverage coverage-native hunt lint audit format types native testbed cluster cluster-down bench plot docs wheel image packages clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: native ## two programs share a simulated GPU
	@$(VENV)/bin/allot demo

# With -j the tests begin while mypy, one long process, still runs.
test: lint types tests ## lint, types and the tests: 20 minutes

# Measured tests come after the others, one on each core: they mostly wait for the simulated GPU.
# 5: none of the selected tests is one.
tests: $(VENV)/.developer native testbed
	$(pytest) -n $(WORKERS) -m "not thorough and not measured" $(PYTEST_ARGS)
	$(pytest) -n $$(nproc) -m "not thorough and measured" $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-all: lint types $(VENV)/.developer native testbed ## everything, with the thorough tests: long properties, all sanitizers, arm64
	HYPOTHESIS_PROFILE=long COLD_COMMANDS=1 $(pytest) -n $(WORKERS) -m "not measured" --timeout=3600 $(PYTEST_ARGS)
	$(pytest) -n $$(nproc) -m measured $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(MAKE) --no-print-directory audit

unit: $(VENV)/.developer ## the tests that need no process but their own
	$(python) -m pytest -n $(WORKERS) $(or $(UNIT),tests/unit) $(PYTEST_ARGS)

# Both show their figures also after a failed test, and fail then. Absolute: tests start `allot` in other folders.
coverage: $(VENV)/.developer native ## which lines of Python the tests reach: build/coverage; COVERAGE_TESTS= narrows
	@mkdir -p build/coverage
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(python) -m pytest -n $(WORKERS) -m "not thorough and not measured" \
	  --cov --cov-report=html:build/coverage/python --cov-report=term:skip-covered \
	  $(or $(COVERAGE_TESTS),tests/unit tests/local) $(PYTEST_ARGS)

# A copy of the package, with libraries that count: what `make native` built stays as it is.
coverage_package := build/coverage/package
coverage_build := native/build/$(shell uname -m)-coverage
coverage-native: $(VENV)/.developer native ## which lines of C the tests reach; needs gcc
	$(MAKE) -C native -s CC=gcc COVERAGE=1
	@find $(coverage_build) -name '*.gcda' -delete
	@rm -rf $(coverage_package) && mkdir -p $(coverage_package) build/coverage/native
	@cp -r src/allotment $(coverage_package)/ && cp -r $(coverage_build)/*.so $(coverage_build)/simulated \
	  $(coverage_package)/allotment/_native/$(shell uname -m)/
	@# Measured tests may fail here: this build is slower than what they compare with. Their lines count.
	export CC=gcc NATIVE_COVERAGE=1 COLD_COMMANDS=1 PYTHONPATH=$(CURDIR)/$(coverage_package); \
	  tests="$(or $(COVERAGE_TESTS),tests/native tests/unit/ledger tests/unit/leases)"; run="$(python) -m pytest --timeout=300"; \
	  $$run -n $(WORKERS) -m "not thorough and not measured" -k "not thread and not address" $$tests $(PYTEST_ARGS); \
	  status=$$?; $$run -m "measured and not thorough" -k "not thread and not address" $$tests $(PYTEST_ARGS); \
	  $(VENV)/bin/gcovr --config native/gcovr.cfg && exit $$status

hunt: $(VENV)/.developer ## property tests with new examples, up to 2,000 of each
	HYPOTHESIS_PROFILE=thorough $(python) -m pytest -m hypothesis --timeout=3600 $(HUNT_ARGS)

lint: $(VENV)/.developer ## ruff, import-linter, deptry, clang-format, plain English
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	@# What ships has requirements of its own; everything else may use the groups as well.
	$(VENV)/bin/deptry src
	$(VENV)/bin/deptry . src tools tests/cluster tests/twins \
	  --non-dev-dependency-groups build,cluster,lint,test,bench,docs --ignore DEP002
	$(VENV)/bin/clang-format --dry-run --Werror $(native_c)
	$(python) tools/check_words.py

audit: $(VENV)/.developer ## known vulnerabilities in the pinned versions; AUDIT=offline where OSV is out of reach
	@$(pip) install --constraint constraints.txt --group audit
	@$(python) tools/audit.py

format: $(VENV)/.developer ## rewrite Python and C in the house style
	$(VENV)/bin/ruff check --fix --exit-zero .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(native_c)

types: $(VENV)/.developer ## mypy, strict
	$(VENV)/bin/mypy

native: $(VENV)/.installed ## the native libraries of this machine, as they ship
	@$(python) tools/build_native.py --quiet

# Once for each set of versions, some 7 minutes on two cores; nothing where they could not run.
testbed: $(VENV)/.installed ## the programs of the test cluster: Kubernetes, etcd, containerd, helm
	@PYTHONPATH=tests/cluster $(python) -m testbed build --if-usable >/dev/null

cluster: native testbed ## a real Kubernetes with simulated GPUs on this machine, until Ctrl-C
	@PYTHONPATH=tests/cluster $(python) -m testbed up $(CLUSTER_ARGS)

cluster-down: $(VENV)/.installed ## end a cluster and remove its files
	@PYTHONPATH=tests/cluster $(python) -m testbed down $(CLUSTER_ARGS)

bench: native testbed ## what shares cost, and how well they hold; BENCH="launch allocate" narrows
	@$(pip) install --constraint constraints.txt --group bench
	$(python) -m bench $(BENCH)

plot: native ## docs/images/compute.svg: guarantee, ceiling and borrowing over time
	@$(pip) install --constraint constraints.txt --group bench
	$(python) -m bench.compute.plot

docs: $(VENV)/.developer ## the documentation site in build/site, generated parts renewed
	$(python) tools/generate_cli_reference.py
	$(python) tools/generate_man_pages.py
	$(python) tools/generate_facts.py
	$(python) tools/generate_monitoring.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

wheel: $(VENV)/.developer ## dist/*.whl, with the libraries of both architectures
	$(python) -m hatchling build -t wheel

image: $(VENV)/.installed ## the container image of both architectures in build/image, without Docker; IMAGE_ARGS= narrows
	$(python) tools/build_image.py $(IMAGE_ARGS)

packages: $(VENV)/.installed ## .deb and .rpm of both architectures in build/packages; needs Go; PACKAGES_ARGS= narrows
	$(python) tools/build_packages.py $(PACKAGES_ARGS)

clean: ## remove all built files
	rm -rf $(VENV) build dist native/build src/allotment/_native
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
	@$(pip) install --constraint constraints.txt --group build --group cluster
	@ALLOTMENT_NATIVE=later \
	  $(pip) install --constraint constraints.txt --no-build-isolation \
	    --editable ".[kubernetes,tracing]"
	@# An editable install compiles nothing; `allot` should start fast from the first time on.
	@$(python) -m compileall -q src
	@touch $@

$(VENV)/.developer: $(VENV)/.installed pyproject.toml constraints.txt
	@echo "setting up $(VENV) ... what its tests need"
	@$(pip) install --constraint constraints.txt --group dev
	@# For ptxas alone, which reads our PTX; the compilers it depends on would be 170 MB more.
	@$(pip) install --constraint constraints.txt --no-deps nvidia-cuda-nvcc
	@touch $@

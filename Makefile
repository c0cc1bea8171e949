# `make demo` shows Pipollux at work, `make test` tests it.
# Everything is installed into .venv from pyproject.toml, pinned by constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start Python some hundred times: it is not to compile the sources each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test tests style types test-exhaustive test-kubernetes test-gpu gpu-day lint format docs reference clean

help:
	@echo "make demo    two training jobs under the scheduler, and a report in demo-report/"
	@echo "make test    lint, types, layers, and the tests: the same verdict each time"
	@echo "make test-exhaustive  what that leaves out: whole grids, fresh seeds, long runs"
	@echo "make test-kubernetes  the tests on real kubelets, which .ci/kubernetes builds"
	@echo "make test-gpu  the tests on a GPU, with a torch that sees it in .venv"
	@echo "make gpu-day   tests and measurements on a GPU, results in benchmarks/gpu/results"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make format  let ruff rewrite the sources"
	@echo "make docs    the documentation site, in site/"
	@echo "make reference  write the generated pages of docs/reference"
	@echo "make clean   remove .venv and what the demo left"

setup: $(STAMP)

# The stamp is written last, so an interrupted installation is simply run again.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a minute or a few, as PyTorch is large."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pipollux needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps adaptdl
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/pipollux demo --folder demo-report

# How many processes `auto` is stands in tests/conftest.py. Tests of a file begin together, as they
# share fixtures; who has nothing left to do takes over from the others.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# Failed tests run once more, each alone, after all others (tests/reruns.py). Those that pass then are
# appended to this file; `make test FLAKY=` reruns none.
FLAKY ?= flaky-tests.txt
RERUN := --rerun-failed="$(FLAKY)"

# mypy takes a minute on one core, which the tests would wait for.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types tests

tests: $(STAMP)
	$(PYTEST) $(RERUN)

# Other examples each time, unless SEED says which: it stands in the command that make prints. SHARE
# is N for one test in N of each module, drawn by the seed.
test-exhaustive: SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
test-exhaustive: SHARE ?= 1
test-exhaustive: $(STAMP)
	$(PYTEST) --exhaustive --hypothesis-seed=$(SEED) --share=$(SHARE) $(RERUN)

# One cluster for all of them, so one process.
test-kubernetes: $(STAMP)
	$(BIN)/python -m pytest -n 0 --kubernetes $(RERUN)

# One GPU does for all of them; processes of a test share it.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -n 4 --gpu

# What is to be measured once a GPU is there, for nine minutes at most.
gpu-day: $(STAMP)
	$(BIN)/python benchmarks/gpu/day.py

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Warnings are errors, links and anchors that lead nowhere too. pdoc writes the API pages last.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --site-dir site
	$(BIN)/python docs/api.py site/api

reference: $(STAMP)
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) site demo-report .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

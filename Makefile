# Every target installs what it needs on first use; PYTHON names the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
# More than the two cores of a small machine: many tests wait for other processes
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-all mutants check clean

train: .venv/ready
	$(BIN)/ithaca train

test: .venv/ready
	$(PYTEST)

test-all: .venv/ready
	$(PYTEST) -m ''

# Mutation testing: mistakes that the tests must notice, each in a copy of the tree
mutants: .venv/ready
	$(BIN)/python tests/mutants/run.py

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# hatchling comes first and from the same pins, so that the build of the project fetches nothing unpinned
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache

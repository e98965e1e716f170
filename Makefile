# Every target installs what it needs on first use; PYTHON names the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-all check clean

train: .venv/ready
	$(BIN)/ithaca train

test: .venv/ready
	$(BIN)/pytest

test-all: .venv/ready
	$(BIN)/pytest -m ''

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

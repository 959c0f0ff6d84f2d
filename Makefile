# make install, bench, test, test-exhaustive, check, perf, clean. CI calls check and both tests.

PYTHON ?= python3
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile
PERF := $(wildcard perf/*.py)

.PHONY: install bench test test-exhaustive check perf clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

bench: install
	$(BIN)/python run_bench.py run workloads/suites/quick.yaml --output runs

test: install
	$(PYTEST) -m "not exhaustive"

test-exhaustive: install
	$(PYTEST) -m exhaustive

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

perf: install
	set -e; for file in $(PERF); do PYTHONPATH=. $(BIN)/python $$file; done

clean:
	rm -rf $(VENV) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache \
	  .import_linter_cache .hypothesis

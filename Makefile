# Every target sets up .venv by itself when it is missing or older than pyproject.toml; otherwise that step is a stat call.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-real lint bench coverage-matrix clean

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvrelay into $(VENV) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/kvrelay demo

test: lint
	$(BIN)/python -m pytest -m "not real"

lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python -m bench

coverage-matrix: $(STAMP)
	@$(BIN)/python -m tests.coverage_matrix

clean:
	rm -rf $(VENV) dist build

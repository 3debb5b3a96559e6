# Every target sets up .venv by itself when it is missing or older than pyproject.toml; otherwise that step is a stat call.
# What the product needs is there in half a minute. What its tests need comes on top, and takes some minutes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRODUCT := $(VENV)/.product
STAMP := $(VENV)/.installed
MOONCAKE := $(VENV)/.mooncake
# Many tests wait for processes that they started: one more job than CI has cores. Modules stay whole: their tests share fleets.
JOBS ?= 3

.PHONY: demo test test-real lint bench coverage-matrix chromium prometheus clean

$(PRODUCT): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvrelay into $(VENV) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(STAMP): $(PRODUCT)
	@echo "installing what its tests need into $(VENV) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(PRODUCT)
	$(BIN)/kvrelay demo

test: lint chromium
	$(BIN)/python -m pytest -m "not real" -n $(JOBS) --dist loadscope

# Against real engines (vLLM, llama.cpp, SGLang's cache, on CPU) and servers (Valkey, S3, Mooncake, Prometheus). The first run installs the
# engines into a cache of their own (some minutes,
# 3.8 GB).
test-real: $(STAMP) $(MOONCAKE) prometheus
	@status=0; \
	$(BIN)/python -m pytest -m "real and not cpu_bound" tests/real || status=$$?; \
	$(BIN)/python -m pytest -m "real and cpu_bound" -n $(JOBS) tests/real || status=$$?; \
	exit $$status

lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python -m bench

coverage-matrix: $(STAMP)
	@$(BIN)/python -m tests.coverage_matrix

# The report page is tested in a real browser, from the distribution's package.
chromium:
	@command -v chromium >/dev/null || { \
	  echo "installing chromium (Debian package) for the page tests ..." >&2; \
	  as_root=$$(test "$$(id -u)" = 0 || echo sudo); \
	  $$as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -y -qq chromium >/dev/null; }

# Scrapes a run and tests the alert rules, from the distribution's package.
prometheus:
	@command -v promtool >/dev/null || { \
	  echo "installing prometheus (Debian package) for the tests of dashboard and alerts ..." >&2; \
	  as_root=$$(test "$$(id -u)" = 0 || echo sudo); \
	  $$as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -y -qq prometheus >/dev/null; }

# Mooncake's wheel (140 MB) needs two libraries of the distribution; where they cannot be had its tests say so and are skipped.
$(MOONCAKE): $(STAMP)
	@ldconfig -p | grep -q librdmacm.so.1 || { \
	  echo "installing libibverbs1, librdmacm1 and libnuma1 (Debian packages) for the tests of Mooncake Store ..." >&2; \
	  as_root=$$(test "$$(id -u)" = 0 || echo sudo); \
	  $$as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -y -qq libibverbs1 librdmacm1 libnuma1 >/dev/null; } || true
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mooncake]' || true
	@touch $@

clean:
	rm -rf $(VENV) dist build

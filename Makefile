# Every target installs what it needs into .venv first.

PYTHON ?= python3
VENV := .venv
comma := ,
BIN := $(VENV)/bin

# MLX's back end: Metal on macOS; on Linux CUDA if its driver is there, else the CPU.
CUDA := $(shell nvidia-smi 2>/dev/null | grep -o 'CUDA Version: [0-9]*' | grep -o '[0-9]*$$')
BACKEND ?= $(if $(filter-out Linux,$(shell uname -s)),metal,$(if $(CUDA),$(if $(filter 12,$(CUDA)),cuda12,cuda13),cpu))
EXTRA := $(if $(filter-out metal,$(BACKEND)),$(comma)$(BACKEND))
INSTALLED := $(VENV)/.installed-$(BACKEND)
DEVELOPS := $(VENV)/.installed-dev-$(BACKEND)

# Whoever tries mlx-flash gets what it runs with; tests and checks need much more.
.PHONY: demo bench verify test test-rest test-quick test-optimized test-compat zoo check format clean

demo: $(INSTALLED)  ## run a model in a third of its size, then in memory; MODEL=DIR takes yours instead of building one
	$(BIN)/python scripts/demo.py $(if $(MODEL),--model '$(MODEL)')

bench: $(INSTALLED)  ## compare speeds and memory with mlx-lm, in some eight minutes; JSON=FILE keeps all numbers
	$(BIN)/python benchmarks/bench.py $(if $(JSON),--json '$(JSON)')

verify: $(INSTALLED)  ## compare small models of each kind with mlx-lm, bit for bit, and save receipts
	$(BIN)/python scripts/verify.py

# Three processes keep two processors busy while tests wait; the tests of a file stay in one, and the slowest files come first.
# `--write-durations` notes how long each file takes, in tests/durations.json.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(DEVELOPS)  ## run every test of the package, with at most two cases of each
	$(PYTEST) -m 'not rest'

test-rest: $(DEVELOPS)  ## run what `make test` leaves out: all other cases, and the tests of benchmarks/
	$(PYTEST) -m rest

test-quick: $(DEVELOPS)  ## run a fast part of the tests, some of every folder, in a minute or so
	$(PYTEST) -m quick

# Assertions of the tests still run, since pytest rewrites them; those of the package do not.
test-optimized: $(DEVELOPS)  ## run some tests of generation without the package's assertions, as `python -O` does
	$(BIN)/python -O -m pytest -W 'ignore:assertions not in test modules' tests/streaming/test_loans.py tests/generation/test_generation.py -k 'random or last_token'

# The oldest release that pyproject.toml allows; `make test-compat MLX_LM=0.32.2` runs another one.
MLX_LM ?= 0.32.1
COMPAT := .venv-mlx-lm-$(MLX_LM)
COMPAT_TESTS := $(foreach test,compat dropped layers generation patch prefixes serving kv_cache forms guard server cli monitor talk,$(wildcard tests/*/test_$(test).py))

test-compat: $(COMPAT)/.installed  ## run what depends on libraries, with their oldest releases and release MLX_LM of mlx-lm
	$(COMPAT)/bin/python -m pytest $(COMPAT_TESTS)

zoo: $(DEVELOPS)  ## run every architecture of mlx-lm, stock and streamed, and compare bit for bit
	$(BIN)/python scripts/zoo.py --jobs 2

check: $(DEVELOPS)  ## lint, type-check, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

format: $(DEVELOPS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-mlx-lm-* models .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mlx-flash needs Python 3.11 or newer. Hint: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	@touch $@

$(INSTALLED): pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install -qq --editable '.[server$(EXTRA)]'
	@touch $@

# It includes what the other targets need.
$(DEVELOPS): pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install -qq --editable '.[dev$(EXTRA)]'
	@touch $(INSTALLED) $@

# Of the libraries that it does not share with mlx-lm, the oldest that pyproject.toml allows.
OLDEST = $(shell sed -n '/^dependencies/,/^]/p;/^server/p;/^compress/p' pyproject.toml | grep -o '"[a-z_-]*>=[0-9.]*' \
	| tr -d '"' | grep -v '^mlx\|^numpy\|^regex' | sed 's/>=/==/')

$(COMPAT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install -qq --editable '.[dev$(EXTRA)]'
	$(COMPAT)/bin/python -m pip install -qq mlx-lm==$(MLX_LM) $(OLDEST)
	@touch $@
